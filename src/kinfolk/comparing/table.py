"""Runs in rows: by method and settings, one for each seed.

The table over runs and seeds: a record for each row, and which columns of it are shown.

A comparison as text: the cells as a reader sees them, CSV, Markdown and LaTeX.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinfolk.comparing.runs import DISTANCES, JOURNAL, SECONDS, One
from kinfolk.comparing.statistics import base_of, counterpart, gap_closed, oracle_of, p_value
from kinfolk.errors import UsageError, csv_text
from kinfolk.files import write_text


def rows_of(runs: Sequence[One]) -> dict[str, list[One]]:
    """Runs of one method and one configuration are a row, one for each seed; settings that tell rows of a method apart are in its name."""
    kinds: dict[str, list[list[One]]] = {}
    for run in runs:
        groups = kinds.setdefault(run.method, [])
        same = next((group for group in groups if group[0].settings == run.settings), None)
        if same is None:
            groups.append([run])
        elif (twin := next((other for other in same if other.seed == run.seed), None)) is not None:
            raise UsageError(f"{twin.path} and {run.path} are of the same method, settings and seed ({run.seed}); leave one of them out")
        else:
            same.append(run)
    frameworks = list(dict.fromkeys(method.partition("+")[0] for method in kinds))
    rows: dict[str, list[One]] = {}
    for method, groups in sorted(kinds.items(), key=lambda kind: (frameworks.index(kind[0].partition("+")[0]), _place(kind[0]))):
        apart = differing([group[0].settings for group in groups])
        for group in groups:
            text = ", ".join(f"{_short(key, apart)} {_value(group[0].settings.get(key))}" for key in apart)
            rows[f"{method} ({text})" if text else method] = sorted(group, key=lambda run: run.seed)
    return rows


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose value is not the same in all."""
    keys = dict.fromkeys(key for each in settings for key in each)
    return [key for key in keys if any(each.get(key) != settings[0].get(key) for each in settings)]


def _place(method: str) -> int:
    """A framework stands before its detectors, and the oracle after them."""
    return 0 if "+" not in method else 2 if "+oracle" in method else 1


def _short(key: str, keys: Sequence[str]) -> str:
    """The last part of a key where that is enough to know it by."""
    last = key.rpartition(".")[2]
    return last if [other.rpartition(".")[2] for other in keys].count(last) == 1 else key


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + " ".join(_value(part) for part in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool | None) else str(value)


ORACLES = ("oracle:attract", "oracle")
ENDINGS = {".csv": "csv", ".md": "markdown", ".tex": "latex"}


@dataclass(frozen=True)
class Comparison:
    """One table over runs and seeds.

    Args:
        records: a mapping for each row: `method`, `seeds`, `base`, `oracle`; of every figure F its mean `F`, `F_deviation` and `F_runs`;
            of what was measured also `F_gain` (above the base), `F_p` (one-sided paired t-test), `F_to_oracle` and `F_gap_closed`.
            Shares and gains are in percent; what there is not is None.
        columns: what of it the table shows.
        figure: what the tests that it shows are of.
        notes: what a reader should know.
    """

    records: list[dict[str, Any]]
    columns: list[Column]
    figure: str
    notes: list[str]

    def to(self, kind: str) -> str:
        """As text: "csv", "markdown" or "latex"."""
        if kind not in WRITERS:
            raise UsageError(f"`kind` (={kind!r}) must be one of {', '.join(WRITERS)}")
        return WRITERS[kind](self.records, self.columns)

    def to_csv(self) -> str:
        """All of `records`, in plain numbers."""
        return self.to("csv")

    def to_markdown(self) -> str:
        return self.to("markdown")

    def to_latex(self) -> str:
        """A `tabular` for the package booktabs."""
        return self.to("latex")

    def save(self, path: str | os.PathLike[str], kind: str | None = None) -> None:
        """Writes the file as `kind`, or as its ending says: .csv, .md or .tex."""
        ending = Path(path).suffix
        if kind is None and ending not in ENDINGS:
            raise UsageError(f"the file (={path}) must end in {', '.join(ENDINGS)}, or its format be given")
        text = self.to(kind or ENDINGS[ending])
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_text(Path(path), text)

    def __str__(self) -> str:
        return self.to_markdown()

    def _repr_markdown_(self) -> str:
        return str(self)


