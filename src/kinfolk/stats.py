"""How many negatives a detector flagged, how many of them it was right about, and how similar positives and false negatives are: counts
that add up over steps and ranks.

Dimension key: A anchors, P own positives, C candidates, D embedding, K classes, N data set, R rows of a block, M places.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.pairs import Block, Pairs, own_matches

NAN = float("nan")
UNIT = 1 << 20
"""A similarity of 1 in the sums, which are whole numbers: they come to the same in any order, and after a resume."""
LOOKED_AT = 4096
"""Candidates that the similarity of false negatives is taken of, at most; of more, evenly spread ones."""


@dataclass(frozen=True)
class Stats:
    """Counts over pairs of an anchor and a negative, and of an anchor and an own positive.

    Args:
        negatives: pairs that could have been flagged.
        flagged: pairs that were.
        judged: flagged pairs with both labels known.
        hits: judged pairs with equal labels.
        kin: pairs of negatives with equal known labels, flagged or not.
        positives, positive_sum: pairs of an anchor and an own positive, and the sum of their similarities.
        alike, alike_sum: pairs of negatives with equal known labels that were looked at, and the sum of their similarities.
    """

    negatives: Tensor
    flagged: Tensor
    judged: Tensor
    hits: Tensor
    kin: Tensor
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
        """(9,) int64: what to sum over ranks."""
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
    """(5,) the counts of one block. `kin`, `own`: places of flagged pairs and of pairs within a sample; `flagged_R`: how many of a row.

    Only those are looked at one by one; the number of pairs with equal labels comes from the sizes of the classes."""
    negatives = block.num_negatives_R.sum()
    zero = torch.zeros_like(negatives)
    flagged = flagged_R.double().sum().long()
    if labels_N is None:
        return torch.stack([negatives, flagged, zero, zero, zero])
    label_R, label_C = labels_N[block.row_ids], labels_N[block.candidate_ids]
    size_K = torch.bincount(label_C[label_C >= 0], minlength=int(labels_N.max()) + 1)
    same_own, _ = _agree(label_R, label_C, own)
    kin_total = size_K[label_R[label_R >= 0]].sum() - same_own
    hits, judged = (zero, zero) if kin is None else _agree(label_R, label_C, kin)
    return torch.stack([negatives, flagged, judged, hits, kin_total])


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


def _whole(similarity_A: Tensor) -> Tensor:
    return (similarity_A.double() * UNIT).round().long().sum()


def _agree(label_R: Tensor, label_C: Tensor, places: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """How many places have two equal known labels, and how many have two known ones."""
    row_M, col_M = label_R[places[0]], label_C[places[1]]
    known_M = (row_M >= 0) & (col_M >= 0)
    return (known_M & (row_M == col_M)).sum(), known_M.sum()


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part) / float(whole) if whole else NAN
