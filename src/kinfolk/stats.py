"""Counts of a step that add up over steps and ranks.

Precision and recall are counted over pairs, and per anchor: each labelled sample has a precision
and a recall over all its views, of which the mean is taken, as GloFND's released code does for its
Table 1. F1 is the harmonic mean of the two means.

Dimension key: P positives, C candidates, R = b·V rows of a block, b samples, V views.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kinfolk.pairs import Block

NAN, UNIT = float("nan"), 1 << 20
"""A similarity or a rate of 1 in the sums, which are whole numbers: they are the same in any
order, and after a resume."""
NUM_COUNTS = 11


def _count(place: int) -> Any:
    return property(lambda self: self.counts[place])


def _rate(part: str, whole: str, unit: int = 1, needs: str | None = None) -> property:
    """The ratio of two counts; NaN where `whole` or `needs` is 0."""

    def read(self: Stats) -> float:
        total = float(getattr(self, whole))
        undefined = not total or not getattr(self, needs or whole)
        return NAN if undefined else float(getattr(self, part)) / total / unit

    return property(read)


class Stats:
    """How many negatives were flagged, how many of them are false negatives by the labels, and how
    similar positives and false negatives are; and the rates that follow from the counts, NaN where
    nothing could be counted.

    Args:
        counts: (11,) int64, in the order of the properties.
    """

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts

    negatives = _count(0)  # pairs that could have been flagged
    flagged = _count(1)  # pairs that were
    labelled = _count(2)  # flagged pairs with both labels known
    hits = _count(3)  # labelled pairs with equal labels
    kin = _count(4)  # pairs of negatives with equal known labels, flagged or not
    kin_sum = _count(5)  # sum of their similarities
    anchors = _count(6)  # labelled samples that were anchors, once for each level of a detector
    precision_sum = _count(7)  # sum of their precisions (1 with nothing flagged)
    recall_sum = _count(8)  # sum of their recalls (1 without false negatives)
    positives = _count(9)  # pairs of an anchor and a positive
    positive_sum = _count(10)  # sum of their similarities

    share = _rate("flagged", "negatives")
    precision = _rate("hits", "labelled")
    recall = _rate("hits", "kin")
    anchor_precision = _rate("precision_sum", "anchors", UNIT, needs="labelled")
    anchor_recall = _rate("recall_sum", "anchors", UNIT, needs="kin")
    tp_similarity = _rate("positive_sum", "positives", UNIT)
    """Mean similarity of the anchors and their positives, such as the other view."""
    fn_similarity = _rate("kin_sum", "kin", UNIT)
    """Mean similarity of the anchors and the negatives with their label (false negatives)."""

    @property
    def f1(self) -> float:
        """2·hits / (labelled + kin)."""
        return 2 * float(self.hits) / both if (both := float(self.labelled + self.kin)) else NAN

    @property
    def anchor_f1(self) -> float:
        """Harmonic mean of `anchor_precision` and `anchor_recall`."""
        precision, recall = self.anchor_precision, self.anchor_recall
        return 2 * precision * recall / (precision + recall) if precision + recall != 0 else 0.0

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> Stats:
        return cls(torch.zeros(NUM_COUNTS, dtype=torch.int64, device=device))

    def detection(self) -> dict[str, float]:
        """The rates by name, over pairs and per anchor."""
        names = ("precision", "recall", "f1", "anchor_precision", "anchor_recall", "anchor_f1")
        return {"flagged": self.share, **{name: getattr(self, name) for name in names}}

    def __add__(self, other: Stats) -> Stats:
        return Stats(self.counts + other.counts.to(self.counts.device))

    def __str__(self) -> str:
        if not self.negatives:
            return "no negatives"
        rates = {"precision": self.precision, "recall": self.recall, "F1": self.f1}
        known = "".join(f", {name} {rate:.2f}" for name, rate in rates.items() if rate == rate)
        return f"{self.share:.1%} of {int(self.negatives):,} negatives flagged{known}"


def count(
    block: Block,
    kin_RC: Tensor | None,
    labels: tuple[Tensor, Tensor] | None,
    positives: bool = True,
) -> Tensor:
    """(11,) int64 counts of one level of a block.

    Args:
        kin_RC: (R, C) bool, the flagged candidates; None: none.
        labels: (b,) of the samples and (C,) of the candidates, below 0 where unknown; None: none.
        positives: whether the positives are counted: once for all levels.
    """
    sim_bVC, negatives = block.sim_bVC, block.num_per_sample.sum()
    found = [negatives, *[torch.zeros_like(negatives)] * (NUM_COUNTS - 1)]
    if kin_RC is not None:
        found[1] = kin_RC.sum(dtype=torch.int32)
    if labels is not None:
        known_b = labels[0] >= 0
        known_b1C = (known_b.unsqueeze(1) & (labels[1] >= 0)).unsqueeze(1)
        same_b1C = known_b1C & (labels[0].view(-1, 1, 1) == labels[1])
        same_bVC = same_b1C & (sim_bVC > -2)
        masks = [same_bVC]
        if kin_RC is not None:
            kin_bVC = kin_RC.view(sim_bVC.shape)
            masks += [kin_bVC & known_b1C, kin_bVC & same_bVC]
        same_b, *of_kin = (mask.sum((1, 2), dtype=torch.int32).double() for mask in masks)
        labelled_b, hits_b = of_kin or [torch.zeros_like(same_b)] * 2
        precision_b = torch.where(labelled_b > 0, hits_b / labelled_b.clamp(min=1), 1.0)
        recall_b = torch.where(same_b > 0, hits_b / same_b.clamp(min=1), 1.0)
        similarity = _units(torch.where(same_bVC, sim_bVC, 0.0).sum((1, 2)))
        rates = _units(precision_b * known_b), _units(recall_b * known_b)
        number = labelled_b.sum(), hits_b.sum(), same_b.sum()
        found[2:9] = [*number, similarity, known_b.sum(), *rates]
    if positives and block.pos_RP is not None:
        found[9:] = [negatives.new_full((), block.pos_RP.numel()), _units(block.pos_RP)]
    return torch.stack([each.long() for each in found])


def _units(values: Tensor) -> Tensor:
    return (values.double() * UNIT).round().sum()
