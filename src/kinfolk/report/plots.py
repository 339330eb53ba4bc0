"""Figures as the plain dictionaries that plotly.js draws.

Colours are names of the page's palette (`accent`, `second`, `third`); the page puts in the values of the light or the dark theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

BINS = 60


@dataclass(frozen=True)
class Panel:
    """A figure with its heading, and a sentence that says in words what it shows."""

    id: str
    title: str
    note: str
    description: str
    figure: dict[str, Any]


def line(name: str, x: Any, y: Any, colour: str, dash: str = "solid", **more: Any) -> dict[str, Any]:
    """A curve; what is not finite is a gap in it."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [round(float(value), 5) for value in x],
        "y": [round(float(value), 6) if np.isfinite(value) else None for value in y],
        "line": {"color": colour, "width": 2, "dash": dash},
        "marker": {"color": colour},
        **more,
    }


def histogram(name: str, values: Any, colour: str) -> dict[str, Any]:
    """Bars over the whole range of the values."""
    counts, edges = np.histogram(values, bins=BINS)
    x = [round(float(x), 4) for x in (edges[:-1] + edges[1:]) / 2]
    return {"type": "bar", "name": name, "x": x, "y": counts.tolist(), "line": {"color": colour}, "marker": {"color": colour}}


def outlines(groups: Sequence[tuple[str, Any, str, str]]) -> list[dict[str, Any]]:
    """Histograms of several groups as lines over the same bins, each the share of its group: (name, values, colour, dash)."""
    arrays = [(name, np.asarray(values), colour, dash) for name, values, colour, dash in groups]
    finite = [(name, array[np.isfinite(array)], colour, dash) for name, array, colour, dash in arrays]
    finite = [group for group in finite if len(group[1])]
    if not finite:
        return []
    low, high = min(float(each[1].min()) for each in finite), max(float(each[1].max()) for each in finite)
    edges = np.linspace(low - 1e-3, high + 1e-3, BINS + 1)
    centre = (edges[:-1] + edges[1:]) / 2
    traces = []
    for name, values, colour, dash in finite:
        share = np.histogram(values, bins=edges)[0] / len(values)
        traces.append(line(name, centre, share, colour, dash, line={"color": colour, "width": 2, "dash": dash, "shape": "hvh"}))
    return traces


def figure(traces: list[dict[str, Any]], axis: str, *, share: bool = False) -> dict[str, Any]:
    """A panel's figure; `share`: the values are shares, shown in per cent."""
    layout: dict[str, Any] = {
        "height": 220,
        "margin": {"l": 52, "r": 12, "t": 8, "b": 34},
        "hovermode": "x unified",
        "bargap": 0.05,
        "showlegend": len(traces) > 1,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "xaxis": {"title": {"text": axis, "standoff": 4}, "showgrid": False, "nticks": 6},
        "yaxis": {"nticks": 5, "rangemode": "tozero", **({"tickformat": ".2~%"} if share else {})},
    }
    return {"data": traces, "layout": layout}
