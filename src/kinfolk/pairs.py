"""Who is compared with whom, and as what.

Dimension key: A anchors, B samples of the batch (A = B·V), V views, C candidates, D embedding, P own positives per anchor,
R rows of a block.

What is done about kin: eliminate (out of the denominator), attract (also a positive), reweight (a factor in the denominator).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

LEFT_OUT = -1e30
"""The similarity of what is left out: its share in a softmax is 0, and a row of nothing else stays finite, where −inf would give NaN."""


def require_integers(name: str, given: Tensor) -> None:
    """Refuses ids or groups that are not integers: 0.5 would become 0, and float32 cannot tell numbers above 2²⁴ apart."""
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise ValueError(f"`{name}` (={given.dtype}) must be whole numbers: give an integer tensor")


def integer_ids(ids: Tensor, device: torch.device) -> Tensor:
    """The sample ids as int64 on a device; refuses what is not an integer tensor."""
    require_integers("ids", ids)
    return ids.to(device, torch.int64)


@dataclass(frozen=True)
class Pairs:
    """Anchors, the candidates each of them is compared with, and the anchors' own positives.

    Anchors are **sample-major**: rows `b * num_views` to `(b + 1) * num_views` belong to sample `ids[b]`, so that all views of a
    sample fall into one row block. A candidate whose id (or group, where groups are given) is the anchor's own is never its
    negative. Own positives are handed over as vectors, so a queue, a bank or another tower serves as well as a second view.

    Args:
        anchors: (A, D), unit norm.
        candidates: (C, D), unit norm; may be the same tensor as `anchors`.
        positives: (A, P, D), unit norm.
        ids: (B,) sample id of each group of `num_views` anchors.
        candidate_ids: (C,) sample id of each candidate.
        num_views: V.
        unit_candidates: whether the candidates are of unit norm for certain, as those of a queue or a bank; spares a copy of them.
        unit: whether all of them are of unit norm and of one type of at least 32 bits for certain; spares their normalisation.
        groups, candidate_groups: (B,) and (C,), known positives: whatever shares a group is never a negative.
        degree: (A, P) how far each of the own positives is one: 1 is drawn in, 0 is only pushed away, between is the share of the criteria
            that call it positive; below 0 there is none in this place. None: all are 1. For objectives that go by it alone. The first is
            that of the sample's other view, or what stands for it.
        collected: (B·any, D), sample-major, what detectors that collect are given for embeddings of the samples; None: the anchors.
        local_candidates: whether the candidates are this rank's part of the batch, one for each anchor, to be joined over the ranks with
            their gradient; the anchors themselves are so in any case, a queue or a bank is the same on all ranks.
        twins: whether the positive of each anchor is the other of the sample's two views, as `other_views` gives it. The engine then adds
            the gradient of the positives to that of the anchors.
        guide, candidate_guide: (B, G), or (A, G) of each anchor, and (C, G), unit norm, without gradient: samples and candidates in the
            space of another model, such as a teacher or the other modality, for a detector that reads it.
    """

    anchors: Tensor
    candidates: Tensor
    positives: Tensor
    ids: Tensor
    candidate_ids: Tensor
    num_views: int = 1
    groups: Tensor | None = None
    candidate_groups: Tensor | None = None
    unit_candidates: bool = False
    degree: Tensor | None = None
    unit: bool = False
    local_candidates: bool = False
    collected: Tensor | None = None
    twins: bool = False
    guide: Tensor | None = None
    candidate_guide: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("ids", "candidate_ids", "groups", "candidate_groups"):
            given = getattr(self, name)
            if given is not None:
                require_integers(name, given)
                object.__setattr__(self, name, given.to(torch.int64))  # as an index, uint8 would be a mask
        num_anchors, num_candidates = len(self.anchors), len(self.candidates)
        if num_anchors != len(self.ids) * self.num_views:
            raise ValueError(
                f"`anchors` (={num_anchors} rows) must hold `num_views` (={self.num_views}) rows for each of `ids` (={len(self.ids)})"
            )
        if len(self.candidate_ids) != num_candidates:
            raise ValueError(f"`candidate_ids` (={len(self.candidate_ids)}) must be as many as `candidates` (={num_candidates} rows)")
        if self.positives.ndim != 3 or len(self.positives) != num_anchors:
            raise ValueError(
                f"`positives` (={tuple(self.positives.shape)}) must have the shape (anchors, own positives, embedding) "
                f"with {num_anchors} anchors"
            )
        if self.degree is not None and self.degree.shape != self.positives.shape[:2]:
            raise ValueError(f"`degree` (={tuple(self.degree.shape)}) must have the shape {tuple(self.positives.shape[:2])}")
        if not self.anchors.numel():
            raise ValueError(f"`anchors` (={tuple(self.anchors.shape)}) must have the shape (anchors, embedding), neither of them 0")
        if num_candidates == 0:
            raise ValueError("`candidates` must hold at least one row; fill a queue before the first loss is taken")
        if (self.groups is None) != (self.candidate_groups is None):
            raise ValueError("`groups` and `candidate_groups` must be given together")
        if (self.guide is None) != (self.candidate_guide is None):
            raise ValueError("`guide` and `candidate_guide` must be given together")
        if self.local_candidates and num_candidates != num_anchors:
            raise ValueError(f"`local_candidates` (={num_candidates}) must be as many as `anchors` (={num_anchors} rows)")
        if self.groups is not None and len(self.groups) != len(self.ids):
            raise ValueError(f"`groups` (={len(self.groups)}) must be as many as `ids` (={len(self.ids)})")
        if self.candidate_groups is not None and len(self.candidate_groups) != num_candidates:
            raise ValueError(f"`candidate_groups` (={len(self.candidate_groups)}) must be as many as `candidates` (={num_candidates} rows)")


@dataclass(frozen=True)
class Block:
    """One row block of similarities, as a detector sees it. Read only. It has R = b·V rows of b samples, sample-major.

    Args:
        sim_RC: cosine similarities, and `LEFT_OUT`, far below −1, where the candidate is the anchor's own.
        ids: (b,) sample ids.
        candidate_ids: (C,) their sample ids.
        num_views: V.
        num_negatives_b: the number of candidates that are not the anchor's own, the same for all views of a sample.
        compiles: whether pure functions of the block should go through `torch.compile`.
        guide_bG, guide_CG: see `Pairs.guide`.
        candidates_CD: the embeddings that `sim_RC` compares the anchors with, if they are known.
    """

    sim_RC: Tensor
    ids: Tensor
    candidate_ids: Tensor
    num_views: int
    num_negatives_b: Tensor
    compiles: bool = False
    guide_bG: Tensor | None = None
    guide_CG: Tensor | None = None
    candidates_CD: Tensor | None = None

    @property
    def row_ids(self) -> Tensor:
        """(R,) sample id of each row."""
        return self.per_row(self.ids)

    @property
    def num_negatives_R(self) -> Tensor:  # noqa: N802
        """(R,) int64, the number of negatives of each row."""
        return self.per_row(self.num_negatives_b).long()

    @property
    def per_sample(self) -> Tensor:
        """(b, V·C) the similarities of each sample over all its views."""
        return self.sim_RC.reshape(len(self.ids), -1)

    @property
    def num_per_sample(self) -> Tensor:
        """(b,) the number of negatives of each sample over all its views."""
        return self.num_negatives_b if self.num_views == 1 else self.num_negatives_b * self.num_views

    @property
    def num_similarities(self) -> int:
        """V·C, which is a little more than the number of negatives of a sample."""
        return self.num_views * self.sim_RC.shape[1]

    def per_row(self, values_b: Tensor) -> Tensor:
        """(R,) a quantity of each sample, for each of its rows."""
        return values_b if self.num_views == 1 else values_b.repeat_interleave(self.num_views)


def own_columns(keys_B: Tensor, keys_C: Tensor) -> tuple[Tensor, Tensor]:
    """(B, K) the candidates that share its key with each sample, and (B,) how many it has; K is the largest of these numbers.

    A sample with fewer has one of its own several times; with none, any candidates. For the CPU: the host looks at values."""
    sorted_C, order_C = keys_C.sort()
    first_B = torch.searchsorted(sorted_C, keys_B)
    count_B = torch.searchsorted(sorted_C, keys_B, right=True) - first_B
    place_BK = first_B.unsqueeze(1) + torch.arange(int(count_B.max()) if len(count_B) else 0)
    last_B = (first_B + count_B - 1).clamp_(min=0)
    return order_C[torch.minimum(place_BK, last_B.unsqueeze(1))], count_B


def two_views(z1: Tensor, z2: Tensor, ids: Tensor | None = None, unit: Callable[[Tensor, Tensor], Tensor] | None = None) -> Pairs:
    """The SimCLR pattern: every view is an anchor, every view is a candidate, the other view is the positive. `unit`: makes (B, 2, D)
    embeddings of unit norm from the two views, where they are not yet."""
    if z1.shape != z2.shape or z1.ndim != 2 or not z1.numel():
        shapes = f"`z1` (={tuple(z1.shape)}) and `z2` (={tuple(z2.shape)})"
        raise ValueError(f"{shapes} must have one shape (batch, embedding), neither of them 0")
    if ids is not None:
        require_integers("ids", ids)
    ids = torch.arange(len(z1), device=z1.device) if ids is None else ids.to(z1.device, torch.int64)
    if ids.shape != z1.shape[:1]:
        raise ValueError(f"`ids` (={tuple(ids.shape)}) must have the shape {tuple(z1.shape[:1])}: one id for each pair of views")
    z_BVD = torch.stack((z1, z2), 1) if unit is None else unit(z1, z2)
    anchors = z_BVD.flatten(0, 1)
    return Pairs(anchors, anchors, other_views(anchors), ids, ids.repeat_interleave(2), num_views=2, unit=unit is not None, twins=True)


def other_views(anchors: Tensor) -> Tensor:
    """(A, 1, D) the other view of each of (A, D) anchors, two a sample, without gradient."""
    return anchors.detach().view(-1, 2, anchors.shape[1]).flip(1).view(-1, 1, anchors.shape[1])


Action = Literal["eliminate", "attract", "reweight"]
ACTIONS: tuple[Action, ...] = get_args(Action)


@dataclass(frozen=True)
class Policy:
    """What is done about kin.

    `min_negatives` of each anchor (the least similar ones) are kept however many are kin, so that no row loses them all. What a detector
    drops for another reason is its own affair.
    `attracted_stay`: whether attracted kin stay in the denominator (InfoNCE, SupCon) or leave it (SogCLR).
    `pools_kin`: whether attracted kin are summed inside the logarithm (Local Aggregation).
    `hardness`: β, by which similar negatives weigh more in the denominator (`kinship.hardened`).
    """

    action: Action
    kin_weight: float
    min_negatives: int
    attracted_stay: bool
    pools_kin: bool = False
    hardness: float = 0.0

    def removes(self, graded: bool) -> bool:
        """Whether kin leave the denominator altogether. `graded`: whether they have degrees, by which they then leave it with "reweight",
        and with "attract" where attracted kin do not stay."""
        if self.action == "reweight":
            return self.kin_weight == 0 and not graded
        return self.action == "eliminate" or not (self.attracted_stay or graded)

    def removes_by_degrees(self, graded: bool) -> bool:
        """Whether kin leave the denominator by their degrees, so that those with the degree 1 leave it altogether."""
        return graded and (self.action == "reweight" or (self.action == "attract" and not self.attracted_stay))
