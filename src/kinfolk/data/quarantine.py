"""The files that were refused, and why."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from kinfolk.errors import KinfolkError
from kinfolk.files import append_line, first_line, write_text
from kinfolk.foreign import csv_text, shown, unescaped

Refusals = list[tuple[str, str]]


def write_quarantine(refused: Sequence[tuple[str, str]], path: str | Path) -> None:
    """Writes `path,reason` rows, also where there are none: an empty list says that all was well. Names are escaped, see `foreign.py`."""
    write_text(Path(path), csv_text(("path", "reason"), refused))


def read_quarantine(path: str | Path) -> Refusals:
    """Reads what `write_quarantine` wrote."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file, strict=True))
    except FileNotFoundError:
        raise KinfolkError(f"there is no `{shown(str(path))}`; the run folder is incomplete: restore it, or start a new run") from None
    except (OSError, ValueError, csv.Error) as error:
        raise KinfolkError(f"`{shown(str(path))}` is not a readable quarantine file ({first_line(error)}); restore it") from error
    if not rows or rows[0] != ["path", "reason"] or any(len(row) != 2 for row in rows):
        raise KinfolkError(f"`{shown(str(path))}` is not a quarantine file; its columns must be path and reason")
    return [(unescaped(row[0]), unescaped(row[1])) for row in rows[1:]]


def summary(refused: Sequence[tuple[str, str]], total: int, where: str | Path = "quarantine.csv") -> str | None:
    """One line for the screen, or None where nothing was refused."""
    if not refused:
        return None
    return f"{len(refused):,} of {total:,} images {'was' if len(refused) == 1 else 'were'} refused; see {where}"


def add_to_quarantine(key: str, reason: str, path: str | Path) -> None:
    """Appends one row, unless the file has one for this key: several ranks, and several epochs, may find the same image."""
    path = Path(path)
    if not path.exists():
        write_quarantine([], path)
    if any(key == known for known, _ in read_quarantine(path)):
        return
    append_line(path, csv_text(("path", "reason"), [(key, reason)]).split("\n")[1])  # one write: rows of two ranks do not mix