def tabulate(
    rows: Mapping[str, Sequence[One]],
    base: str | None,
    oracle: str | None,
    figure: str | None,
    chosen_columns: Sequence[str] | None,
    notes: Sequence[str],
) -> Comparison:
    """The table of `rows`; see `compare`."""
    for option, row in (("base", base), ("oracle", oracle)):
        if row is not None and not any(row in (name, name.partition(" ")[0]) for name in rows):
            raise UsageError(f"`{option}` (={row}) must be one of the rows: {', '.join(rows)}")
    present = dict.fromkeys(key for runs in rows.values() for run in runs for key in run.figures)
    journal = [key for key in (*JOURNAL, SECONDS) if key in present]
    results = [key for key in present if key not in journal]
    chosen = figure or next(key for key in ("linear", *results) if key in results)
    if chosen not in results:
        raise UsageError(f"`figure` (={figure}) was not measured; there are: {', '.join(results)}")
    records = [_record(name, rows, base, oracle, results, journal) for name in rows]
    short = [key for key in results if any(record[f"{key}_runs"] not in (0, len(record["seeds"])) for record in records)]
    missing = [f"{key} is missing in some runs of a row: its mean is over the others." for key in short]
    columns = _columns(records, results, journal, chosen)
    return Comparison(records, columns if chosen_columns is None else _chosen(columns, chosen_columns), chosen, [*notes, *missing])


def _record(
    name: str, rows: Mapping[str, Sequence[One]], base: str | None, oracle: str | None, results: Sequence[str], journal: Sequence[str]
) -> dict[str, Any]:
    figures = {row: [run.figures for run in runs] for row, runs in rows.items()}
    low = base_of(name, rows, base)
    high = oracle_of(name, rows, base, ORACLES) if oracle is None else counterpart(name, oracle, rows)
    record: dict[str, Any] = {"method": name, "seeds": [run.seed for run in rows[name]], "base": low, "oracle": high}
    for key in (*results, *journal):
        ours = [run[key] for run in figures[name] if key in run]
        record[key] = statistics.mean(ours) if ours else None
        record |= {f"{key}_deviation": statistics.stdev(ours) if len(ours) > 1 else None, f"{key}_runs": len(ours)}
        if key in journal:
            continue
        pairs = [] if low is None else _paired(rows[name], rows[low], key)
        record[f"{key}_gain"] = None if low is None else _difference(figures[name], figures[low], key)
        better, worse = ([pair[side] for pair in pairs] for side in ((1, 0) if _is_distance(key) else (0, 1)))
        record[f"{key}_p"] = p_value(better, worse)
        record[f"{key}_to_oracle"] = None if high in (None, name) else _difference(figures[name], figures[str(high)], key)
        closed = None if high is None else gap_closed(name, figures, base, key, high)
        record[f"{key}_gap_closed"] = None if closed is None else 100 * closed
    return record


def _paired(ours: Sequence[One], base: Sequence[One], key: str) -> list[tuple[float, float]]:
    """The figure in both rows, of the seeds that both have."""
    other = {run.seed: run.figures[key] for run in base if key in run.figures}
    return [(run.figures[key], other[run.seed]) for run in ours if key in run.figures and run.seed in other]


def _difference(ours: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]], key: str) -> float | None:
    lists = [[run[key] for run in runs if key in run] for runs in (ours, other)]
    return statistics.mean(lists[0]) - statistics.mean(lists[1]) if all(lists) else None


def _columns(records: Sequence[Mapping[str, Any]], results: Sequence[str], journal: Sequence[str], chosen: str) -> list[Column]:
    tests = {"gain": "gain", "p": "p", "to_oracle": "to oracle", "gap_closed": "gap closed"}
    alike = len({tuple(record["seeds"]) for record in records}) == 1
    columns = [
        *([] if alike else [Column("seeds", "seeds", "count", "results")]),
        *(Column(key, key, "distance" if _is_distance(key) else "spread", "results") for key in results),
        *(Column(f"{chosen}_{kind}", head, kind, "tests") for kind, head in tests.items()),
        *(Column(key, {**JOURNAL, SECONDS: "s / epoch"}[key], "spread", "journal") for key in journal),
    ]
    return [column for column in columns if any(record[column.key] is not None for record in records)]


def _chosen(columns: Sequence[Column], names: Sequence[str]) -> list[Column]:
    by_name = {column.head.lower(): column for column in columns}
    unknown = next((name for name in names if name.strip().lower() not in by_name), None)
    if unknown is not None:
        raise UsageError(f"there is no column {unknown!r} in this table; there are: {', '.join(column.head for column in columns)}")
    return [by_name[name.strip().lower()] for name in names]


def _is_distance(key: str) -> bool:
    """Whether less of it is better."""
    return key.rpartition(" ")[2] in DISTANCES.values()


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
