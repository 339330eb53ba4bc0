"""Accuracy at shares of the labels: GloFND paper, Figure 4."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kinfolk.report.plots import Panel, figure, line

LINES = {"semi": ("linear probe", "accent"), "finetune": ("fine-tuning", "second")}
Point = tuple[float, float, float | None]
"""Share of the labels, accuracy, and its deviation where there is one."""


def fraction_panels(results: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """One panel with a line for each protocol that measured at shares of the labels; none without such."""
    found = {each["protocol"]: points(each) for each in results if each.get("protocol") in LINES}
    found = {name: found[name] for name in LINES if found.get(name)}
    if not found:
        return []
    traces, described = [], []
    for name, values in found.items():
        label, colour = LINES[name]
        shares, accuracies, deviations = zip(*values, strict=True)
        bars = {"type": "data", "array": [deviation or 0 for deviation in deviations], "color": "soft", "thickness": 1}
        more: dict[str, Any] = {"error_y": bars} if any(deviations) else {}
        traces.append(line(label, shares, accuracies, colour, mode="lines+markers", hovertemplate="%{y:.2%}", **more))
        described.append(f"{label}: " + ", ".join(f"{accuracy:.1%} with {share:.4g} of the labels" for share, accuracy, _ in values))
    drawn = figure(traces, "share of the labels", share=True)
    ticks = sorted({share for values in found.values() for share, _, _ in values})
    drawn["layout"]["xaxis"] |= {"type": "log", "tickvals": ticks, "ticktext": [f"{100 * share:.4g} %" for share in ticks]}
    drawn["layout"]["yaxis"]["rangemode"] = "normal"
    return [Panel("fractions", "Accuracy at shares of the labels", "mean over the draws, and their deviation", "; ".join(described), drawn)]


def points(result: Mapping[str, Any]) -> list[Point]:
    """What a protocol measured, by share; what is not there or not a number is passed over."""
    rows = result.get("fractions")
    rows = rows if isinstance(rows, list) else []
    found = [
        (float(row["fraction"]), float(row["accuracy"]), row.get("deviation") if _number(row.get("deviation")) else None)
        for row in rows
        if isinstance(row, Mapping) and _number(row.get("fraction")) and row["fraction"] > 0 and _number(row.get("accuracy"))
    ]
    return sorted(found, key=lambda point: point[0])


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
