"""The figures of the audit's page, in the form of the report's: plain dictionaries, colours by name.

Dimension key: N data set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kinfolk.report.figures import Panel

if TYPE_CHECKING:
    from kinfolk.auditing.result import Audit


def panels_of(audit: Audit) -> list[Panel]:
    """The distributions and, with labels, precision, recall and F1 along α."""
    survey = audit.survey
    centre = (survey.edges[:-1] + survey.edges[1:]) / 2
    present = np.flatnonzero(survey.density > 1e-6)
    seen = slice(max(0, present[0] - 1), present[-1] + 2)
    lines = [_line("all pairs", centre[seen], survey.density[seen], "accent")]
    if survey.same_density is not None:
        lines.append(_line("equal labels", centre[seen], survey.same_density[seen], "second"))
    which = "all anchors" if len(survey.anchors) == len(audit) else f"{len(survey.anchors):,} anchors drawn at random"
    low, middle, high = np.quantile(audit.thresholds, (0.05, 0.5, 0.95))
    panels = [
        Panel(
            "similarity", "Similarities", f"share of pairs, {which}", "Histogram of the similarities of pairs", _figure(lines, "similarity")
        ),
        Panel(
            "threshold",
            "Thresholds",
            f"the (1 − α) quantile of each sample, α = {audit.alpha:g}",
            f"Nine of ten thresholds lie between {low:.3f} and {high:.3f}, the median is {middle:.3f}",
            _figure([_histogram("samples", audit.thresholds, "accent")], "threshold"),
        ),
        Panel(
            "occurrence",
            "How often a sample is kin",
            "number of anchors that flag it; far to the right are hubs",
            f"Mean {audit.occurrence.mean():.1f}, at most {audit.occurrence.max()}",
            _figure([_histogram("samples", audit.occurrence, "third")], "anchors"),
        ),
    ]
    one = [point for point in survey.curve if point.rule == "one α"]
    if one:
        own = [point for point in survey.curve if point.rule == "α by sample"]
        alphas = [point.alpha for point in one]
        traces = [
            _line("precision", alphas, [p.precision for p in one], "accent"),
            _line("recall", alphas, [p.recall for p in one], "second"),
            _line("F1", alphas, [p.f1 for p in one], "third"),
            _line("F1, own α", [p.alpha for p in own], [p.f1 for p in own], "third", dash="dot"),
        ]
        figure = _figure(traces, "α")
        figure["layout"]["xaxis"] |= {"type": "log", "tickvals": [0.001, 0.01, 0.1, 0.3], "tickformat": "~g"}
        figure["layout"]["yaxis"]["tickformat"] = ".0%"
        best = max(one, key=lambda point: point.f1)
        panels.insert(
            0, Panel("curve", "Along α", f"flagged pairs against the labels, {which}", f"F1 is highest at α = {best.alpha:g}", figure)
        )
    return panels


def _line(name: str, x: Any, y: Any, colour: str, dash: str = "solid") -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [round(float(value), 5) for value in x],
        "y": [round(float(value), 6) if np.isfinite(value) else None for value in y],
        "line": {"color": colour, "width": 2, "dash": dash},
        "marker": {"color": colour},
    }


def _histogram(name: str, values: Any, colour: str) -> dict[str, Any]:
    counts, edges = np.histogram(values, bins=60)
    return {
        "type": "bar",
        "name": name,
        "x": [round(float(x), 4) for x in (edges[:-1] + edges[1:]) / 2],
        "y": counts.tolist(),
        "line": {"color": colour},
        "marker": {"color": colour},
    }


def _figure(traces: list[dict[str, Any]], axis: str) -> dict[str, Any]:
    layout = {
        "height": 220,
        "margin": {"l": 52, "r": 12, "t": 8, "b": 34},
        "hovermode": "x unified",
        "bargap": 0.05,
        "showlegend": len(traces) > 1,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "xaxis": {"title": {"text": axis, "standoff": 4}, "showgrid": False, "nticks": 6},
        "yaxis": {"nticks": 5, "rangemode": "tozero"},
    }
    return {"data": traces, "layout": layout}
