"""The command line: `kinfolk VERB`, one file for each verb.

Nothing heavy is imported before a verb runs, so that help comes at once.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from kinfolk.cli.app import app
from kinfolk.errors import KinfolkError, UsageError

FAILURE, WRONG_USE, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and leaves with its exit code: 0, 1 for a failure, 2 for wrong use, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    try:
        app(words, prog_name="kinfolk")
        sys.exit(0)
    except SystemExit as left:
        if left.code == INTERRUPTED:
            _say("Interrupted", "ended by Ctrl-C.")
        raise
    except KeyboardInterrupt:
        _say("Interrupted", "ended by Ctrl-C.")
        sys.exit(INTERRUPTED)
    except KinfolkError as error:
        _explain(error, str(error), debug)
        sys.exit(WRONG_USE if isinstance(error, UsageError) else FAILURE)
    except Exception as error:
        words_of_error = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {words_of_error[0]}" if words_of_error else type(error).__name__
        _explain(error, what if debug else f"{what.rstrip('.')}. Run again with --debug to see where.", debug)
        sys.exit(FAILURE)


def _explain(error: BaseException, message: str, debug: bool) -> None:
    if debug:
        sys.stderr.write("".join(traceback.format_exception(error)))
    _say("Error", message)


def _say(head: str, message: str) -> None:
    """One message on stderr; nothing in it is taken for markup, and no line is broken where a program reads it."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble((f"{head}: ", "bold red"), message), soft_wrap=not console.is_terminal)
