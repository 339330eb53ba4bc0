"""The command line `kinfolk COMMAND`, with one file per command.

Heavy modules are imported only when a command runs, so that `--help` is fast.
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

FAILURE, USAGE_ERROR, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits with its code: 0 for success, 1 for a failure, 2 for a usage error, 130 for Ctrl-C, 143 for SIGTERM."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    warnings.showwarning = _warn
    try:
        app(words, prog_name="kinfolk")
        sys.exit(0)
    except SystemExit as exit_:
        if exit_.code == INTERRUPTED:
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
        _print_error(error, str(error), debug)
        sys.exit(USAGE_ERROR if isinstance(error, UsageError) else FAILURE)
    except Exception as error:
        what = why_failed(error)
        _print_error(error, what if debug else f"{what.rstrip('.')}. Run again with --debug to see the traceback.", debug)
        sys.exit(FAILURE)


def _interrupted(message: str) -> None:
    """Prints the message. Further Ctrl-C is ignored, so that it changes neither the message nor the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _print("Interrupted", message)


def _warn(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: object = None, line: str | None = None
) -> None:
    if issubclass(category, KinfolkWarning):
        _print("Warning", str(message))
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


def _print_error(error: BaseException, message: str, debug: bool) -> None:
    if debug:
        sys.stderr.write("".join(traceback.format_exception(error)))
    _print("Error", message)


def _print(head: str, message: str) -> None:
    """Prints one message on stderr, without markup. Lines are wrapped only in a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble((f"{head}: ", "bold red"), printable(message)), soft_wrap=not console.is_terminal)
