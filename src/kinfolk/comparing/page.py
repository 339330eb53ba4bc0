"""compare.html: the comparison of runs as a page with intervals, every seed, curves and links."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from kinfolk.report import html
from kinfolk.report.html import CURVES, Curve, Panel, curve_figure, curve_trace, figure
from kinfolk.report.record import is_finite

if TYPE_CHECKING:
    from kinfolk.comparing.runs import ComparedRun
    from kinfolk.comparing.table import Comparison


def render_comparison(comparison: Comparison, folder: str | os.PathLike[str] = ".") -> str:
    """The text of the page; links to the runs are relative to `folder`."""
    panels = [*_gain_panel(comparison), _value_panel(comparison)]
    curves = overlay_panels(comparison.rows)
    present = [("comparison", "Comparison"), ("intervals", "Intervals"), ("table", "Table")]
    present += [("curves", "Curves")] if curves else []
    return html.compose(
        "comparing/compare.html",
        [],
        data={"figures": {panel.id: panel.figure for panel in (*panels, *curves)}},
        title="Comparison",
        sections=[*present, ("runs", "Runs")],
        sentences=[_minus(sentence) for sentence in comparison.sentences()],
        panels=panels,
        curves=curves,
        heads=[column.head for column in comparison.columns],
        rows=[
            (record["method"], [_minus(column.text(record)) for column in comparison.columns])
            for record in comparison.records
        ],
        runs=_runs(comparison, Path(folder)),
        caption=caption(comparison),
        notes=comparison.notes,
        figure=_words(comparison.figure),
    )


def _minus(text: str) -> str:
    """A text with minus signs instead of hyphens before numbers."""
    return re.sub(r"(?<![\w-])-(?=\d)", "−", text)


def _words(key: str) -> str:
    return {"linear": "linear probe", "knn": "kNN accuracy"}.get(key, key)


def caption(comparison: Comparison) -> str:
    """What the numbers of the table are."""
    numbers = {len(record["seeds"]) for record in comparison.records}
    seeds = "seeds" if len(numbers) > 1 else f"{max(numbers)} seeds"
    text = f"Mean ± standard deviation over {seeds}, in percent."
    if numbers == {1}:
        text = "One seed each, in percent."
    oracles = sorted({record["oracle"] for record in comparison.records} - {None})
    explained = {
        "gain": "gain is method − base, so + is better",
        "gain_low": "the interval is the 95% confidence interval of the gain",
        "pairs": "n is the number of seeds that both have",
        "p": "p is of a two-sided paired t-test",
        "p_holm": "p (Holm) is corrected for the number of methods",
        "to_oracle": f"to oracle is method − oracle ({' or '.join(oracles)}), so − is below it",
    }
    kinds = {column.kind for column in comparison.columns if column.section == "tests"}
    used = [words for kind, words in explained.items() if kind in kinds]
    return text + (f" Tests are of {comparison.figure}: {'; '.join(used)}." if used else "")


def _runs(comparison: Comparison, folder: Path) -> list[dict[str, Any]]:
    """An entry for each run, with a link to its report or folder."""
    found = []
    for name, runs in comparison.rows.items():
        for run in runs:
            report = run.path / "report.html"
            target = os.path.relpath(report if report.is_file() else run.path, folder)
            value = run.figures.get(comparison.figure)
            entry = {
                "method": name,
                "seed": run.seed,
                "epochs": len(run.epochs),
                "path": str(run.path),
                "value": "–" if value is None else f"{value:.2f}",
                "link": quote(target.replace(os.sep, "/")),
            }
            found.append(entry)
    return found


# ---- figures

SHIFT = 0.22
"""Vertical distance of the dots of the seeds from the mean of their row."""


def _gain_panel(comparison: Comparison) -> list[Panel]:
    key = comparison.figure
    compared = [record for record in comparison.records if record[f"{key}_gain"] is not None]
    if not compared:
        return []
    seeds = []
    for record in compared:
        base, values = (_by_seed(comparison, record[name]) for name in ("base", "method"))
        gains = {seed: value - base[seed] for seed, value in values.items() if seed in base}
        seeds.append(gains)
    drawn = _points(compared, f"{key}_gain", seeds, "points")
    zero = {"type": "line", "x0": 0, "x1": 0, "y0": 0, "y1": 1, "yref": "paper"}
    drawn["layout"]["shapes"] = [zero | {"line": {"width": 1, "dash": "dot", "color": "#888888"}}]
    note = (
        "difference to the base with its 95% confidence interval, and each seed as a dot; an"
        " interval that contains 0 is not significant"
    )
    return [Panel("gain", f"Gain: {_words(key)}", note, " ".join(comparison.sentences()), drawn)]


def _value_panel(comparison: Comparison) -> Panel:
    key = comparison.figure
    present = [record for record in comparison.records if record[key] is not None]
    seeds = [_by_seed(comparison, record["method"]) for record in present]
    described = "; ".join(f"{record['method']} {record[key]:.1f}" for record in present)
    note = "mean over seeds with its 95% confidence interval, and each seed as a dot"
    title = _words(key) if key == "knn" else _words(key)[:1].upper() + _words(key)[1:]
    return Panel("value", title, note, described, _points(present, key, seeds, "percent"))


def _by_seed(comparison: Comparison, row: str) -> dict[int, float]:
    key = comparison.figure
    return {run.seed: run.figures[key] for run in comparison.rows[row] if key in run.figures}


def _points(
    records: Sequence[Mapping[str, Any]],
    key: str,
    seeds: Sequence[Mapping[int, float]],
    axis: str,
) -> dict[str, Any]:
    """A point with its interval in each row, and a dot for each of several seeds below it."""
    names, ends = [record["method"] for record in records], (f"{key}_low", f"{key}_high")
    low_and_high = [[record[end] or 0.0 for end in ends] for record in records]
    halves = [(high - low) / 2 for low, high in low_and_high]
    bars = {"array": [round(half, 4) for half in halves], "color": "accent"}
    mean = {
        "type": "scatter",
        "mode": "markers",
        "x": [round(record[key], 4) for record in records],
        "y": list(range(len(names))),
        "customdata": [[half] for half in halves],
        "hovertemplate": "%{x:.2f} ± %{customdata[0]:.2f}<extra></extra>",
        "marker": {"color": "accent", "size": 10},
        "line": {"color": "accent"},
        "error_x": {"type": "data", **bars, "thickness": 2, "width": 6},
    }
    several = [(row, found) for row, found in enumerate(seeds) if len(found) > 1]
    dots = [(row, seed, value) for row, found in several for seed, value in found.items()]
    single = {
        "type": "scatter",
        "mode": "markers",
        "x": [round(value, 4) for _, _, value in dots],
        "y": [row + SHIFT for row, _, _ in dots],
        "customdata": [[seed] for _, seed, _ in dots],
        "hovertemplate": "%{x:.2f}, seed %{customdata[0]}<extra></extra>",
        "marker": {"color": "second", "size": 6, "opacity": 0.75},
        "line": {"color": "second"},
    }
    drawn = figure([mean, single], axis)
    height = 110 + 40 * len(names)
    drawn["layout"] |= {"height": height, "hovermode": "closest", "showlegend": False}
    drawn["layout"]["xaxis"]["showgrid"] = True
    drawn["layout"]["yaxis"] = {
        "tickvals": list(range(len(names))),
        "ticktext": [name if len(name) <= 34 else f"{name[:33]}…" for name in names],
        "range": [len(names) - 0.4, -0.6],
        "showgrid": False,
    }
    return drawn


OVERLAID = ("loss", "knn", "flagged", "f1", "temperature")
"""Metrics of the epochs that are drawn over each other."""


def overlay_panels(rows: Mapping[str, Sequence[ComparedRun]]) -> list[Panel]:
    """For each metric, the mean over the seeds of each row as a line, and each run as a thin
    line."""
    panels = []
    overlaid = [(curve, name) for curve in CURVES for name in curve.lines if name in OVERLAID]
    for curve, metric in overlaid:
        traces, described = [], []
        for at, (name, runs) in enumerate(rows.items()):
            found = [
                {int(row["epoch"]): row[metric] for row in run.epochs if is_finite(row.get(metric))}
                for run in runs
            ]
            found = [values for values in found if values]
            if not found:
                continue
            mean = {
                epoch: statistics.mean(values[epoch] for values in found if epoch in values)
                for epoch in sorted(set().union(*found))
            }
            if len(found) > 1:
                traces += [_line(name, values, str(at), curve, thin=True) for values in found]
            traces.append(_line(name, mean, str(at), curve))
            described.append(f"{name} ends at {mean[max(mean)]:.4g}")
        if traces:
            more = "" if len(curve.lines) == 1 else f": {curve.lines[metric]}"
            drawn, title = curve_figure(curve, traces), curve.title + more
            drawn["layout"] |= {"height": 240 + 20 * len(rows), "showlegend": True}
            note = f"{curve.note}; mean over seeds, single runs thin"
            panels.append(Panel(f"curve-{metric}", title, note, "; ".join(described), drawn))
    return panels


def _line(
    name: str, values: Mapping[int, float], colour: str, curve: Curve, thin: bool = False
) -> dict[str, Any]:
    drawn = curve_trace(curve, name, colour, list(values), list(values.values()))
    drawn |= {"legendgroup": name, "showlegend": not thin}
    if thin:
        style = {"color": colour, "width": 1}
        return drawn | {"mode": "lines", "line": style, "opacity": 0.35, "hoverinfo": "skip"}
    return drawn
