"""Errors, warnings and progress for users, and the safe display of text from outside.

Text from outside may contain line breaks or escape sequences of a terminal, or look like a formula
of a spreadsheet. Messages and logs show it with `short`, pages with `without_controls`, CSV files
with `escape_cell`, which `unescape_cell` undoes.
"""

from __future__ import annotations

import csv
import difflib
import importlib
import io
import re
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import ClassVar, TypeVar

Value = TypeVar("Value")
LONGEST = 160
_FORMULA = "=+-@＝＋－＠"
_ESCAPES = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(.))", re.DOTALL)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}


def require(right: bool, name: str, value: object, must: str) -> None:
    """Refuses a wrong argument: "`alpha` (=1.3) must be in [0, 1]"."""
    if not right:
        raise UsageError(f"`{name}` (={value!r}) must be {must}")


def require_at_least(least: int, **numbers: float | None) -> None:
    for name, number in numbers.items():
        require(number is None or number >= least, name, number, f"at least {least}")


def require_choice(name: str, value: object, choices: Sequence[str]) -> None:
    require(value in choices, name, value, f"one of {', '.join(choices)}")


def short(text: str, longest: int = LONGEST) -> str:
    """Printable, without the middle of a long text."""
    text = printable(text)
    return text if len(text) <= longest else f"{text[: longest // 2]}…{text[1 - longest // 2 :]}"


def printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def without_controls(value: object) -> object:
    """For a page: a text with its control characters escaped; other values as they are."""
    if type(value) is not str:
        return value
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), value)


def escape_cell(text: str) -> str:
    """A text for a cell of a CSV file: printable, not a formula, and different for every text."""
    text = printable(text.replace("\\", "\\\\"))
    return f"\\{text}" if text[:1] and text[0] in _FORMULA else text


def unescape_cell(cell: str) -> str:

    def letter(found: re.Match[str]) -> str:
        number = found[1] or found[2] or found[3]
        if number is None:
            return _LETTERS.get(found[4], found[4])
        return chr(int(number, 16)) if int(number, 16) < 0x110000 else "\ufffd"

    return _ESCAPES.sub(letter, cell)


def utf8_key(key: str) -> str:
    return key.encode("utf-8", "backslashreplace").decode()


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(
        [escape_cell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows
    )
    return file.getvalue()


class KinfolkError(ValueError):
    """An error that the user can fix; the command line shows its message without a traceback."""

    def __init__(self, message: str = "") -> None:
        super().__init__(short(message, 4000))


class UsageError(KinfolkError):
    """Wrong use: an unknown name, a value out of range, or options that exclude each other."""


class InterruptedRunError(KinfolkError):
    """A signal has ended a training, which can be resumed from its last checkpoint. The newest is
    in `latest`, even where the code that was running answered with another error."""

    latest: ClassVar[InterruptedRunError | None] = None

    def __init__(self, message: str, signal: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.signal = int(signal)
        InterruptedRunError.latest = self


def plural(number: int, noun: str) -> str:
    """A number with its noun: 1 epoch, 1,200 classes."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def duration(seconds: float) -> str:
    """A time in its two largest units: 12 s, 3 min 20 s, 2 h 05 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def install_hint(packages: str, extra: str | None = None) -> str:
    """kinfolk's `extra` is installed from a clone."""
    clone = "" if extra is None else f", or with `pip install '.[{extra}]'` in a clone of kinfolk"
    return f"install it with `pip install {packages}`{clone}"


def import_optional(
    module: str, package: str, extra: str | None = None, what: str = "this model"
) -> ModuleType:
    root = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError, OSError) as error:
        if getattr(error, "name", None) != root:
            raise KinfolkError(f"{module} is installed but can't be imported: {error}") from error
        raise UsageError(
            f"{what} needs the package {root}; {install_hint(package, extra)}"
        ) from None


def did_you_mean(name: str, names: Iterable[str], limit: int = 3) -> str:
    """The hint for an unknown name, or "" if no name is near."""
    close = difflib.get_close_matches(name, dict.fromkeys(names), n=limit, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def similar_path(path: Path) -> str:
    """The hint for a path that does not exist, or ""."""
    present = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, present, n=1, cutoff=0.7)
    return f"; did you mean `{short(str(path.with_name(close[0])))}`?" if close else ""


class KinfolkWarning(UserWarning):
    """Something that works but is probably a mistake."""


def warn(message: str) -> None:
    """The warning names the line that called this library."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("kinfolk."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, KinfolkWarning, stacklevel=level)


def warn_if_warmup_too_long(warmup_epochs: int, num_epochs: int, what: str) -> bool:
    """Returns whether it warned. One epoch is a trial."""
    too_long = warmup_epochs >= num_epochs > 1
    if too_long:
        warn(
            f"`warmup_epochs` (={warmup_epochs}) is as long as the training (={num_epochs} epochs):"
            f" there will be no {what}; choose a shorter warm-up"
        )
    return too_long


def warn_if_most_are_flagged(alpha: float | None) -> None:
    if alpha is not None and alpha > 0.5:
        warn(
            f"`alpha` (={alpha:g}) flags most of the negatives; it is the share of negatives that"
            " are false, about 1 / number of classes, so values are small, such as 0.01 to 0.1"
        )


def show_progress(
    values: Iterable[Value], total: int, title: str, *, enabled: bool
) -> Iterator[Value]:
    """Yields `values` and shows on standard error how many of `total` there were."""
    if not enabled:
        yield from values
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        yield from bar.track(values, total, description=title)
