"""The command line: `kinfolk VERB`, one file for each verb.

Nothing heavy is imported before a verb runs, so that help comes at once.
"""

from __future__ import annotations

import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

from kinfolk.cli.app import app
from kinfolk.errors import KinfolkError, KinfolkWarning, UsageError, printable
from kinfolk.files import why_failed

FAILURE, WRONG_USE, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and leaves with its exit code: 0, 1 for a failure, 2 for wrong use, 130 for Ctrl-C, 143 for SIGTERM."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    warnings.showwarning = _warn
    try:
        app(words, prog_name="kinfolk")
        sys.exit(0)
    except SystemExit as left:
        if left.code == INTERRUPTED:
            _interrupted("ended by Ctrl-C.")
        raise
    except KeyboardInterrupt:
        _interrupted("ended by Ctrl-C.")
        sys.exit(INTERRUPTED)
    except KinfolkError as error:
        number = getattr(error, "signal", None)
        if number is not None:
            _interrupted(str(error))
            sys.exit(128 + int(number))
        _explain(error, str(error), debug)
        sys.exit(WRONG_USE if isinstance(error, UsageError) else FAILURE)
    except Exception as error:
        what = why_failed(error)
        _explain(error, what if debug else f"{what.rstrip('.')}. Run again with --debug to see where.", debug)
        sys.exit(FAILURE)


def _interrupted(message: str) -> None:
    """Whoever presses Ctrl-C again meanwhile neither loses the message nor changes the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _say("Interrupted", message)


def _warn(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: object = None, line: str | None = None
) -> None:
    if issubclass(category, KinfolkWarning):
        _say("Warning", str(message))
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


def _explain(error: BaseException, message: str, debug: bool) -> None:
    if debug:
        sys.stderr.write("".join(traceback.format_exception(error)))
    _say("Error", message)


def _say(head: str, message: str) -> None:
    """One message on stderr; nothing in it is taken for markup, and no line is broken where a program reads it."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble((f"{head}: ", "bold red"), printable(message)), soft_wrap=not console.is_terminal)
