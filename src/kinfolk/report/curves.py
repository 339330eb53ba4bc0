"""Figures of the report: curves over the epochs, and the bounds of the detector: learned, exact,
and what FNC would use in a batch (GloFND paper, Figure 3a).

Dimension key: M samples that are compared, R rows of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kinfolk.detectors.base import Bound
from kinfolk.detectors.thresholds import batch_quantile
from kinfolk.report.html import Panel, figure, outlines
from kinfolk.seeding import generator

if TYPE_CHECKING:
    from kinfolk.report.gallery import Compared

COLOURS = ("accent", "second", "third")


# ---- the bounds of the detector


def bounds_of(compared: Compared) -> list[Bound]:
    return [] if compared.detector is None else compared.detector.inner.bounds(compared.ids)


def level_panels(compared: Compared, batch_size: int, seed: int) -> list[Panel]:
    """One panel with the distribution of each bound; empty if the detector has none or there are
    too few samples."""
    bounds = bounds_of(compared)
    if not bounds or len(compared.ids) < 3:
        return []
    exact = exact_levels(compared, bounds)
    if bounds[0].name == "threshold":
        batch = batch_levels(compared, bounds[0].above, batch_size, seed)
        return [_threshold_panel(bounds[0], exact[0], batch, batch_size)]
    groups = []
    for bound, level_M in zip(bounds, exact, strict=True):
        groups.append((f"{bound.name}, exact", level_M, _ring_colour(bound), "solid"))
    for bound in bounds:
        if bound.learned is not None and bool((finite_M := bound.learned.isfinite()).any()):
            learned = bound.learned[finite_M]
            groups.append((f"{bound.name}, learned", learned, _ring_colour(bound), "dot"))
    shares = " and ".join(f"{1 - bound.above:.4g}" for bound in bounds)
    note = f"similarities at the shares {shares} of each sample's negatives"
    drawn = figure(outlines(groups), "similarity", share=True)
    return [Panel("levels", "Ring", note, _medians(groups), drawn)]


def exact_levels(compared: Compared, bounds: list[Bound]) -> list[Tensor]:
    """(M,) for each bound, the exact quantile over all other samples."""
    levels: list[list[Tensor]] = [[] for _ in bounds]
    for _, sim_RM, _ in compared.blocks():
        n_R = torch.full((len(sim_RM),), len(compared.ids) - 1)
        for level, bound in zip(levels, bounds, strict=True):
            level.append(batch_quantile(sim_RM, n_R, bound.above))
    return [torch.cat(level) for level in levels]


def batch_levels(compared: Compared, alpha: float, batch_size: int, seed: int) -> Tensor:
    """(M,) the lowest similarity that FNC flags in random batches."""
    order = torch.randperm(len(compared.ids), generator=generator(seed, "batches"))
    levels = torch.empty(len(order))
    for batch in order.tensor_split(max(1, len(order) // batch_size)):
        sim = (compared.embedding[batch] @ compared.embedding[batch].T).fill_diagonal_(-torch.inf)
        number = max(1, round(alpha * (len(batch) - 1)))
        levels[batch] = sim.topk(number, dim=1).values[:, -1]
    return levels


def _threshold_panel(bound: Bound, exact_M: Tensor, batch_M: Tensor, batch_size: int) -> Panel:
    groups = [("exact", exact_M, "second", "solid"), ("FNC", batch_M, "third", "dot")]
    if bound.learned is not None:
        groups.insert(0, ("learned", bound.learned, "accent", "solid"))
    described = _medians(groups)
    for name, level_M, *_ in groups:
        if name != "exact":
            error = (level_M - exact_M).abs().mean()
            described += f"; {name} differ from the exact ones by {error:.3f} on average"
    note = (
        f"a share of {bound.above:.4g} lies above; exact over {len(exact_M):,} samples, FNC in"
        f" batches of {batch_size:,}"
    )
    drawn = figure(outlines(groups), "similarity", share=True)
    return Panel("levels", "Thresholds of the samples", note, described, drawn)


def _ring_colour(bound: Bound) -> str:
    return "accent" if bound.name == "lower" else "second"


def _medians(groups: list[tuple[str, Tensor, str, str]]) -> str:
    return "Medians: " + ", ".join(f"{name} {level_M.median():.3f}" for name, level_M, *_ in groups)


# ---- curves over the epochs


@dataclass(frozen=True)
class Curve:
    """One panel of curves over the epochs: `lines` names each metric in the legend; `alone` is the
    note if only the first line has values."""

    id: str
    title: str
    note: str
    lines: dict[str, str] = field(default_factory=dict)
    percent: bool = False
    from_zero: bool = False
    needs_labels: bool = False
    alone: str = ""


CURVES = (
    Curve("loss", "Loss", "mean over the epoch", {"loss": "Loss"}),
    Curve(
        "knn",
        "kNN accuracy",
        "weighted kNN on the encoder's features",
        {"knn": "kNN"},
        percent=True,
        needs_labels=True,
    ),
    Curve(
        "flagged",
        "Flagged pairs",
        "share of the negatives flagged as kin",
        {"flagged": "Flagged"},
        percent=True,
        from_zero=True,
    ),
    Curve(
        "detection",
        "Detection",
        "flagged pairs against the labels",
        {"precision": "Precision", "recall": "Recall", "f1": "F1"},
        percent=True,
        needs_labels=True,
    ),
    Curve(
        "anchor_detection",
        "Detection per anchor",
        "computed for each anchor, mean over the anchors",
        {"anchor_precision": "Precision", "anchor_recall": "Recall", "anchor_f1": "F1"},
        percent=True,
        needs_labels=True,
    ),
    Curve(
        "clusters",
        "Clusters",
        "pseudo-labels of the first level against the labels; NMI is normalised by {entropy}",
        {"mtpr": "MTPR", "mtnr": "MTNR", "nmi": "NMI"},
        percent=True,
        needs_labels=True,
    ),
    Curve(
        "similarity",
        "Similarity",
        "of anchors to their positives, and to negatives with the same label",
        {"tp_similarity": "True positives", "fn_similarity": "False negatives"},
        alone="of anchors to their positives",
    ),
    Curve(
        "features_nmi",
        "NMI of the features",
        "k-means on the encoder's features against the labels, mean over seeds, normalised by"
        " {entropy}",
        {"features_nmi": "NMI"},
        percent=True,
        needs_labels=True,
    ),
    Curve(
        "hierarchy",
        "Hierarchy",
        "share of samples that conform to it, are clustered at its top level, and are in the"
        " largest cluster there",
        {"conforming": "Conforming", "clustered": "Clustered", "largest_cluster": "Largest"},
        percent=True,
    ),
    Curve(
        "keys",
        "Retrieved keys",
        "share of anchors with a key from the queue, and of these keys with the anchor's label",
        {"with_key": "Anchors with a key", "key_precision": "Same label"},
        percent=True,
        from_zero=True,
        alone="share of anchors with a key from the queue",
    ),
    Curve(
        "accepted",
        "Accepted labels",
        "share of the samples whose cluster label is accepted, mean over the levels",
        {"accepted": "Accepted"},
        percent=True,
        from_zero=True,
    ),
    Curve(
        "temperature", "Temperature", "of the loss", {"temperature": "Temperature"}, from_zero=True
    ),
    Curve(
        "lr", "Learning rate", "at the end of the epoch", {"lr": "Learning rate"}, from_zero=True
    ),
    Curve(
        "speed",
        "Images per second",
        "training only",
        {"images_per_second": "Images/s"},
        from_zero=True,
    ),
    Curve(
        "cost",
        "Cost of an epoch",
        "seconds of the steps, and of embedding and clustering before them",
        {"seconds": "Steps", "refresh_seconds": "Refresh"},
        from_zero=True,
        alone="seconds of the steps",
    ),
)
ENTROPIES = {
    "arithmetic": "the arithmetic mean of the entropies",
    "geometric": "the geometric mean of the entropies",
    "min": "the smaller entropy",
    "max": "the larger entropy",
}
"""Settings of `knn.nmi_normaliser` in words."""


def curve_panels(
    epochs: Sequence[dict[str, float]], normaliser: str = "arithmetic", labelled: bool = True
) -> list[Panel]:
    """One panel for each curve with a finite value; without labels not those that need them.
    `normaliser`: of the NMI."""
    panels = []
    for curve in CURVES:
        if curve.needs_labels and not labelled:
            continue
        traces, described = [], []
        for (metric, label), colour in zip(curve.lines.items(), COLOURS, strict=False):
            rows = [row for row in epochs if math.isfinite(row.get(metric, math.nan))]
            if rows:
                x, y = [int(row["epoch"]) for row in rows], [row[metric] for row in rows]
                traces.append(_trace(curve, label, colour, x, y))
                described.append(_in_words(curve, label, x, y))
        if traces:
            alone = bool(curve.alone) and len(traces) == 1
            entropy = ENTROPIES.get(normaliser, normaliser)
            note = (curve.alone if alone else curve.note).format(entropy=entropy)
            drawn = curve_figure(curve, traces)
            panels.append(Panel(curve.id, curve.title, note, "; ".join(described), drawn))
    return panels


def _trace(curve: Curve, label: str, colour: str, x: list[int], y: list[float]) -> dict[str, Any]:
    name = "<extra></extra>" if len(curve.lines) == 1 else ""
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= 40 else "lines",
        "name": label,
        "x": x,
        "y": y,
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 5},
        "hovertemplate": f"%{{y:{'.2%' if curve.percent else '.4~g'}}}{name}",
    }


def curve_figure(curve: Curve, traces: list[dict[str, Any]]) -> dict[str, Any]:
    """Curves with ticks at whole epochs, also in short runs."""
    drawn = figure(traces, "epoch")
    first, last = min(trace["x"][0] for trace in traces), max(trace["x"][-1] for trace in traces)
    step = max(1, math.ceil((last - first) / 6))
    ticks = {"tickformat": "d", "tickmode": "linear", "tick0": first, "dtick": step}
    drawn["layout"]["xaxis"] |= ticks
    drawn["layout"]["yaxis"] |= {
        "tickformat": ".2~%" if curve.percent else "~g",
        "rangemode": "tozero" if curve.from_zero else "normal",
    }
    return drawn


def _in_words(curve: Curve, label: str, x: list[int], y: list[float]) -> str:
    first, last = (f"{value:.1%}" if curve.percent else f"{value:.4g}" for value in (y[0], y[-1]))
    text = f"{label}: {first} in epoch {x[0]}"
    return f"{text}, {last} in epoch {x[-1]}" if len(x) > 1 else text
