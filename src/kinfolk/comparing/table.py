"""The table over runs and seeds: a record for each row, and which columns of it are shown."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinfolk.comparing.figures import DISTANCES, JOURNAL, SECONDS
from kinfolk.comparing.render import WRITERS, Column
from kinfolk.comparing.runs import One
from kinfolk.comparing.seeds import base_of, counterpart, gap_closed, oracle_of, p_value
from kinfolk.errors import UsageError
from kinfolk.files import write_text

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
