"""How many negatives a detector flagged, and how many of them it was right about: counts that add up over steps and ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kinfolk.pairs import Block

NAN = float("nan")


@dataclass(frozen=True)
class Stats:
    """Counts over (anchor, negative) pairs.

    Args:
        negatives: pairs that could have been flagged.
        flagged: pairs that were.
        judged: flagged pairs with both labels known.
        hits: judged pairs with equal labels.
        kin: pairs of negatives with equal known labels, flagged or not.
    """

    negatives: Tensor
    flagged: Tensor
    judged: Tensor
    hits: Tensor
    kin: Tensor

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> Stats:
        return cls.from_counts(torch.zeros(len(fields(cls)), dtype=torch.int64, device=device))

    @classmethod
    def from_counts(cls, counts: Tensor) -> Stats:
        """The inverse of `counts`."""
        return cls(*counts.unbind())

    def counts(self) -> Tensor:
        """(5,) int64: what to sum over ranks."""
        return torch.stack([self.negatives, self.flagged, self.judged, self.hits, self.kin])

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


def _agree(label_R: Tensor, label_C: Tensor, places: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """How many places have two equal known labels, and how many have two known ones."""
    row_M, col_M = label_R[places[0]], label_C[places[1]]
    known_M = (row_M >= 0) & (col_M >= 0)
    return (known_M & (row_M == col_M)).sum(), known_M.sum()


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part) / float(whole) if whole else NAN
