"""How many negatives a detector flagged, how many of them it was right about, and how similar positives and false negatives are: counts
that add up over steps and ranks.

Dimension key: A anchors, P own positives, C candidates, D embedding, K classes, N data set, R rows of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kinfolk.kinship import Weighed, others
from kinfolk.pairs import Block, Pairs

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


@dataclass(frozen=True)
class Labels:
    """(N,) labels of all samples, below 0 where unknown, and the number of classes, which only the host may ask for."""

    of_N: Tensor
    number: int

    def alike(self, block: Block) -> tuple[Tensor, Tensor]:
        """(R, C), (R, C) 1 where both labels are known, and where they are equal too; 0 where the candidate is the anchor's own."""
        label_R, label_C = self.of_N[block.row_ids].unsqueeze(1), self.of_N[block.candidate_ids]
        known_RC = others(block.sim_RC) * ((label_R >= 0) & (label_C >= 0))
        return known_RC, known_RC * (label_R == label_C)


def count(block: Block, weighed: Weighed, alike: tuple[Tensor, Tensor] | None) -> Tensor:
    """(5,) the counts of one block: negatives, flagged, judged, hits, kin. `alike`: see `Labels`."""
    rows = [block.num_negatives_R, weighed.flagged_R]
    if alike is not None:
        known_RC, same_RC = alike
        none_R = torch.zeros_like(weighed.flagged_R)
        rows += [none_R if weighed.kin_RC is None else (weighed.kin_RC * each_RC).sum(1) for each_RC in alike]
        rows.append(same_RC.sum(1))
    counts = torch.stack([row.to(torch.float64) for row in rows]).sum(1).to(torch.int64)
    return counts if alike is not None else torch.cat((counts, counts.new_zeros(3)))


def measure(anchors_AD: Tensor, candidates_CD: Tensor, own_AP: Tensor, pairs: Pairs, labels: Labels | None) -> Tensor:
    """(4,) positives, their similarity, false negatives, their similarity; no A × C matrix.

    Σ over the candidates of a class of z·z′ is z times the sum of the class; what is the anchor's own is taken off it."""
    views_AP = own_AP if pairs.degree is None else own_AP[:, :1]  # with degrees the first is the other view, the rest are others' keys
    positive_sum = _whole(views_AP.sum(1))
    found = [torch.full_like(positive_sum, views_AP.numel()), positive_sum]
    if labels is None:
        return torch.stack([*found, *torch.zeros_like(found[0]).expand(2)])
    spread = slice(None, None, -(-len(candidates_CD) // LOOKED_AT))
    some_CD, label_C = candidates_CD[spread], labels.of_N[pairs.candidate_ids[spread]]
    label_A = labels.of_N[pairs.ids].repeat_interleave(pairs.num_views)
    class_C, class_A = (label.clamp(min=-1) + 1 for label in (label_C, label_A))  # the first: without label
    of_class_A, size_A = _sums(anchors_AD, class_A, some_CD, class_C, labels.number + 1)
    key_A, key_C = _own_keys(pairs, spread, class_A, class_C, labels.number + 1)
    own_A, own_size_A = _sums(anchors_AD, key_A, some_CD, key_C, len(key_C))
    known_A = label_A >= 0
    alike = ((size_A - own_size_A) * known_A).sum()
    return torch.stack([*found, alike.to(torch.int64), _whole(torch.where(known_A, of_class_A - own_A, 0.0))])


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


def _whole(similarity_A: Tensor) -> Tensor:
    return (similarity_A.double() * UNIT).round().sum().to(torch.int64)


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part) / float(whole) if whole else NAN
