"""The table over runs and seeds: rows by method and settings, one record for each row, and its text
as Markdown, LaTeX and CSV."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinfolk.comparing.runs import DISTANCES, SECONDS, TRAINING_METRICS, One
from kinfolk.comparing.statistics import (
    LEVEL,
    base_of,
    counterpart,
    gap_closed,
    holm,
    interval,
    oracle_of,
    p_value,
)
from kinfolk.errors import UsageError, csv_text
from kinfolk.files import write_text


def rows_of(runs: Sequence[One]) -> dict[str, list[One]]:
    """Groups runs of one method and configuration into rows, one run for each seed; settings in
    which rows of a method differ are in the name."""
    kinds: dict[str, list[list[One]]] = {}
    for run in runs:
        groups = kinds.setdefault(run.method, [])
        same = next((group for group in groups if group[0].settings == run.settings), None)
        if same is None:
            groups.append([run])
        elif (twin := next((other for other in same if other.seed == run.seed), None)) is not None:
            raise UsageError(
                f"{twin.path} and {run.path} are of the same method, settings and seed"
                f" ({run.seed}); leave one of them out"
            )
        else:
            same.append(run)
    frameworks = list(dict.fromkeys(method.partition("+")[0] for method in kinds))
    rows: dict[str, list[One]] = {}
    for method, groups in sorted(
        kinds.items(),
        key=lambda kind: (frameworks.index(kind[0].partition("+")[0]), _place(kind[0])),
    ):
        apart = differing([group[0].settings for group in groups])
        for group in groups:
            text = ", ".join(
                f"{_short(key, apart)} {_value(group[0].settings.get(key))}" for key in apart
            )
            rows[f"{method} ({text})" if text else method] = sorted(group, key=lambda run: run.seed)
    return rows


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose values differ."""
    keys = dict.fromkeys(key for each in settings for key in each)
    return [key for key in keys if any(each.get(key) != settings[0].get(key) for each in settings)]


def _place(method: str) -> int:
    """Order of rows: the framework alone, then its detectors, then the oracle."""
    return 0 if "+" not in method else 2 if "+oracle" in method else 1


def _short(key: str, keys: Sequence[str]) -> str:
    """The last part of a key if it is unique, else the whole key."""
    last = key.rpartition(".")[2]
    return last if [other.rpartition(".")[2] for other in keys].count(last) == 1 else key


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + " ".join(_value(part) for part in value) + "]"
    return (
        f"{value:g}"
        if isinstance(value, float)
        else str(value).lower()
        if isinstance(value, bool | None)
        else str(value)
    )


ORACLES = ("oracle:attract", "oracle")
ENDINGS = {".csv": "csv", ".md": "markdown", ".tex": "latex", ".html": "html"}


