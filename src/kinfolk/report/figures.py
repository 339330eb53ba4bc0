"""The curves of a run over its epochs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kinfolk.report.plots import Panel, figure


@dataclass(frozen=True)
class Curve:
    """One panel of curves over the epochs: metric name, name in the legend and palette colour of each line."""

    id: str
    title: str
    note: str
    lines: tuple[tuple[str, str, str], ...]
    percent: bool = False
    from_zero: bool = False


CURVES = (
    Curve("loss", "Loss", "mean over the epoch", (("loss", "Loss", "accent"),)),
    Curve("knn", "kNN accuracy", "weighted kNN on the encoder's features", (("knn", "kNN", "accent"),), percent=True),
    Curve("flagged", "Flagged pairs", "share of the negatives taken for kin", (("flagged", "Flagged", "accent"),), True, True),
    Curve(
        "detection",
        "Detection",
        "flagged pairs against the labels",
        (("precision", "Precision", "accent"), ("recall", "Recall", "second"), ("f1", "F1", "third")),
        percent=True,
    ),
    Curve(
        "anchor_detection",
        "Detection per anchor",
        "the same for each anchor, mean over the anchors",
        (("anchor_precision", "Precision", "accent"), ("anchor_recall", "Recall", "second"), ("anchor_f1", "F1", "third")),
        percent=True,
    ),
    Curve(
        "clusters",
        "Clusters",
        "pseudo-labels of the first level against the labels; NMI is divided by {entropy}",
        (("mtpr", "MTPR", "accent"), ("mtnr", "MTNR", "second"), ("nmi", "NMI", "third")),
        percent=True,
    ),
    Curve(
        "similarity",
        "Similarity",
        "anchors with their positives, and with negatives of their label",
        (("tp_similarity", "True positives", "accent"), ("fn_similarity", "False negatives", "second")),
    ),
    Curve(
        "features_nmi",
        "NMI of the features",
        "k-means on the encoder's features against the labels, mean over seeds, divided by {entropy}",
        (("features_nmi", "NMI", "accent"),),
        percent=True,
    ),
    Curve(
        "hierarchy",
        "Hierarchy",
        "samples that conform to it, that are clustered at its top, and in the largest cluster there",
        (("conforming", "Conforming", "accent"), ("clustered", "Clustered", "second"), ("largest_cluster", "Largest", "third")),
        percent=True,
    ),
    Curve("temperature", "Temperature", "of the loss of image and text", (("temperature", "Temperature", "accent"),), from_zero=True),
    Curve("lr", "Learning rate", "at the end of the epoch", (("lr", "Learning rate", "accent"),), from_zero=True),
    Curve("speed", "Images per second", "training only", (("images_per_second", "Images/s", "accent"),), from_zero=True),
    Curve(
        "cost",
        "Cost of an epoch",
        "seconds of its steps, and of embedding and clustering before them",
        (("seconds", "Steps", "accent"), ("refresh_seconds", "Refresh", "second")),
        from_zero=True,
    ),
)
ENTROPIES = {
    "arithmetic": "the arithmetic mean of the entropies",
    "geometric": "the geometric mean of the entropies",
    "min": "the smaller entropy",
    "max": "the larger entropy",
}
"""What NMI is divided by, for each setting of `knn.nmi_normaliser`."""


def curve_panels(epochs: Sequence[dict[str, float]], normaliser: str = "arithmetic") -> list[Panel]:
    """One panel for each curve the run has at least one finite value of. `normaliser`: of the run's NMI."""
    panels = []
    for curve in CURVES:
        lines = {name: _points(epochs, name) for name, _, _ in curve.lines}
        if any(x for x, _ in lines.values()):
            traces = [_trace(curve, label, colour, *lines[name]) for name, label, colour in curve.lines if lines[name][0]]
            description = "; ".join(_in_words(curve, label, *lines[name]) for name, label, _ in curve.lines if lines[name][0])
            note = curve.note.format(entropy=ENTROPIES.get(normaliser, normaliser))
            panels.append(Panel(curve.id, curve.title, note, description, _figure(curve, traces)))
    return panels


def _points(epochs: Sequence[dict[str, float]], name: str) -> tuple[list[int], list[float]]:
    rows = [(int(row["epoch"]), row[name]) for row in epochs if name in row and math.isfinite(row[name])]
    return [x for x, _ in rows], [y for _, y in rows]


def _trace(curve: Curve, label: str, colour: str, x: list[int], y: list[float]) -> dict[str, Any]:
    few = len(x) <= 40
    return {
        "type": "scatter",
        "mode": "lines+markers" if few else "lines",
        "name": label,
        "x": x,
        "y": y,
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 5},
        "hovertemplate": f"%{{y:{_format(curve)}}}" + ("<extra></extra>" if len(curve.lines) == 1 else ""),
    }


def _figure(curve: Curve, traces: list[dict[str, Any]]) -> dict[str, Any]:
    made = figure(traces, "epoch")
    made["layout"]["xaxis"]["tickformat"] = "d"
    made["layout"]["yaxis"] |= {"tickformat": ".2~%" if curve.percent else "~g", "rangemode": "tozero" if curve.from_zero else "normal"}
    return made


def _format(curve: Curve) -> str:
    return ".2%" if curve.percent else ".4~g"


def _in_words(curve: Curve, label: str, x: list[int], y: list[float]) -> str:
    first, last = (f"{value:.1%}" if curve.percent else f"{value:.4g}" for value in (y[0], y[-1]))
    return f"{label}: {first} in epoch {x[0]}" + (f", {last} in epoch {x[-1]}" if len(x) > 1 else "")
