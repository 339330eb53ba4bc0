"""How many negatives a detector flagged, how many of them are false negatives by the labels, and how similar positives and false negatives
are: counts that add up over steps and ranks.

Precision and recall are counted in two ways. Over pairs, every pair of an anchor and a negative counts once. Per anchor, each labelled
sample has a precision and a recall of its own, over all its views, and the mean over the samples is taken (GloFND's released code, and
so its Table 1): a sample with nothing flagged has precision 1, a sample without false negatives has recall 1. F1 is the harmonic mean of
the two means, which is what the figures of Table 1 come to.

Dimension key: A anchors, P own positives, C candidates, D embedding, K classes, N data set, R = b·V rows of a block, b samples, V views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kinfolk.kinship import others
from kinfolk.pairs import Block, Pairs

NAN = float("nan")
UNIT = 1 << 20
"""A similarity or a rate of 1 in the sums, which are whole numbers: they come to the same in any order, and after a resume."""
COUNTED = 8
"""Length of what `count` returns: the first fields of `Stats`."""
LOOKED_AT = 4096
"""Candidates that the similarity of false negatives is taken of, at most; of more, evenly spread ones."""


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
        alike, alike_sum: pairs of negatives with equal known labels that were looked at, and the sum of their similarities.
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
    """Which pairs of a block have two known labels and which have equal ones, 1 and 0 and 0 within a sample; and (R,) whether the row's is
    known."""

    known_RC: Tensor
    same_RC: Tensor
    known_R: Tensor


@dataclass(frozen=True)
class Labels:
    """(N,) labels of all samples, below 0 where unknown, and the number of classes, which only the host may ask for."""

    of_N: Tensor
    number: int

    def alike(self, block: Block) -> Alike:
        """What they say of the pairs of a block."""
        label_R, label_C = self.of_N[block.row_ids], self.of_N[block.candidate_ids]
        known_R = label_R >= 0
        known_RC = others(block.sim_RC) * (known_R.unsqueeze(1) & (label_C >= 0))
        return Alike(known_RC, known_RC * (label_R.unsqueeze(1) == label_C), known_R)


def summed(counts: Sequence[Tensor | tuple[Tensor, Tensor]], views_AP: Tensor, alike: Tensor | None) -> Stats:
    """The counts of a step, from what `count` gave of each block, or without labels from (R,) negatives and flagged of its rows; from the
    similarities of the anchors' own positives; and from (2,) `alike_similarity`. Only computed where somebody asks."""
    blocks = [each if isinstance(each, Tensor) else count(*each) for each in counts]
    similarity = _whole(views_AP.sum(1))
    own = torch.stack((torch.full_like(similarity, views_AP.numel()), similarity))
    return Stats.from_counts(torch.cat((torch.stack(blocks).sum(0), own, torch.zeros_like(own) if alike is None else alike)))


def count(negatives_R: Tensor, flagged_R: Tensor, kin_RC: Tensor | None = None, alike: Alike | None = None, num_views: int = 1) -> Tensor:
    """(8,) the counts of one block, the first fields of `Stats`.

    Args:
        negatives_R, flagged_R: (R,) how many of each row could have been flagged, and were.
        kin_RC: 1 where these are; None: nowhere.
        alike: see `Labels`; None: there are none.
        num_views: rows of a sample.
    """
    rows = [negatives_R, flagged_R]
    if alike is None:
        counts = torch.stack([row.to(torch.float64) for row in rows]).sum(1).to(torch.int64)
        return torch.cat((counts, counts.new_zeros(COUNTED - 2)))
    none_R = torch.zeros_like(flagged_R)
    judged_R, hits_R = (none_R if kin_RC is None else (kin_RC * each_RC).sum(1) for each_RC in (alike.known_RC, alike.same_RC))
    kin_R = alike.same_RC.sum(1)
    counts = torch.stack([row.to(torch.float64) for row in (*rows, judged_R, hits_R, kin_R)]).sum(1).to(torch.int64)
    return torch.cat((counts, torch.stack(per_anchor(hits_R, judged_R, kin_R, alike.known_R, num_views))))