@dataclass(frozen=True)
class Comparison:
    """One table over runs and seeds.

    Args:
        records: one mapping for each row: `method`, `seeds`, `base`, `oracle`; for every figure F
            its mean `F`, `F_deviation`, `F_runs` and the confidence interval of the mean `F_low`,
            `F_high`; for results also `F_gain` (method − base), `F_pairs` (seeds that both have),
            `F_gain_low` and `F_gain_high` (95 % confidence interval), `F_p` (two-sided paired
            t-test), `F_p_holm` (corrected for the number of methods), `F_verdict` ("better",
            "worse", "not significant" or "no test"), `F_to_oracle` (method − oracle) and
            `F_gap_closed`. Shares and differences are in percent; missing values are None.
        columns: the columns of the table.
        figure: the figure that gains and tests are of.
        notes: remarks for the reader.
        rows: the runs of each row, by its name.
    """

    records: list[dict[str, Any]]
    columns: list[Column]
    figure: str
    notes: list[str]
    rows: Mapping[str, Sequence[One]]

    def to(self, kind: str, folder: str | os.PathLike[str] = ".") -> str:
        """As text: "csv", "markdown", "latex" or "html". Links of the page are relative to
        `folder`."""
        if kind == "html":
            from kinfolk.comparing.page import render

            return render(self, folder)
        if kind not in WRITERS:
            raise UsageError(f"`kind` (={kind!r}) must be one of {', '.join(WRITERS)}, html")
        return WRITERS[kind](self.records, self.columns)

    def to_csv(self) -> str:
        """All of `records` as plain numbers."""
        return self.to("csv")

    def to_markdown(self) -> str:
        return self.to("markdown")

    def to_latex(self) -> str:
        """A `tabular` for the package booktabs."""
        return self.to("latex")

    def to_html(self) -> str:
        """A page with intervals, every seed and curves drawn, in one file; links to the runs are
        relative to the current folder."""
        return self.to("html")

    def sentences(self) -> list[str]:
        """The comparison of each method with its base in words."""
        return [
            sentence(record, self.figure)
            for record in self.records
            if record[f"{self.figure}_gain"] is not None
        ]

    def save(self, path: str | os.PathLike[str], kind: str | None = None) -> None:
        """Writes the file as `kind`, or by its ending: .csv, .md, .tex or .html."""
        ending = Path(path).suffix
        if kind is None and ending not in ENDINGS:
            raise UsageError(
                f"the file (={path}) must end in {', '.join(ENDINGS)}, or its format must be given"
            )
        text = self.to(kind or ENDINGS[ending], Path(path).parent)
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
    training = [key for key in (*TRAINING_METRICS, SECONDS) if key in present]
    results = [key for key in present if key not in training]
    chosen = figure or next(key for key in ("linear", *results) if key in results)
    if chosen not in results:
        raise UsageError(f"`figure` (={figure}) was not measured; there are: {', '.join(results)}")
    records = [_record(name, rows, base, oracle, results, training) for name in rows]
    for key in results:
        _add_verdicts(records, key)
    short = [
        key
        for key in results
        if any(record[f"{key}_runs"] not in (0, len(record["seeds"])) for record in records)
    ]
    missing = [
        f"{key} is missing in some runs of a row: its mean is over the others." for key in short
    ]
    columns = _columns(records, results, training, chosen)
    columns = columns if chosen_columns is None else _chosen(columns, chosen_columns)
    return Comparison(records, columns, chosen, [*notes, *missing], rows)


def _record(
    name: str,
    rows: Mapping[str, Sequence[One]],
    base: str | None,
    oracle: str | None,
    results: Sequence[str],
    training: Sequence[str],
) -> dict[str, Any]:
    figures = {row: [run.figures for run in runs] for row, runs in rows.items()}
    low = base_of(name, rows, base)
    high = (
        oracle_of(name, rows, base, ORACLES) if oracle is None else counterpart(name, oracle, rows)
    )
    record: dict[str, Any] = {
        "method": name,
        "seeds": [run.seed for run in rows[name]],
        "base": low,
        "oracle": high,
    }
    for key in (*results, *training):
        ours = [run[key] for run in figures[name] if key in run]
        record[key] = statistics.mean(ours) if ours else None
        low_high = interval(ours) or (None, None)
        record |= {
            f"{key}_deviation": statistics.stdev(ours) if len(ours) > 1 else None,
            f"{key}_runs": len(ours),
        }
        record |= {f"{key}_low": low_high[0], f"{key}_high": low_high[1]}
        if key in training:
            continue
        pairs = [] if low is None else _paired(rows[name], rows[low], key)
        record[f"{key}_gain"] = (
            None if low is None else _difference(figures[name], figures[low], key)
        )
        gain_low, gain_high = interval([one - other for one, other in pairs]) or (None, None)
        record |= {
            f"{key}_pairs": len(pairs),
            f"{key}_gain_low": gain_low,
            f"{key}_gain_high": gain_high,
        }
        record[f"{key}_p"] = p_value(
            [one for one, _ in pairs], [other for _, other in pairs], "two-sided"
        )
        record[f"{key}_to_oracle"] = (
            None if high in (None, name) else _difference(figures[name], figures[str(high)], key)
        )
        clear = high is not None and _is_clear_gap(rows[high], rows[low or name], key)
        closed = gap_closed(name, figures, base, key, high) if clear else None
        record[f"{key}_gap_closed"] = None if closed is None else 100 * closed
    return record


