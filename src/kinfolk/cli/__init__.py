"""The application `kinfolk COMMAND` and its exit codes. Heavy modules are imported only when a
command runs, so that `--help` is fast."""

from __future__ import annotations

import inspect
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Annotated, NoReturn

import typer

from kinfolk.cli import audit, compare, eval, lists, outputs, train
from kinfolk.cli.options import examples, flag, name_values, wrap_help
from kinfolk.errors import InterruptedRunError, KinfolkError, KinfolkWarning, UsageError, printable
from kinfolk.files import why_failed

app = typer.Typer(
    name="kinfolk",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _show_version(is_given: bool) -> None:
    if is_given:
        from importlib import metadata

        typer.echo(f"kinfolk {metadata.version('kinfolk')}")
        raise typer.Exit


@app.callback(
    epilog=examples(
        "kinfolk advise photos/",
        "kinfolk train --data photos/ --out runs/photos",
        "kinfolk eval runs/photos --data labelled/ --labels-from-folders",
        "kinfolk COMMAND --help",
    )
)
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar="",
            help="Show the version and exit.",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
    debug: Annotated[bool, flag("--debug", "Show the traceback of an error.", None)] = False,
) -> None:
    """Contrastive representation learning that detects false negatives."""


TRAIN, INSPECT = "Train and use", "Inspect"
COMMANDS: tuple[tuple[str, str, Callable[..., None], str], ...] = (
    ("train", TRAIN, train.train, train.EPILOG),
    ("sweep", TRAIN, compare.sweep, compare.SWEEP_EPILOG),
    ("eval", TRAIN, eval.evaluate, eval.EPILOG),
    ("embed", TRAIN, outputs.embed, outputs.EMBED_EPILOG),
    ("export", TRAIN, outputs.export, outputs.EXPORT_EPILOG),
    ("advise", INSPECT, audit.advise, audit.ADVISE_EPILOG),
    ("audit", INSPECT, audit.audit, audit.EPILOG),
    ("compare", INSPECT, compare.compare, compare.EPILOG),
    ("report", INSPECT, outputs.report, outputs.REPORT_EPILOG),
    ("data", INSPECT, lists.data, lists.DATA_EPILOG),
    ("methods", INSPECT, lists.methods, lists.METHODS_EPILOG),
    ("recipes", INSPECT, lists.recipes, lists.RECIPES_EPILOG),
    ("settings", INSPECT, lists.settings, lists.SETTINGS_EPILOG),
)
for _name, _panel, _function, _epilog in COMMANDS:
    name_values(_function)
    app.command(
        _name,
        rich_help_panel=_panel,
        epilog=_epilog,
        help=wrap_help(inspect.getdoc(_function) or ""),
    )(_function)


FAILURE, USAGE_ERROR, INTERRUPTED = 1, 2, 130
_printed: set[str] = set()  # warnings of this command


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits with 0 for success, 1 for a failure, 2 for a usage error, 130 for
    Ctrl-C, 143 for SIGTERM."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    warnings.showwarning = _warn
    _printed.clear()
    InterruptedRunError.latest = None
    _raise_for_one_ctrl_c()
    try:
        sys.exit(_run([word for word in words if word != "--debug"], "--debug" in words))
    except KeyboardInterrupt:
        sys.exit(_report_interruption())


def _run(words: list[str], debug: bool) -> int:
    try:
        app(words, prog_name="kinfolk")
    except SystemExit as exit_:
        if exit_.code == INTERRUPTED:
            return _report_interruption()
        raise
    except Exception as error:
        if InterruptedRunError.latest is not None:
            return _report_interruption()
        if debug:
            sys.stderr.write("".join(traceback.format_exception(error)))
        message = str(error) if isinstance(error, KinfolkError) else why_failed(error)
        if not debug and not isinstance(error, KinfolkError):
            message = f"{message.rstrip('.')}. Run again with --debug to see the traceback."
        _print("Error", message)
        return USAGE_ERROR if isinstance(error, UsageError) else FAILURE
    return 0


def _raise_for_one_ctrl_c() -> None:
    """From here on only the first Ctrl-C raises KeyboardInterrupt, and none does once a training is
    stopping: one during the clean-up would replace the message and the exit code."""
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


def _report_interruption() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's own shutdown
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


def _print(head: str, message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    console.print(
        Text.assemble((f"{head}: ", "bold red"), printable(message)),
        soft_wrap=not console.is_terminal,
    )
