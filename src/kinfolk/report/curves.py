"""Figures of the report: curves over the epochs, and the distribution of the samples' thresholds.

The threshold panel shows learned thresholds, exact quantiles, and what FNC would use in a batch
(GloFND paper, Figure 3a); for rings it shows both bounds.

Dimension key: M samples that are compared, R rows of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kinfolk.detectors import FNC, GloFND, Ring
from kinfolk.detectors.thresholds import batch_quantile
from kinfolk.report.html import Panel, figure, outlines
from kinfolk.seeding import generator

if TYPE_CHECKING:
    from kinfolk.report.gallery import Compared


@dataclass(frozen=True)
class Bound:
    """A bound on the similarity: `above` is the share of an anchor's negatives above it, `learned`
    (M,) the learned values if there are any."""

    name: str
    above: float
    learned: Tensor | None


def bounds_of(compared: Compared) -> list[Bound]:
    """The bounds of the run's detector; empty for a detector without bounds."""
    detector = None if compared.detector is None else compared.detector.inner
    if isinstance(detector, GloFND) and detector.alpha > 0 and detector.alphas is None:
        return [Bound("threshold", detector.alpha, detector.thresholds[compared.ids])]
    if isinstance(detector, FNC) and detector.alpha is not None:
        return [Bound("threshold", detector.alpha, None)]
    if isinstance(detector, Ring):
        shares = {
            name: share
            for name, share in (("lower", detector.lower), ("upper", detector.upper))
            if 0 < share < 1
        }
        state = {} if detector.boundaries is None else detector.boundaries.store.read(compared.ids)
        return [
            Bound(name, 1 - share, state.get(f"{name}_level")) for name, share in shares.items()
        ]
    return []


def level_panels(compared: Compared, batch_size: int, seed: int) -> list[Panel]:
    """One panel with the distribution of each bound; empty if the detector has none or there are
    too few samples."""
    bounds = bounds_of(compared)
    if not bounds or len(compared.ids) < 3:
        return []
    exact = exact_levels(compared, bounds)
    if bounds[0].name == "threshold":
        return [
            _thresholds(
                bounds[0],
                exact[0],
                batch_levels(compared, bounds[0].above, batch_size, seed),
                batch_size,
            )
        ]
    colours = {"lower": "accent", "upper": "second"}
    groups = [
        (f"{bound.name}, exact", level_M, colours[bound.name], "solid")
        for bound, level_M in zip(bounds, exact, strict=True)
    ]
    learned = [
        (bound.name, bound.learned)
        for bound in bounds
        if bound.learned is not None and bool(bound.learned.isfinite().any())
    ]
    groups += [
        (f"{name}, learned", level_M[level_M.isfinite()], colours[name], "dot")
        for name, level_M in learned
    ]
    shares = " and ".join(f"{1 - bound.above:.4g}" for bound in bounds)
    note = f"similarities at the shares {shares} of each sample's negatives"
    return [
        Panel(
            "levels",
            "Ring",
            note,
            _medians(groups),
            figure(outlines(groups), "similarity", share=True),
        )
    ]


def exact_levels(compared: Compared, bounds: list[Bound]) -> list[Tensor]:
    """(M,) for each bound, the exact quantile over all other samples."""
    levels: list[list[Tensor]] = [[] for _ in bounds]
    number = len(compared.ids) - 1
    for _, sim_RM, _ in compared.blocks():
        n_R = torch.full((len(sim_RM),), number)
        for found, bound in zip(levels, bounds, strict=True):
            found.append(batch_quantile(sim_RM, n_R, bound.above))
    return [torch.cat(found) for found in levels]


