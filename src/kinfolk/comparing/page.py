"""compare.html: the comparison of runs as a page with intervals, every seed, and links."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from kinfolk.report.html import Panel, figure, line, write_page

if TYPE_CHECKING:
    from kinfolk.comparing.table import Comparison


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Writes the page; its links to the runs are relative to its folder."""
    panels, sections = interval_panels(comparison), ("Comparison", "Intervals", "Table", "Runs")
    write_page(
        path,
        "comparing/compare.html",
        [],
        data={"figures": {panel.id: panel.figure for panel in panels}},
        title="Comparison",
        sections=[(name.lower(), name) for name in sections],
        sentences=[_minus(sentence) for sentence in comparison.sentences()],
        panels=panels,
        heads=[column.head for column in comparison.columns],
        rows=[
            (record["method"], [_minus(column.text(record)) for column in comparison.columns])
            for record in comparison.records
        ],
        runs=_runs(comparison, path.parent),
        caption=caption(comparison),
        notes=comparison.notes,
        figure=_words(comparison.figure),
    )


def _minus(text: str) -> str:
    return re.sub(r"(?<![\w-])-(?=\d)", "−", text)


def _words(key: str) -> str:
    return {"linear": "linear probe", "knn": "kNN accuracy"}.get(key, key)


def caption(comparison: Comparison) -> str:
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
    kinds = {column.kind for column in comparison.columns}
    used = [words for kind, words in explained.items() if kind in kinds]
    return text + (f" Tests are of {comparison.figure}: {'; '.join(used)}." if used else "")


def _runs(comparison: Comparison, folder: Path) -> list[dict[str, Any]]:
    found = []
    for name, runs in comparison.rows.items():
        for run in runs:
            report, value = run.path / "report.html", run.figures.get(comparison.figure)
            target = os.path.relpath(report if report.is_file() else run.path, folder)
            entry = {"method": name, "seed": run.seed, "epochs": run.epochs, "path": str(run.path)}
            entry["value"] = "–" if value is None else f"{value:.2f}"
            entry["link"] = quote(target.replace(os.sep, "/"))
            found.append(entry)
    return found


# ---- figures

SHIFT = 0.22
"""Vertical distance of the dots of the seeds from the mean of their row."""


def interval_panels(comparison: Comparison) -> list[Panel]:
    """The gains, if there is a base, and the figure itself."""
    key, panels = comparison.figure, list[Panel]()
    values = {
        name: {run.seed: run.figures[key] for run in runs if key in run.figures}
        for name, runs in comparison.rows.items()
    }
    dots = "with its 95% confidence interval, and each seed as a dot"
    compared = [record for record in comparison.records if record[f"{key}_gain"] is not None]
    if compared:
        gains = [
            {seed: value - base[seed] for seed, value in values[name].items() if seed in base}
            for name, base in ((record["method"], values[record["base"]]) for record in compared)
        ]
        drawn = _points(compared, f"{key}_gain", gains, "points")
        zero = {"type": "line", "x0": 0, "x1": 0, "y0": 0, "y1": 1, "yref": "paper"}
        style = {"width": 1, "dash": "dot", "color": "#888888"}
        drawn["layout"]["shapes"] = [zero | {"line": style}]
        note = f"difference to the base {dots}; an interval that contains 0 is not significant"
        described = " ".join(comparison.sentences())
        panels.append(Panel("gain", f"Gain: {_words(key)}", note, described, drawn))
    present = [record for record in comparison.records if record[key] is not None]
    drawn = _points(present, key, [values[record["method"]] for record in present], "percent")
    described = "; ".join(f"{record['method']} {record[key]:.1f}" for record in present)
    title = _words(key) if key == "knn" else _words(key)[:1].upper() + _words(key)[1:]
    return [*panels, Panel("value", title, f"mean over seeds {dots}", described, drawn)]


def _points(
    records: Sequence[Mapping[str, Any]],
    key: str,
    seeds: Sequence[Mapping[int, float]],
    axis: str,
) -> dict[str, Any]:
    names, rows = [record["method"] for record in records], list(range(len(records)))
    halves = [
        ((record[f"{key}_high"] or 0) - (record[f"{key}_low"] or 0)) / 2 for record in records
    ]
    several = [(row, found) for row, found in enumerate(seeds) if len(found) > 1]
    dots = [(row, seed, value) for row, found in several for seed, value in found.items()]

    mean = line(
        "mean",
        [record[key] for record in records],
        rows,
        "accent",
        mode="markers",
        customdata=[[half] for half in halves],
        hovertemplate="%{x:.2f} ± %{customdata[0]:.2f}<extra></extra>",
        marker={"color": "accent", "size": 10},
        error_x={"type": "data", "array": halves, "color": "accent", "thickness": 2, "width": 6},
    )
    single = line(
        "seeds",
        [value for _, _, value in dots],
        [row + SHIFT for row, _, _ in dots],
        "second",
        mode="markers",
        customdata=[[seed] for _, seed, _ in dots],
        hovertemplate="%{x:.2f}, seed %{customdata[0]}<extra></extra>",
        marker={"color": "second", "size": 6, "opacity": 0.75},
    )
    drawn = figure([mean, single], axis)
    height = 110 + 40 * len(names)
    drawn["layout"] |= {"height": height, "hovermode": "closest", "showlegend": False}
    drawn["layout"]["xaxis"]["showgrid"] = True
    drawn["layout"]["yaxis"] = {
        "tickvals": rows,
        "ticktext": [name if len(name) <= 34 else f"{name[:33]}…" for name in names],
        "range": [len(names) - 0.4, -0.6],
        "showgrid": False,
    }
    return drawn
