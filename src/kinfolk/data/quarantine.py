"""The files that were refused, and why."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path

from kinfolk.errors import KinfolkError

Refusals = list[tuple[str, str]]


def write_quarantine(refused: Sequence[tuple[str, str]], path: str | Path) -> None:
    """Writes `path,reason` rows, also where there are none: an empty list says that all was well."""
    path = Path(path)
    draft = path.with_name(path.name + ".part")
    with open(draft, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([("path", "reason"), *refused])
    os.replace(draft, path)


def read_quarantine(path: str | Path) -> Refusals:
    """Reads what `write_quarantine` wrote."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    if not rows or rows[0] != ["path", "reason"] or any(len(row) != 2 for row in rows):
        raise KinfolkError(f"`{path}` is not a quarantine file; its columns must be path and reason")
    return [(row[0], row[1]) for row in rows[1:]]


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
    row = io.StringIO()
    csv.writer(row, lineterminator="\n").writerow((key, reason))
    with open(path, "ab", buffering=0) as file:  # one write, so that rows of two ranks do not mix
        file.write(row.getvalue().encode())