def _is_clear_gap(oracle: Sequence[One], base: Sequence[One], key: str) -> bool:
    """Whether the oracle differs from the base by more than noise: the interval of their difference
    does not contain 0. Unknown, and so not clear, for fewer than two seeds."""
    found = interval([one - other for one, other in _paired(oracle, base, key)])
    return found is not None and (found[0] > 0 or found[1] < 0)


def _add_verdicts(records: list[dict[str, Any]], key: str) -> None:
    """Adds the corrected p-values and the verdicts. The oracle is a reference, so its test does not
    count for the correction."""
    tested = [record for record in records if record["oracle"] != record["method"]]
    corrected = dict(
        zip(
            (record["method"] for record in tested),
            holm([record[f"{key}_p"] for record in tested]),
            strict=True,
        )
    )
    for record in records:
        p = corrected.get(record["method"], record[f"{key}_p"])
        record[f"{key}_p_holm"] = p
        gain = record[f"{key}_gain"]
        if gain is None:
            record[f"{key}_verdict"] = None
        elif p is None:
            record[f"{key}_verdict"] = "no test"
        elif p >= 1 - LEVEL:
            record[f"{key}_verdict"] = "not significant"
        else:
            record[f"{key}_verdict"] = "better" if (gain > 0) != _is_distance(key) else "worse"


def sentence(record: Mapping[str, Any], key: str) -> str:
    """How a method compares with its base, in words."""
    gain, pairs, p = record[f"{key}_gain"], record[f"{key}_pairs"], record[f"{key}_p_holm"]
    digits = 4 if _is_distance(key) else 1
    unit = "" if _is_distance(key) else " points"
    text = f"{record['method']}: {gain:+.{digits}f}{unit} of {key} against {record['base']}"
    if p is None:
        few = (
            "no seed in common"
            if not pairs
            else "one seed in common"
            if pairs == 1
            else "no variation between seeds"
        )
        return f"{text}; {few}, so there is no test."
    low, high = record[f"{key}_gain_low"], record[f"{key}_gain_high"]
    found = (
        f"95% interval {low:+.{digits}f} to {high:+.{digits}f}, n = {pairs} seeds,"
        f" {'p < 0.001' if p < 0.0005 else f'p = {p:.3f}'}"
    )
    verdict = record[f"{key}_verdict"]
    ending = (
        "not significant, so it may be noise"
        if verdict == "not significant"
        else f"significantly {verdict}"
    )
    return f"{text} ({found}): {ending}."


def _paired(ours: Sequence[One], base: Sequence[One], key: str) -> list[tuple[float, float]]:
    """The figure in both rows, for the seeds that both have."""
    other = {run.seed: run.figures[key] for run in base if key in run.figures}
    return [
        (run.figures[key], other[run.seed])
        for run in ours
        if key in run.figures and run.seed in other
    ]


def _difference(
    ours: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]], key: str
) -> float | None:
    lists = [[run[key] for run in runs if key in run] for runs in (ours, other)]
    return statistics.mean(lists[0]) - statistics.mean(lists[1]) if all(lists) else None


def _columns(
    records: Sequence[Mapping[str, Any]],
    results: Sequence[str],
    training: Sequence[str],
    chosen: str,
) -> list[Column]:
    several = (
        sum(
            record[f"{chosen}_p"] is not None and record["oracle"] != record["method"]
            for record in records
        )
        > 1
    )
    tests = {
        "gain": "gain",
        "gain_low": "95% interval",
        "pairs": "n",
        "p": "p",
        "p_holm": "p (Holm)",
        "verdict": "verdict",
    }
    tests |= {"to_oracle": "to oracle", "gap_closed": "gap closed"}
    if not several:
        del tests["p_holm"]
    alike = len({tuple(record["seeds"]) for record in records}) == 1
    columns = [
        *([] if alike else [Column("seeds", "seeds", "count", "results")]),
        *(
            Column(key, key, "distance" if _is_distance(key) else "spread", "results")
            for key in results
        ),
        *(Column(f"{chosen}_{kind}", head, kind, "tests") for kind, head in tests.items()),
        *(
            Column(key, {**TRAINING_METRICS, SECONDS: "s / epoch"}[key], "spread", "training")
            for key in training
        ),
    ]
    present = [
        column for column in columns if any(record[column.key] is not None for record in records)
    ]
    has_base = any(record["base"] is not None for record in records)
    return [column for column in present if has_base or column.kind != "pairs"]


