"""The command line `kinfolk COMMAND`, with one file per command.

Heavy modules are imported only when a command runs, so that `--help` is fast.
"""

from __future__ import annotations

import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from kinfolk.cli.app import app
from kinfolk.errors import InterruptedRunError, KinfolkError, KinfolkWarning, UsageError, printable
from kinfolk.files import why_failed

FAILURE, USAGE_ERROR, INTERRUPTED = 1, 2, 130
_printed: set[str] = set()  # warnings of this command


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits with its code: 0 for success, 1 for a failure, 2 for a usage
    error, 130 for Ctrl-C, 143 for SIGTERM."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    warnings.showwarning = _warn
    _printed.clear()
    InterruptedRunError.latest = None
    _raise_for_one_ctrl_c()
    try:
        sys.exit(_run(words, debug="--debug" in words))
    except KeyboardInterrupt:
        sys.exit(_interrupted())


def _run(words: list[str], debug: bool) -> int:
    """Runs the command and returns its exit code."""
    try:
        app(words, prog_name="kinfolk")
    except SystemExit as exit_:
        if exit_.code == INTERRUPTED:
            return _interrupted()
        raise
    except Exception as error:
        if InterruptedRunError.latest is not None:
            return _interrupted()
        if isinstance(error, KinfolkError):
            _print_error(error, str(error), debug)
            return USAGE_ERROR if isinstance(error, UsageError) else FAILURE
        what = why_failed(error)
        _print_error(
            error,
            what if debug else f"{what.rstrip('.')}. Run again with --debug to see the traceback.",
            debug,
        )
        return FAILURE
    return 0


def _raise_for_one_ctrl_c() -> None:
    """From here on only the first Ctrl-C raises KeyboardInterrupt, and none does once a training is
    stopping.

    A second one during the clean-up would replace the message and the exit code. SIGTERM and
    SIGQUIT still end the process. The handler stays where Lightning restores "the handler from
    before" at the end of a training.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    raised = False

    def on_ctrl_c(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        if not raised and InterruptedRunError.latest is None:
            raised = True
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_ctrl_c)


def _interrupted() -> int:
    """Prints that the command was interrupted and returns the exit code. Python's own shutdown is
    not interrupted by a further Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    error = InterruptedRunError.latest
    _print("Interrupted", "ended by Ctrl-C." if error is None else str(error))
    return INTERRUPTED if error is None else 128 + error.signal


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: str | None = None,
) -> None:
    if issubclass(category, KinfolkWarning):
        if str(message) not in _printed:  # two steps of a command may read the same file
            _printed.add(str(message))
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
    console.print(
        Text.assemble((f"{head}: ", "bold red"), printable(message)),
        soft_wrap=not console.is_terminal,
    )