def batch_levels(compared: Compared, alpha: float, batch_size: int, seed: int) -> Tensor:
    """(M,) the lowest similarity that FNC flags in random batches."""
    order = torch.randperm(len(compared.ids), generator=generator(seed, "batches"))
    levels = torch.empty(len(order))
    for batch in order.tensor_split(max(1, len(order) // batch_size)):
        sim = (compared.embedding[batch] @ compared.embedding[batch].T).fill_diagonal_(-torch.inf)
        number = max(1, round(alpha * (len(batch) - 1)))
        levels[batch] = sim.topk(number, dim=1).values[:, -1]
    return levels


def _thresholds(bound: Bound, exact_M: Tensor, batch_M: Tensor, batch_size: int) -> Panel:
    groups = [] if bound.learned is None else [("learned", bound.learned, "accent", "solid")]
    groups += [("exact", exact_M, "second", "solid"), ("FNC", batch_M, "third", "dot")]
    described = _medians(groups)
    for name, level_M, *_ in groups:
        if name != "exact":
            described += (
                f"; {name} differ from the exact ones by {(level_M - exact_M).abs().mean():.3f} on"
                " average"
            )
    note = (
        f"a share of {bound.above:.4g} lies above; exact over {len(exact_M):,} samples, FNC in"
        f" batches of {batch_size:,}"
    )
    return Panel(
        "levels",
        "Thresholds of the samples",
        note,
        described,
        figure(outlines(groups), "similarity", share=True),
    )


def _medians(groups: list[tuple[str, Tensor, str, str]]) -> str:
    return "Medians: " + ", ".join(f"{name} {level_M.median():.3f}" for name, level_M, *_ in groups)


@dataclass(frozen=True)
class Curve:
    """One panel of curves over the epochs; `lines` holds metric name, name in the legend and
    palette colour of each. `alone` is the note if only the first line has values."""

    id: str
    title: str
    note: str
    lines: tuple[tuple[str, str, str], ...]
    percent: bool = False
    from_zero: bool = False
    needs_labels: bool = False
    alone: str = ""


CURVES = (
    Curve("loss", "Loss", "mean over the epoch", (("loss", "Loss", "accent"),)),
    Curve(
        "knn",
        "kNN accuracy",
        "weighted kNN on the encoder's features",
        (("knn", "kNN", "accent"),),
        True,
        needs_labels=True,
    ),
    Curve(
        "flagged",
        "Flagged pairs",
        "share of the negatives flagged as kin",
        (("flagged", "Flagged", "accent"),),
        True,
        True,
    ),
    Curve(
        "detection",
        "Detection",
        "flagged pairs against the labels",
        (
            ("precision", "Precision", "accent"),
            ("recall", "Recall", "second"),
            ("f1", "F1", "third"),
        ),
        percent=True,
        needs_labels=True,
    ),
    Curve(
        "anchor_detection",
        "Detection per anchor",
        "computed for each anchor, mean over the anchors",
        (
            ("anchor_precision", "Precision", "accent"),
            ("anchor_recall", "Recall", "second"),
            ("anchor_f1", "F1", "third"),
        ),
        percent=True,
        needs_labels=True,
    ),
    Curve(
        "clusters",
        "Clusters",
        "pseudo-labels of the first level against the labels; NMI is normalised by {entropy}",
        (("mtpr", "MTPR", "accent"), ("mtnr", "MTNR", "second"), ("nmi", "NMI", "third")),
        percent=True,
        needs_labels=True,
    ),
    Curve(
        "similarity",
        "Similarity",
        "of anchors to their positives, and to negatives with the same label",
        (
            ("tp_similarity", "True positives", "accent"),
            ("fn_similarity", "False negatives", "second"),
        ),
        alone="of anchors to their positives",
    ),
    Curve(
        "features_nmi",
        "NMI of the features",
        "k-means on the encoder's features against the labels, mean over seeds, normalised by"
        " {entropy}",
        (("features_nmi", "NMI", "accent"),),
        percent=True,
        needs_labels=True,
    ),
    Curve(
        "hierarchy",
        "Hierarchy",
        "share of samples that conform to it, are clustered at its top level, and are in the"
        " largest cluster there",
        (
            ("conforming", "Conforming", "accent"),
            ("clustered", "Clustered", "second"),
            ("largest_cluster", "Largest", "third"),
        ),
        percent=True,
    ),
    Curve(
        "keys",
        "Retrieved keys",
        "share of anchors with a key from the queue, and of these keys with the anchor's label",
        (("with_key", "Anchors with a key", "accent"), ("key_precision", "Same label", "second")),
        percent=True,
        from_zero=True,
        alone="share of anchors with a key from the queue",
    ),
    Curve(
        "accepted",
        "Accepted labels",
        "share of the samples whose cluster label is accepted, mean over the levels",
        (("accepted", "Accepted", "accent"),),
        percent=True,
        from_zero=True,
    ),
    Curve(
        "temperature",
        "Temperature",
        "of the loss",
        (("temperature", "Temperature", "accent"),),
        from_zero=True,
    ),
    Curve(
        "lr",
        "Learning rate",
        "at the end of the epoch",
        (("lr", "Learning rate", "accent"),),
        from_zero=True,
    ),
    Curve(
        "speed",
        "Images per second",
        "training only",
        (("images_per_second", "Images/s", "accent"),),
        from_zero=True,
    ),
    Curve(
        "cost",
        "Cost of an epoch",
        "seconds of the steps, and of embedding and clustering before them",
        (("seconds", "Steps", "accent"), ("refresh_seconds", "Refresh", "second")),
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
"""Normaliser of NMI in words, for each setting of `knn.nmi_normaliser`."""


def curve_panels(
    epochs: Sequence[dict[str, float]], normaliser: str = "arithmetic", labelled: bool = True
) -> list[Panel]:
    """One panel for each curve with at least one finite value.

    Args:
        normaliser: setting of the run's NMI.
        labelled: False leaves out the curves that are measured with labels.
    """
    panels = []
    for curve in CURVES:
        if curve.needs_labels and not labelled:
            continue
        lines = {name: _points(epochs, name) for name, _, _ in curve.lines}
        if any(x for x, _ in lines.values()):
            traces = [
                _trace(curve, label, colour, *lines[name])
                for name, label, colour in curve.lines
                if lines[name][0]
            ]
            description = "; ".join(
                _in_words(curve, label, *lines[name])
                for name, label, _ in curve.lines
                if lines[name][0]
            )
            alone = bool(curve.alone) and len(traces) == 1
            note = (curve.alone if alone else curve.note).format(
                entropy=ENTROPIES.get(normaliser, normaliser)
            )
            panels.append(
                Panel(curve.id, curve.title, note, description, curve_figure(curve, traces))
            )
    return panels


def _points(epochs: Sequence[dict[str, float]], name: str) -> tuple[list[int], list[float]]:
    rows = [
        (int(row["epoch"]), row[name]) for row in epochs if name in row and math.isfinite(row[name])
    ]
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
        "hovertemplate": (
            f"%{{y:{_format(curve)}}}" + ("<extra></extra>" if len(curve.lines) == 1 else "")
        ),
    }


def curve_figure(curve: Curve, traces: list[dict[str, Any]]) -> dict[str, Any]:
    """The figure of curves over the epochs, with ticks at whole epochs."""
    made = figure(traces, "epoch")
    first, last = min(trace["x"][0] for trace in traces), max(trace["x"][-1] for trace in traces)
    step = max(1, math.ceil((last - first) / 6))  # whole epochs, also in short runs
    made["layout"]["xaxis"] |= {
        "tickformat": "d",
        "tickmode": "linear",
        "tick0": first,
        "dtick": step,
    }
    made["layout"]["yaxis"] |= {
        "tickformat": ".2~%" if curve.percent else "~g",
        "rangemode": "tozero" if curve.from_zero else "normal",
    }
    return made


def _format(curve: Curve) -> str:
    return ".2%" if curve.percent else ".4~g"


def _in_words(curve: Curve, label: str, x: list[int], y: list[float]) -> str:
    first, last = (f"{value:.1%}" if curve.percent else f"{value:.4g}" for value in (y[0], y[-1]))
    return f"{label}: {first} in epoch {x[0]}" + (
        f", {last} in epoch {x[-1]}" if len(x) > 1 else ""
    )
