"""Where the words go: train.log and the screen for ours, nowhere for Lightning's tips and hints."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from kinfolk.errors import KinfolkWarning
from kinfolk.files import telling
from kinfolk.foreign import printable

FILE_ONLY = "file_only"
"""Key of a log record's `extra`: True keeps it off the screen."""


class _Screen(logging.Handler):
    """Prints through the console that may be drawing a bar at the same time."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, FILE_ONLY, False):
            self.console.print(printable(record.getMessage()), markup=False, highlight=False, soft_wrap=True)


class _File(logging.FileHandler):
    """Writes lines of printable text. A log that can't be written, as on a full disk, ends no training."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 — logging's name
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to(file: Path | None, console: Console | None) -> Iterator[None]:
    """Sends the messages of "kinfolk" to a file (appended) and a console, for as long as the context lasts."""
    logger = logging.getLogger("kinfolk")
    handlers: list[logging.Handler] = []
    if file is not None:
        with telling(file):
            handlers.append(_File(file, encoding="utf-8", errors="backslashreplace"))
        handlers[-1].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    if console is not None:
        handlers.append(_Screen(console))
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.propagate = propagate
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


@contextmanager
def held_warnings() -> Iterator[list[str]]:
    """Fills the list with the library's own warnings, to be logged once there is a log; those of others pass as they would."""
    held: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", KinfolkWarning)
        yield held
    for warning in caught:
        if issubclass(warning.category, KinfolkWarning):
            held.append(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silences Lightning's advertisements, hardware lists and hints about loaders and intervals, which do not apply here; errors remain."""
    loggers = [logging.getLogger(name) for name in ("lightning", "lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
