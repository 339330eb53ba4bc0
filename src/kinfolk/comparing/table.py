"""The table over runs and seeds. A row is a method, or a method with a setting in brackets:
`simclr+glofnd (alpha 0.01)`.
"""

from __future__ import annotations

import math
import os
import statistics
import warnings
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinfolk.comparing.runs import SECONDS, TRAINING_METRICS, ComparedRun, read_runs
from kinfolk.errors import UsageError, csv_text
from kinfolk.files import write_text
from kinfolk.report.results import is_distance
from kinfolk.training.load_run import FOREIGN

LEVEL = 0.95
ORACLES = ("oracle:attract", "oracle")

Runs = Sequence[ComparedRun]
Rows = Mapping[str, Runs]


def compare(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    base: str | None = None,
    figure: str | None = None,
) -> Comparison:
    """One table over runs and seeds: mean ± deviation, paired tests against the base with
    confidence intervals, the difference to the oracle.

    Runs of one method that differ only in their seed form a row; other settings in which they
    differ are in the row's name. Tests pair runs of the same seed; with several methods the
    p-values are corrected by Holm's method.

    Args:
        runs: run folders, or folders that contain several; evaluated, and all on the same data.
        base: the row or method to compare with; by default each method's framework. The oracle,
            which uses the labels, is the base with `+oracle:attract` or `+oracle`, if there is one.
        figure: the figure for gains and tests; by default `linear`, or the first result.
    """
    paths = [runs] if isinstance(runs, str | os.PathLike) else list(runs)
    found, notes = read_runs([os.fspath(path) for path in paths])
    rows = group_rows(found)
    notes += _differences(rows)
    if base is not None and not any(base in (name, name.partition(" ")[0]) for name in rows):
        raise UsageError(f"`base` (={base}) must be one of the rows: {', '.join(rows)}")
    present = dict.fromkeys(key for runs in rows.values() for run in runs for key in run.figures)
    training = [key for key in (*TRAINING_METRICS, SECONDS) if key in present]
    results = [key for key in present if key not in training]
    chosen = figure or next(key for key in ("linear", *results) if key in results)
    if chosen not in results:
        raise UsageError(f"`figure` (={figure}) was not measured; there are: {', '.join(results)}")
    records = []
    for name, each in rows.items():
        low, high = base_of(name, rows, base), oracle_of(name, rows, base)
        record: dict[str, Any] = {"method": name, "seeds": [run.seed for run in each]}
        record |= {"base": low, "oracle": high}
        for key in (*results, *training):
            record |= _statistics(key, each)
            if key in results:
                others = () if high in (None, name) else rows[high]
                record |= _tests(key, each, () if low is None else rows[low], others)
        records.append(record)
    for key in results:
        _add_verdicts(records, key)
        if any(record[f"{key}_runs"] not in (0, len(record["seeds"])) for record in records):
            notes.append(f"{key} is missing in some runs of a row: its mean is over the others.")
    return Comparison(records, _columns(records, results, training, chosen), chosen, notes, rows)


# ---- rows


def group_rows(runs: Runs) -> dict[str, list[ComparedRun]]:
    by_method: dict[str, list[list[ComparedRun]]] = {}
    for run in runs:
        groups = by_method.setdefault(run.method, [])
        group = next((group for group in groups if group[0].settings == run.settings), None)
        if group is None:
            group = list[ComparedRun]()
            groups.append(group)
        same = next((other for other in group if other.seed == run.seed), None)
        if same is not None:
            raise UsageError(
                f"{same.path} and {run.path} are of the same method, settings and seed"
                f" ({run.seed}); leave one of them out"
            )
        group.append(run)
    frameworks = list(dict.fromkeys(method.partition("+")[0] for method in by_method))

    def order(method: str) -> tuple[int, int]:
        """The framework alone, then its detectors, then the oracle."""
        place = 0 if "+" not in method else 2 if "+oracle" in method else 1
        return frameworks.index(method.partition("+")[0]), place

    rows: dict[str, list[ComparedRun]] = {}
    for method in sorted(by_method, key=order):
        keys = differing_keys([group[0].settings for group in by_method[method]])
        last = [key.rpartition(".")[2] for key in keys]
        names = [one if last.count(one) == 1 else key for one, key in zip(last, keys, strict=True)]
        for group in by_method[method]:
            values = [_text(group[0].settings.get(key)) for key in keys]
            pairs = [f"{name} {value}" for name, value in zip(names, values, strict=True)]
            name = f"{method} ({', '.join(pairs)})" if pairs else method
            rows[name] = sorted(group, key=lambda run: run.seed)
    return rows


def differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for each in settings for key in each)
    return [key for key in keys if any(each.get(key) != settings[0].get(key) for each in settings)]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "[" + " ".join(map(_text, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool | None) else str(value)


def _differences(rows: Rows) -> list[str]:
    """A note on settings, other than those of framework and detector, in which the rows differ."""
    known = [runs[0].settings for runs in rows.values() if not (runs[0].path / FOREIGN).is_file()]
    keys = [
        key
        for key in differing_keys(known)
        if key.partition(".")[0] not in ("framework", "detector")
        and not any(f"{key.rpartition('.')[2]} " in name.partition(" ")[2] for name in rows)
    ]
    note = f"The methods were not trained with the same settings: {', '.join(keys)}."
    return [note] if keys else []


def counterpart(name: str, method: str, rows: Container[str]) -> str | None:
    """The row of `method` with the setting in brackets of `name`, or else without one."""
    setting = name.partition(" ")[2]
    return next((row for row in (f"{method} {setting}".strip(), method) if row in rows), None)


def base_of(name: str, rows: Container[str], base: str | None = None) -> str | None:
    """The row of `base`, or else of the framework of `name` alone; None for the base itself."""
    found = counterpart(name, base or name.partition(" ")[0].partition("+")[0], rows)
    return None if found == name else found


def oracle_of(
    name: str, rows: Container[str], base: str | None = None, kinds: Sequence[str] = ORACLES
) -> str | None:
    """The row of the base's method with the oracle: the first of `kinds` that exists."""
    method = (base_of(name, rows, base) or name).partition(" ")[0]
    found = (counterpart(name, f"{method}+{kind}", rows) for kind in kinds)
    return next((row for row in found if row is not None), None)


# ---- statistics


def interval(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Confidence interval of the mean by Student's t."""
    if len(values) < 2:
        return None, None
    from scipy.stats import sem, t

    mean = statistics.mean(values)
    half = float(t.ppf((1 + LEVEL) / 2, len(values) - 1) * sem(values))
    return mean - half, mean + half


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """The p-values adjusted by Holm's method; None stays None and is not counted.

    Example:
        >>> holm([0.01, None, 0.04, 0.03])
        [0.03, None, 0.06, 0.06]
    """
    tested = sorted((p, at) for at, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, at) in enumerate(tested):
        adjusted[at] = largest = max(largest, min(1.0, p * (len(tested) - rank)))
    return adjusted


def p_value(
    values: Sequence[float], base: Sequence[float], alternative: str = "greater"
) -> float | None:
    """Paired t-test over seeds: that the method is above its base, or with "two-sided" that they
    differ. None for fewer than two pairs, and where all differences are 0."""
    if len(values) < 2 or len(values) != len(base):
        return None
    from scipy.stats import ttest_rel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # raised where all differences are equal
        p = float(ttest_rel(values, base, alternative=alternative).pvalue)
    return None if math.isnan(p) else p


# ---- records


def _values(key: str, runs: Runs) -> dict[int, float]:
    return {run.seed: run.figures[key] for run in runs if key in run.figures}


def _statistics(key: str, runs: Runs) -> dict[str, Any]:
    values = list(_values(key, runs).values())
    low, high = interval(values)
    return {
        key: statistics.mean(values) if values else None,
        f"{key}_deviation": statistics.stdev(values) if len(values) > 1 else None,
        f"{key}_runs": len(values),
        f"{key}_low": low,
        f"{key}_high": high,
    }


def _tests(key: str, runs: Runs, base: Runs, oracle: Runs) -> dict[str, Any]:
    """Tests pair the seeds that both have."""
    values, others, best = (_values(key, each) for each in (runs, base, oracle))
    seeds = [seed for seed in values if seed in others]
    pairs = [values[seed] for seed in seeds], [others[seed] for seed in seeds]
    low, high = interval([one - other for one, other in zip(*pairs, strict=True)])
    return {
        f"{key}_gain": _difference(values, others),
        f"{key}_pairs": len(seeds),
        f"{key}_gain_low": low,
        f"{key}_gain_high": high,
        f"{key}_p": p_value(*pairs, "two-sided"),
        f"{key}_to_oracle": _difference(values, best),
    }


def _difference(values: Mapping[int, float], others: Mapping[int, float]) -> float | None:
    if not values or not others:
        return None
    return statistics.mean(values.values()) - statistics.mean(others.values())


def _add_verdicts(records: list[dict[str, Any]], key: str) -> None:
    """The oracle is a reference, so its test does not count for the correction."""
    tested = [record for record in records if record["oracle"] != record["method"]]
    corrected = holm([record[f"{key}_p"] for record in tested])
    by_name = {record["method"]: p for record, p in zip(tested, corrected, strict=True)}
    for record in records:
        p = record[f"{key}_p_holm"] = by_name.get(record["method"], record[f"{key}_p"])
        gain, verdict = record[f"{key}_gain"], None
        if gain is not None:
            better = (gain > 0) != is_distance(key)
            significant = "better" if better else "worse"
            verdict = "not significant" if p is not None and p >= 1 - LEVEL else significant
            verdict = "no test" if p is None else verdict
        record[f"{key}_verdict"] = verdict


def sentence(record: Mapping[str, Any], key: str) -> str:
    gain, pairs, p = record[f"{key}_gain"], record[f"{key}_pairs"], record[f"{key}_p_holm"]
    digits, unit = (4, "") if is_distance(key) else (1, " points")
    text = f"{record['method']}: {gain:+.{digits}f}{unit} of {key} against {record['base']}"
    if p is None:
        why = {0: "no seed in common", 1: "one seed in common"}
        return f"{text}; {why.get(pairs, 'no variation between seeds')}, so there is no test."
    low, high = record[f"{key}_gain_low"], record[f"{key}_gain_high"]
    verdict = record[f"{key}_verdict"]
    ending = f"significantly {verdict}"
    if verdict == "not significant":
        ending = "not significant, so it may be noise"
    return (
        f"{text} (95% interval {low:+.{digits}f} to {high:+.{digits}f}, n = {pairs} seeds,"
        f" {'p < 0.001' if p < 0.0005 else f'p = {p:.3f}'}): {ending}."
    )


# ---- columns and the table

TESTS = {
    "gain": "gain",
    "gain_low": "95% interval",
    "pairs": "n",
    "p": "p",
    "p_holm": "p (Holm)",
    "verdict": "verdict",
    "to_oracle": "to oracle",
}


@dataclass(frozen=True)
class Column:
    """`kind`: "spread" (mean ± deviation), "seeds", or the kind of a test."""

    key: str
    head: str
    kind: str = "spread"

    def text(self, record: Mapping[str, Any]) -> str:
        value = record[self.key]
        if value is None or (self.kind == "pairs" and record["base"] is None):
            return "–"
        if self.kind == "spread":
            digits, deviation = 4 if is_distance(self.key) else 1, record[f"{self.key}_deviation"]
            more = "" if deviation is None else f" ± {deviation:.{digits}f}"
            return f"{value:.{digits}f}{more}"
        if self.kind in ("p", "p_holm"):
            return f"{value:.3f}" if value >= 0.0005 else "<0.001"
        if self.kind == "gain_low":
            return f"{value:+.1f} to {record[self.key.removesuffix('_low') + '_high']:+.1f}"
        if self.kind == "seeds":
            return str(len(value))
        return f"{value:+.1f}" if isinstance(value, float) else str(value)


def _columns(
    records: Sequence[Mapping[str, Any]],
    results: Sequence[str],
    training: Sequence[str],
    chosen: str,
) -> list[Column]:
    tested = [record for record in records if record["oracle"] != record["method"]]
    hidden = set[str]()
    if sum(record[f"{chosen}_p"] is not None for record in tested) < 2:
        hidden.add("p_holm")
    if all(record["base"] is None for record in records):
        hidden.add("pairs")
    several = len({tuple(record["seeds"]) for record in records}) > 1
    heads = {**TRAINING_METRICS, SECONDS: "s / epoch"}
    columns = [
        *([Column("seeds", "seeds", "seeds")] if several else []),
        *(Column(key, key) for key in results),
        *(Column(f"{chosen}_{k}", head, k) for k, head in TESTS.items() if k not in hidden),
        *(Column(key, heads[key]) for key in training),
    ]
    return [each for each in columns if any(record[each.key] is not None for record in records)]


@dataclass(frozen=True)
class Comparison:
    """One table over runs and seeds.

    Args:
        records: a mapping for each row: `method`, `seeds`, `base`, `oracle`; for every figure F its
            mean `F`, `F_deviation`, `F_runs` and 95 % confidence interval `F_low`, `F_high`; for
            results also `F_gain` (method − base), `F_pairs`, `F_gain_low`, `F_gain_high`, `F_p`,
            `F_p_holm`, `F_verdict` and `F_to_oracle` (method − oracle). Shares and differences are
            in percent; missing values are None.
        figure: the figure that gains and tests are of.
        notes: remarks for the reader.
        rows: the runs of each row, by its name.
    """

    records: list[dict[str, Any]]
    columns: list[Column]
    figure: str
    notes: list[str]
    rows: Rows

    def to_csv(self) -> str:
        """All of `records` as plain numbers; missing values are empty."""
        rows = [{**record, "seeds": " ".join(map(str, record["seeds"]))} for record in self.records]
        return csv_text(list(rows[0]), [list(row.values()) for row in rows])

    def sentences(self) -> list[str]:
        compared = [each for each in self.records if each[f"{self.figure}_gain"] is not None]
        return [sentence(record, self.figure) for record in compared]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a .csv file or a .html page, whose links are relative to its folder."""
        path = Path(path)
        if path.suffix not in (".csv", ".html"):
            raise UsageError(f"the file (={path}) must end in .csv or .html")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".csv":
            return write_text(path, self.to_csv())
        from kinfolk.comparing.page import write_comparison

        write_comparison(self, path)

    def __str__(self) -> str:
        """The table in Markdown."""
        lines = [["method", *(each.head for each in self.columns)]]
        lines.append(["---", *("---:" for _ in self.columns)])
        lines += [[row["method"], *(c.text(row) for c in self.columns)] for row in self.records]
        escaped = ([text.replace("|", r"\|") for text in line] for line in lines)
        return "".join(f"| {' | '.join(line)} |\n" for line in escaped)
