"""Counts of a step that add up over steps and ranks: how many negatives were flagged, how many of
them are false negatives by the labels, and how similar positives and false negatives are.

Precision and recall are counted over pairs, and per anchor: each labelled sample has a precision
and a recall over all its views, and their mean over samples is taken, as GloFND's released code
does for its Table 1. F1 is the harmonic mean of the two means.

Dimension key: P positives, C candidates, R = b·V rows of a block, b samples, V views.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kinfolk.pairs import Block

NAN = float("nan")
UNIT = 1 << 20
"""A similarity or a rate of 1 in the sums, which are whole numbers: they come to the same in any
order, and after a resume."""


@dataclass(frozen=True)
class Stats:
    """Counts over pairs of an anchor and a negative, over anchors, and over pairs of an anchor and
    an own positive."""

    negatives: Tensor  # pairs that could have been flagged
    flagged: Tensor  # pairs that were
    judged: Tensor  # flagged pairs with both labels known
    hits: Tensor  # judged pairs with equal labels
    kin: Tensor  # pairs of negatives with equal known labels, flagged or not
    anchors: Tensor  # labelled samples that were anchors, once for each level of a detector
    precision_sum: Tensor  # sum of their precisions (1 with nothing flagged)
    recall_sum: Tensor  # sum of their recalls (1 without false negatives)
    positives: Tensor  # pairs of an anchor and a positive
    positive_sum: Tensor  # sum of their similarities
    alike: Tensor  # pairs of negatives with equal known labels
    alike_sum: Tensor  # sum of their similarities

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> Stats:
        return cls.from_counts(torch.zeros(len(fields(cls)), dtype=torch.int64, device=device))

    @classmethod
    def from_counts(cls, counts: Tensor) -> Stats:
        """The inverse of `counts`."""
        return cls(*counts.unbind())

    def counts(self) -> Tensor:
        """(12,) int64: what to sum over ranks."""
        return torch.stack([getattr(self, field.name) for field in fields(self)])

    def __add__(self, other: Stats) -> Stats:
        return Stats.from_counts(self.counts() + other.counts().to(self.negatives.device))

    def __str__(self) -> str:
        """Such as "1.0 % of 65,024 negatives flagged, precision 0.79, recall 0.21"."""
        rates = {"precision": self.precision, "recall": self.recall, "F1": self.f1}
        known = "".join(f", {name} {rate:.2f}" for name, rate in rates.items() if rate == rate)
        share = (
            "no negatives"
            if not self.negatives
            else f"{self.share:.1%} of {int(self.negatives):,} negatives flagged"
        )
        return share + known

    @property
    def share(self) -> float:
        """Share of negatives flagged; NaN without negatives."""
        return _ratio(self.flagged, self.negatives)

    @property
    def precision(self) -> float:
        """Share of the judged pairs with equal labels; NaN without labels or flags."""
        return _ratio(self.hits, self.judged)

    @property
    def recall(self) -> float:
        """Share of the pairs with equal labels that were flagged; NaN without labels."""
        return _ratio(self.hits, self.kin)

    @property
    def f1(self) -> float:
        """2·hits / (judged + kin); NaN without labels."""
        return _ratio(2 * self.hits, self.judged + self.kin)

    @property
    def anchor_precision(self) -> float:
        """Mean over the anchors of their own precision; NaN without labels, and where nothing was
        flagged for any of them."""
        return _ratio(self.precision_sum, self.anchors) / UNIT if self.judged else NAN

    @property
    def anchor_recall(self) -> float:
        """Mean over the anchors of their own recall; NaN without labels, and where none of them has
        a false negative."""
        return _ratio(self.recall_sum, self.anchors) / UNIT if self.kin else NAN

    @property
    def anchor_f1(self) -> float:
        """Harmonic mean of `anchor_precision` and `anchor_recall`; NaN where one of them is."""
        precision, recall = self.anchor_precision, self.anchor_recall
        return 2 * precision * recall / (precision + recall) if precision + recall != 0 else 0.0

    def detection(self) -> dict[str, float]:
        """The figures of detection by name, over pairs and per anchor; NaN where nothing could be
        counted."""
        return {
            "flagged": self.share,
            "precision": self.precision,
            "recall": self.recall,
            "f1": self.f1,
            "anchor_precision": self.anchor_precision,
            "anchor_recall": self.anchor_recall,
            "anchor_f1": self.anchor_f1,
        }

    @property
    def tp_similarity(self) -> float:
        """Mean similarity of the anchors and their own positives (true positives), such as the
        other view of the sample."""
        return _ratio(self.positive_sum, self.positives) / UNIT

    @property
    def fn_similarity(self) -> float:
        """Mean similarity of the anchors and the negatives with their label (false negatives); NaN
        without labels."""
        return _ratio(self.alike_sum, self.alike) / UNIT


def count(
    block: Block,
    kin_RC: Tensor | None,
    labels: tuple[Tensor, Tensor] | None,
    positives: bool = True,
) -> Tensor:
    """(12,) int64 counts of one level of a block, in the order of the fields of `Stats`.

    Args:
        kin_RC: (R, C) bool, the flagged candidates; None: none.
        labels: (b,) of the samples and (C,) of the candidates, below 0 where unknown; None: none.
        positives: whether the positives are counted: once for all levels.
    """
    flagged_b, none = (
        _per_sample(block, kin_RC),
        block.num_negatives_b.new_zeros((), dtype=torch.float64),
    )
    pos = (none, none)
    if positives and block.pos_RP is not None:
        pos = (none + block.pos_RP.numel(), _units(block.pos_RP))
    negatives = block.num_per_sample.sum(dtype=torch.float64)
    if labels is None:
        return _whole(negatives, flagged_b.sum(), *(none,) * 6, *pos, none, none)
    labels_b, labels_C = labels
    known_b = labels_b >= 0
    known_bC = known_b.unsqueeze(1) & (labels_C >= 0)
    other_RC = block.sim_RC > -2
    same_RC = other_RC & _rows(block, (labels_b.unsqueeze(1) == labels_C) & known_bC)
    judged_b, hits_b, alike_b = flagged_b, flagged_b, _per_sample(block, same_RC)
    if kin_RC is not None:
        judged_b = _per_sample(block, kin_RC & _rows(block, known_bC))
        hits_b = _per_sample(block, kin_RC & same_RC)
    # 1 with nothing flagged
    precision_b = torch.where(judged_b > 0, hits_b / judged_b.clamp(min=1), 1.0)
    recall_b = torch.where(alike_b > 0, hits_b / alike_b.clamp(min=1), 1.0)
    alike_sim_b = torch.where(same_RC, block.sim_RC, 0.0).view(len(block.ids), -1).sum(1)
    alike = (alike_b.sum(), _units(alike_sim_b))
    rates = (known_b.sum(), _units(precision_b * known_b), _units(recall_b * known_b))
    return _whole(
        negatives,
        flagged_b.sum(),
        judged_b.sum(),
        hits_b.sum(),
        alike_b.sum(),
        *rates,
        *pos,
        *alike,
    )


def _rows(block: Block, mask_bC: Tensor) -> Tensor:
    """(R, C) a mask of samples and candidates, for each view of a sample."""
    return mask_bC if block.num_views == 1 else mask_bC.repeat_interleave(block.num_views, 0)


def _per_sample(block: Block, mask_RC: Tensor | None) -> Tensor:
    """(b,) float64: how many entries of the mask are True over all views of each sample."""
    if mask_RC is None:
        return torch.zeros_like(block.num_negatives_b, dtype=torch.float64)
    return mask_RC.view(len(block.ids), -1).sum(1, dtype=torch.int32).double()


def _units(values: Tensor) -> Tensor:
    return (values.double() * UNIT).round().sum()


def _whole(*numbers: Tensor) -> Tensor:
    return torch.stack([number.double() for number in numbers]).to(torch.int64)


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part) / float(whole) if whole else NAN
