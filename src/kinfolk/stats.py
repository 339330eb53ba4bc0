"""How many negatives a detector flagged, how many of them are false negatives by the labels, and how similar positives and false negatives
are: counts that add up over steps and ranks.

Precision and recall are counted in two ways. Over pairs, every pair of an anchor and a negative counts once. Per anchor, each labelled
sample has a precision and a recall of its own, over all its views, and the mean over the samples is taken (GloFND's released code, and
so its Table 1): a sample with nothing flagged has precision 1, a sample without false negatives has recall 1. F1 is the harmonic mean of
the two means, which is what the figures of Table 1 come to.

Dimension key: A anchors, P own positives, C candidates, D embedding, K classes, N data set, R = b·V rows of a block, b samples, V views,
M places.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.pairs import Block, Pairs, own_matches

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


def count(
    block: Block, kin: tuple[Tensor, Tensor] | None, own: tuple[Tensor, Tensor], labels_N: Tensor | None, flagged_R: Tensor
) -> Tensor:
    """(8,) the counts of one block. `kin`, `own`: places of flagged pairs and of pairs within a sample; `flagged_R`: how many of a row.

    Only those are looked at one by one; the number of pairs with equal labels comes from the sizes of the classes."""
    negatives, flagged = block.num_negatives_R.sum(), flagged_R.double().sum().long()
    if labels_N is None:
        return torch.stack([negatives, flagged, *torch.zeros_like(negatives).expand(COUNTED - 2)])
    label_R, label_C = labels_N[block.row_ids], labels_N[block.candidate_ids]
    size_K = torch.zeros(int(labels_N.max()) + 2, dtype=torch.int64, device=label_C.device)  # the first: without label
    size_K.index_add_(0, (label_C + 1).clamp(min=0), torch.ones_like(block.candidate_ids))
    own_R, _ = _agree(label_R, label_C, own)
    kin_R = (size_K[(label_R + 1).clamp(min=0)] - own_R).where(label_R >= 0, 0)
    none_R = torch.zeros_like(own_R)
    hits_R, judged_R = (none_R, none_R) if kin is None else _agree(label_R, label_C, kin)
    by_anchor = per_anchor(hits_R, judged_R, kin_R, label_R >= 0, block.num_views)
    return torch.stack([negatives, flagged, judged_R.sum(), hits_R.sum(), kin_R.sum(), *by_anchor])


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


def measure(anchors_AD: Tensor, candidates_CD: Tensor, own_AP: Tensor, pairs: Pairs, labels_N: Tensor | None) -> Tensor:
    """(4,) positives, their similarity, false negatives, their similarity; no A × C matrix.

    Σ over the candidates of a class of z·z′ is z times the sum of the class; what is the anchor's own is taken off it."""
    views_AP = own_AP if pairs.degree is None else own_AP[:, :1]  # with degrees the first is the other view, the rest are others' keys
    found = [torch.ones_like(views_AP, dtype=torch.int64).sum(), _whole(views_AP.sum(1))]
    if labels_N is None:
        return torch.stack([*found, *torch.zeros_like(found[0]).expand(2)])
    spread = slice(None, None, -(-len(candidates_CD) // LOOKED_AT))
    some_CD, label_C = candidates_CD[spread].contiguous(), labels_N[pairs.candidate_ids[spread]]
    size_K = torch.bincount(label_C + 1, minlength=int(labels_N.max()) + 2)  # the first: without label
    sum_KD = F.embedding_bag(label_C.argsort(), some_CD, size_K.cumsum(0) - size_K, mode="sum")
    label_A = labels_N[pairs.ids].repeat_interleave(pairs.num_views)
    sum_A, size_A = (anchors_AD * sum_KD[label_A + 1]).sum(1), size_K[label_A + 1]
    keys_B, keys_C = (pairs.ids, pairs.candidate_ids) if pairs.groups is None else (pairs.groups, pairs.candidate_groups)
    assert keys_C is not None
    row_M, col_M = own_matches(keys_B.repeat_interleave(pairs.num_views), *keys_C[spread].sort())
    same_M = label_A[row_M] == label_C[col_M]
    row_M, col_M = row_M[same_M], col_M[same_M]
    sum_A = sum_A.index_add(0, row_M, (anchors_AD[row_M] * some_CD[col_M]).sum(1), alpha=-1)
    size_A = size_A - torch.bincount(row_M, minlength=len(size_A))
    known_A = label_A >= 0
    return torch.stack([*found, size_A[known_A].sum(), _whole(sum_A[known_A])])


def _whole(value_A: Tensor) -> Tensor:
    return (value_A.double() * UNIT).round().long().sum()


def _agree(label_R: Tensor, label_C: Tensor, places: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(R,) how many places of a row have two equal known labels, and (R,) how many have two known ones."""
    row_M, col_M = label_R[places[0]], label_C[places[1]]
    known_M = (row_M >= 0) & (col_M >= 0)
    same_R, known_R = (
        torch.zeros(len(label_R), dtype=torch.int64, device=label_R.device).index_add_(0, places[0], chosen_M.long())
        for chosen_M in (known_M & (row_M == col_M), known_M)
    )
    return same_R, known_R


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part) / float(whole) if whole else NAN
