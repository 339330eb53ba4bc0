"""A comparison as text: the cells as a reader sees them, CSV, Markdown and LaTeX."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kinfolk.foreign import csv_text

Records = Sequence[Mapping[str, Any]]
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "→": r"$\to$", "–": "--", "±": r"$\pm$"}
_LATEX |= {character: f"\\{character}" for character in "&%$#_{}"}


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        key: of the records.
        head: what stands above it.
        kind: "spread" (mean ± deviation), "distance" (the same, with more digits), "count", "gain", "p", "to_oracle" or "gap_closed".
        section: "results", "tests" or "journal"; where the screen is narrow, each is a table of its own.
    """

    key: str
    head: str
    kind: str
    section: str


def cell(record: Mapping[str, Any], column: Column) -> str:
    """The value as a reader sees it, – where there is none."""
    value = record[column.key]
    if value is None:
        return "–"
    if column.kind in ("spread", "distance"):
        digits = 1 if column.kind == "spread" else 4
        deviation = record[f"{column.key}_deviation"]
        return f"{value:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")
    if column.kind == "count":
        return str(len(value))
    if column.kind == "p":
        return f"{value:.3f}" if value >= 0.0005 else "<0.001"
    return f"{value:.0f} %" if column.kind == "gap_closed" else f"{value:+.1f}"


def write_csv(records: Records, columns: Sequence[Column]) -> str:
    """All that the records hold, whatever the columns; empty where there is nothing."""
    rows = ({**record, "seeds": " ".join(map(str, record["seeds"]))} for record in records)
    return csv_text(list(records[0]), [[row[key] for key in records[0]] for row in rows])


def write_markdown(records: Records, columns: Sequence[Column]) -> str:
    lines = [["method", *(column.head for column in columns)], ["---", *("---:" for _ in columns)]]
    lines += [[record["method"], *(cell(record, column) for column in columns)] for record in records]
    return "".join("| " + " | ".join(text.replace("|", r"\|") for text in line) + " |\n" for line in lines)


def write_latex(records: Records, columns: Sequence[Column]) -> str:
    heads = " & ".join(["method", *(_latex(column.head) for column in columns)])
    lines = [f"\\begin{{tabular}}{{l{'r' * len(columns)}}}", r"\toprule", heads + r" \\", r"\midrule"]
    lines += [" & ".join([_latex(record["method"]), *(_number(cell(record, column)) for column in columns)]) + r" \\" for record in records]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


WRITERS: dict[str, Callable[[Records, Sequence[Column]], str]] = {"csv": write_csv, "markdown": write_markdown, "latex": write_latex}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _number(text: str) -> str:
    """Numbers are set as mathematics, so that minus and ± are what they look like."""
    if re.fullmatch(r"[<+\-]?[\d.]+( ± [\d.]+)?( %)?", text):
        return "$" + text.replace("±", r"\pm").replace(" %", r"\,\%") + "$"
    return _latex(text)