def per_anchor(hits_R: Tensor, judged_R: Tensor, kin_R: Tensor, known_R: Tensor, num_views: int) -> tuple[Tensor, Tensor, Tensor]:
    """How many labelled samples the rows belong to, and the sums of their own precisions and recalls, all as whole numbers.

    Args:
        hits_R, judged_R, kin_R: (R,) pairs of a row that were flagged rightly, that were flagged, and that are false negatives.
        known_R: (R,) whether the row's label is known.
        num_views: rows of a sample, which stand one after the other.
    """
    hits_b, judged_b, kin_b = (each_R.view(-1, num_views).sum(1) for each_R in (hits_R, judged_R, kin_R))
    known_b = known_R.view(-1, num_views)[:, 0]
    precision_b, recall_b = ((hits_b.double() / whole_b.clamp(min=1)).where(whole_b > 0, 1.0) * known_b for whole_b in (judged_b, kin_b))
    return known_b.sum(), _whole(precision_b), _whole(recall_b)


def alike_similarity(anchors_AD: Tensor, candidates_CD: Tensor, pairs: Pairs, labels: Labels) -> Tensor:
    """(2,) how many pairs of an anchor and a negative have equal labels, and the sum of their similarities; no A × C matrix.

    Σ over the candidates of a class of z·z′ is z times the sum of the class; what is the anchor's own is taken off it."""
    spread = slice(None, None, -(-len(candidates_CD) // LOOKED_AT))
    some_CD, label_C = candidates_CD[spread], labels.of_N[pairs.candidate_ids[spread]]
    label_A = labels.of_N[pairs.ids].repeat_interleave(pairs.num_views)
    class_C, class_A = (label.clamp(min=-1) + 1 for label in (label_C, label_A))  # the first: without label
    of_class_A, size_A = _sums(anchors_AD, class_A, some_CD, class_C, labels.number + 1)
    key_A, key_C = _own_keys(pairs, spread, class_A, class_C, labels.number + 1)
    own_A, own_size_A = _sums(anchors_AD, key_A, some_CD, key_C, len(key_C))
    known_A = label_A >= 0
    alike = ((size_A - own_size_A) * known_A).sum()
    return torch.stack([alike.to(torch.int64), _whole(torch.where(known_A, of_class_A - own_A, 0.0))])


def _sums(anchors_AD: Tensor, key_A: Tensor, candidates_CD: Tensor, key_C: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """(A,), (A,) Σ a·c over the candidates of each anchor's key, and how many these are. Keys are in [0, number); below 0: none."""
    sum_KD = candidates_CD.new_zeros(number, candidates_CD.shape[1]).index_add_(0, key_C, candidates_CD)
    size_K = candidates_CD.new_zeros(number).index_add_(0, key_C, torch.ones_like(candidates_CD[:, 0]))
    held_A = key_A.clamp(min=0)
    return torch.where(key_A >= 0, (anchors_AD * sum_KD[held_A]).sum(1), 0.0), torch.where(key_A >= 0, size_K[held_A], 0.0)


def _own_keys(pairs: Pairs, spread: slice, class_A: Tensor, class_C: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """(A,), (C,) numbers in [0, C) that agree where a candidate is the anchor's own and of its class; −1 where the anchor has none."""
    keys_B, keys_C = (pairs.ids, pairs.candidate_ids) if pairs.groups is None else (pairs.groups, pairs.candidate_groups)
    assert keys_C is not None
    key_A, key_C = keys_B.repeat_interleave(pairs.num_views), keys_C[spread].contiguous()
    if pairs.groups is not None:  # one group may be of several classes; one sample is of one
        sorted_C = key_C.sort().values
        key_A, key_C = _place(sorted_C, key_A) * classes + class_A, _place(sorted_C, key_C) * classes + class_C
    sorted_C = key_C.sort().values
    return _place(sorted_C, key_A), _place(sorted_C, key_C)


def _place(sorted_C: Tensor, key: Tensor) -> Tensor:
    """Where each key first stands in a sorted list; −1 where it does not."""
    at = torch.searchsorted(sorted_C, key).clamp(max=len(sorted_C) - 1)
    return torch.where(sorted_C[at] == key, at, -1)


def _whole(value_A: Tensor) -> Tensor:
    return (value_A.double() * UNIT).round().sum().to(torch.int64)


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part) / float(whole) if whole else NAN
