"""How many negatives a detector flagged, how many of them are false negatives by the labels, and how similar positives and false negatives
are: counts that add up over steps and ranks.

Precision and recall are counted in two ways. Over pairs, every pair of an anchor and a negative counts once. Per anchor, each labelled
sample has a precision and a recall of its own, over all its views, and the mean over the samples is taken (GloFND's released code, and
so its Table 1): a sample with nothing flagged has precision 1, a sample without false negatives has recall 1. F1 is the harmonic mean of
the two means, which is what the figures of Table 1 come to.

Dimension key: A anchors, P own positives, C candidates, D embedding, K classes, N data set, R = b·V rows of a block, b samples, V views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kinfolk.kinship import others
from kinfolk.pairs import Block

NAN = float("nan")
UNIT = 1 << 20
"""A similarity or a rate of 1 in the sums, which are whole numbers: they come to the same in any order, and after a resume."""


@dataclass(frozen=True)
class Stats:
    """Counts over pairs of an anchor and a negative, over anchors, and over pairs of an anchor and an own positive.

    Args:
        negatives: pairs that could have been flagged.
        flagged: pairs that were.
        judged: flagged pairs with both labels known.
        hits: judged pairs with equal labels.
        kin: pairs of negatives with equal known labels, flagged or not.
        anchors: labelled samples that were anchors, all views of a sample together; once for each level of a detector.
        precision_sum, recall_sum: sums over them of their own precision (1 with nothing flagged) and recall (1 without false negatives).
        positives, positive_sum: pairs of an anchor and an own positive, and the sum of their similarities.
        alike, alike_sum: pairs of negatives with equal known labels, and the sum of their similarities.
    """

    negatives: Tensor
    flagged: Tensor
    judged: Tensor
    hits: Tensor
    kin: Tensor
    anchors: Tensor
    precision_sum: Tensor
    recall_sum: Tensor
    positives: Tensor
    positive_sum: Tensor
    alike: Tensor
    alike_sum: Tensor

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
        """Mean over the anchors of their own precision; NaN without labels, and where nothing was flagged for any of them."""
        return _ratio(self.precision_sum, self.anchors) / UNIT if self.judged else NAN

    @property
    def anchor_recall(self) -> float:
        """Mean over the anchors of their own recall; NaN without labels, and where none of them has a false negative."""
        return _ratio(self.recall_sum, self.anchors) / UNIT if self.kin else NAN

    @property
    def anchor_f1(self) -> float:
        """Harmonic mean of `anchor_precision` and `anchor_recall`; NaN where one of them is."""
        precision, recall = self.anchor_precision, self.anchor_recall
        return 2 * precision * recall / (precision + recall) if precision + recall != 0 else 0.0

    def detection(self) -> dict[str, float]:
        """The figures of detection by name, over pairs and per anchor; NaN where nothing could be counted."""
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
        """Mean similarity of the anchors and their own positives (true positives), such as the other view of the sample."""
        return _ratio(self.positive_sum, self.positives) / UNIT

    @property
    def fn_similarity(self) -> float:
        """Mean similarity of the anchors and the negatives with their label (false negatives); NaN without labels."""
        return _ratio(self.alike_sum, self.alike) / UNIT


@dataclass(frozen=True)
class Alike:
    """What labels say of the pairs of a block.

    Args:
        same_RC: 1 where two known labels are equal, 0 elsewhere and within a sample.
        known_RC: 1 where both labels are known, 0 elsewhere and within a sample; None: all labels are known.
        known_b: 1 where the label of the sample is known.
        kin_b, similarity_b: the number of pairs with equal labels over all views of a sample, and the sum of their similarities.
    """

    same_RC: Tensor
    known_RC: Tensor | None
    known_b: Tensor
    kin_b: Tensor
    similarity_b: Tensor


@dataclass(frozen=True)
class Labels:
    """(N,) labels of all samples, below 0 where unknown; `complete`: whether all are known, which the host finds out once."""

    of_N: Tensor
    complete: bool

    def alike(self, block: Block) -> Alike:
        """What they say of the pairs of a block."""
        label_b, label_C, dtype = self.of_N[block.ids], self.of_N[block.candidate_ids], block.sim_RC.dtype
        same_b1C, other_RC = label_b.view(-1, 1, 1) == label_C, others(block.sim_RC)
        by_view = (len(block.ids), block.num_views, -1)
        known_RC = None
        if self.complete:
            known_b = torch.ones_like(block.num_negatives_b, dtype=dtype)
        else:
            known = label_b >= 0
            known_b, known_b1C = known.to(dtype), known.view(-1, 1, 1) & (label_C >= 0)
            same_b1C = same_b1C & known_b1C
            known_RC = (other_RC.view(by_view) * known_b1C).view_as(block.sim_RC)
        same_RC = (other_RC.view(by_view) * same_b1C).view_as(block.sim_RC)
        sums = _per_sample(same_RC, len(block.ids)), _per_sample(block.sim_RC * same_RC, len(block.ids))
        return Alike(same_RC, known_RC, known_b, *sums)


def _per_sample(values_RC: Tensor, num_samples: int) -> Tensor:
    return values_RC.view(num_samples, -1).sum(1)


def count(negatives_b: Tensor, flagged_R: Tensor | None, kin_RC: Tensor | None = None, alike: Alike | None = None) -> Tensor:
    """(10,) the counts of one block: all fields of `Stats` but those of the own positives.

    Args:
        negatives_b: (b,) how many candidates of each sample, over all its views, could have been flagged.
        flagged_R: (R,) how many candidates of each row were flagged; None: none.
        kin_RC: 1 where these are; None: nowhere.
        alike: see `Labels`; None: there are no labels.
    """
    negatives_b = negatives_b if negatives_b.is_floating_point() else negatives_b.to(torch.get_default_dtype())
    none_b = torch.zeros_like(negatives_b)
    flagged_b = none_b if flagged_R is None else flagged_R.view(len(none_b), -1).sum(1)
    if alike is None:
        columns = (negatives_b, flagged_b, *(none_b,) * 8)
    else:
        hits_b = none_b if kin_RC is None else _per_sample(kin_RC * alike.same_RC, len(none_b))
        judged_b = flagged_b if kin_RC is None or alike.known_RC is None else _per_sample(kin_RC * alike.known_RC, len(none_b))
        whole_2b = torch.stack((judged_b, alike.kin_b))
        rate_2b = (hits_b + (whole_2b == 0)) / whole_2b.clamp(min=1) * alike.known_b  # with nothing to be right about, 1
        precision_b, recall_b, similarity_b = (torch.cat((rate_2b, alike.similarity_b.unsqueeze(0))) * UNIT).round()
        rates = (alike.known_b, precision_b, recall_b, alike.kin_b, similarity_b)
        columns = (negatives_b, flagged_b, judged_b, hits_b, alike.kin_b, *rates)
    return torch.stack(columns).sum(1, dtype=torch.float64).to(torch.int64)


def summed(counts: Sequence[Callable[[], Tensor]], views_AP: Tensor) -> Stats:
    """The counts of a step, from what `count` returns for each block, and from the similarities of the anchors' own positives."""
    blocks = [counted() for counted in counts]
    total = torch.stack(blocks).sum(0) if len(blocks) > 1 else blocks[0]
    similarity = (views_AP * UNIT).round().sum(dtype=torch.float64).to(torch.int64)
    own = torch.stack((torch.full_like(similarity, views_AP.numel()), similarity))
    return Stats.from_counts(torch.cat((total[:8], own, total[8:])))


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part) / float(whole) if whole else NAN