def _chosen(columns: Sequence[Column], names: Sequence[str]) -> list[Column]:
    by_name = {column.head.lower(): column for column in columns}
    unknown = next((name for name in names if name.strip().lower() not in by_name), None)
    if unknown is not None:
        raise UsageError(
            f"there is no column {unknown!r} in this table; there are:"
            f" {', '.join(column.head for column in columns)}"
        )
    return [by_name[name.strip().lower()] for name in names]


def _is_distance(key: str) -> bool:
    """Whether lower values are better."""
    return key.rpartition(" ")[2] in DISTANCES.values()


Records = Sequence[Mapping[str, Any]]
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "→": r"$\to$",
    "–": "--",
    "±": r"$\pm$",
}
_LATEX |= {character: f"\\{character}" for character in "&%$#_{}"}


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        key: key of the records.
        head: text of the header.
        kind: "spread" (mean ± deviation), "distance" (the same with more digits), "count", or the
            kind of a test.
        section: "results", "tests" or "training"; on a narrow terminal each section is a table of
            its own.
    """

    key: str
    head: str
    kind: str
    section: str

    def text(self, record: Mapping[str, Any]) -> str:
        """The value of this column in `record`, – if it is missing."""
        value = record[self.key]
        if value is None:
            return "–"
        if self.kind in ("spread", "distance"):
            digits = 1 if self.kind == "spread" else 4
            deviation = record[f"{self.key}_deviation"]
            return f"{value:.{digits}f}" + (
                "" if deviation is None else f" ± {deviation:.{digits}f}"
            )
        if self.kind == "count":
            return str(len(value))
        if self.kind in ("p", "p_holm"):
            return f"{value:.3f}" if value >= 0.0005 else "<0.001"
        if self.kind == "pairs":
            return "–" if record["base"] is None else str(value)
        if self.kind == "verdict":
            return str(value)
        if self.kind == "gain_low":
            return f"{value:+.1f} to {record[self.key.removesuffix('_low') + '_high']:+.1f}"
        return f"{value:.0f} %" if self.kind == "gap_closed" else f"{value:+.1f}"


def write_csv(records: Records, columns: Sequence[Column]) -> str:
    """All values of the records, whatever the columns; missing values are empty."""
    rows = ({**record, "seeds": " ".join(map(str, record["seeds"]))} for record in records)
    return csv_text(list(records[0]), [[row[key] for key in records[0]] for row in rows])


def write_markdown(records: Records, columns: Sequence[Column]) -> str:
    lines = [["method", *(column.head for column in columns)], ["---", *("---:" for _ in columns)]]
    lines += [
        [record["method"], *(column.text(record) for column in columns)] for record in records
    ]
    return "".join(
        "| " + " | ".join(text.replace("|", r"\|") for text in line) + " |\n" for line in lines
    )


def write_latex(records: Records, columns: Sequence[Column]) -> str:
    heads = " & ".join(["method", *(_latex(column.head) for column in columns)])
    lines = [
        f"\\begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"\toprule",
        heads + r" \\",
        r"\midrule",
    ]
    lines += [
        " & ".join(
            [_latex(record["method"]), *(_number(column.text(record)) for column in columns)]
        )
        + r" \\"
        for record in records
    ]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


WRITERS: dict[str, Callable[[Records, Sequence[Column]], str]] = {
    "csv": write_csv,
    "markdown": write_markdown,
    "latex": write_latex,
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _number(text: str) -> str:
    """Sets numbers in mathematics mode, so that minus and ± are printed correctly."""
    if re.fullmatch(r"[<+\-]?[\d.]+( ± [\d.]+)?( %)?", text):
        return "$" + text.replace("±", r"\pm").replace(" %", r"\,\%") + "$"
    return _latex(text)
