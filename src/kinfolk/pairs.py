"""What is compared with what, what a detector sees of it (`Block`), and what it answers (`Kin`).

Dimension key: A anchors, B samples of the batch (A = B·V), V views, C candidates, D embedding,
P positives per anchor, R rows of a block, b samples of a block (R = b·V), G guide embedding.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

OUT = -1e30
"""Stands for "not in the sum", as a similarity and as a log-weight. Finite, so that a row without
negatives gives no NaN; a real similarity is never below −2."""
Action = Literal["eliminate", "attract", "reweight"]
ACTIONS: tuple[Action, ...] = get_args(Action)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Pairs:
    """Anchors, candidates, and the anchors' positives.

    Anchors are **sample-major**: rows `b * num_views` to `(b + 1) * num_views` belong to sample
    `ids[b]`. A candidate with the anchor's id (or group, if groups are given) is never its
    negative. Embeddings may have any norm."""

    anchors: Tensor  # (A, D)
    candidates: Tensor  # (C, D); may be the same tensor as `anchors`
    positives: Tensor  # (A, P, D)
    ids: Tensor  # (B,) sample id of each group of `num_views` anchors
    candidate_ids: Tensor  # (C,)
    num_views: int = 1
    groups: Tensor | None = None  # (B,) known positives: no negatives of each other
    candidate_groups: Tensor | None = None  # (C,)
    candidate_owners: Tensor | None = None  # (C,) the only sample it counts for; < 0: all
    unit: bool = False  # anchors, candidates and positives have unit norm already
    # (A, P) of each positive: 1 attracted, 0 only repelled, < 0 absent
    degree: Tensor | None = None
    local_candidates: bool = False  # this rank's part of the batch, to be gathered from all ranks
    collected: Tensor | None = None  # (B·any, D) for `Detector.collect`; None: the anchors
    guide: Tensor | None = None  # (B, G) or (A, G), unit norm: embeddings of another model
    candidate_guide: Tensor | None = None  # (C, G)

    def __post_init__(self) -> None:
        for name in ("ids", "candidate_ids", "groups", "candidate_groups"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, integer_ids(getattr(self, name), None, name))
        for one, other in (("groups", "candidate_groups"), ("guide", "candidate_guide")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise ValueError(f"`{one}` and `{other}` must be given together")
        if not (self.anchors.numel() and self.candidates.numel() and self.positives.numel()):
            names = "`anchors`, `candidates` and `positives`"
            raise ValueError(f"{names} must have at least one row; fill a queue first")
        samples, number, size = len(self.ids), len(self.candidates), self.anchors.shape[-1]
        rows, per_anchor = samples * self.num_views, self.positives.shape[1:2]
        shapes = {"anchors": (rows, size), "candidates": (number, size), "groups": (samples,)}
        shapes |= {"positives": (rows, *per_anchor, size), "degree": (rows, *per_anchor)}
        columns = ("candidate_ids", "candidate_groups", "candidate_owners")
        for name, shape in {**shapes, **dict.fromkeys(columns, (number,))}.items():
            if (value := getattr(self, name)) is not None and value.shape != shape:
                raise ValueError(
                    f"`{name}` (={tuple(value.shape)}) must have the shape {shape}: there are"
                    f" {samples} `ids` with `num_views` (={self.num_views}), {number} candidates"
                )
        if self.local_candidates and number % rows:
            raise ValueError(
                f"`candidates` (={number} rows) must be as many for each of {rows} anchors"
            )

    def with_changes(self, **changes: Any) -> Pairs:
        """A copy with other values, which are not checked."""
        pairs = copy.copy(self)
        vars(pairs).update(changes)
        return pairs


@dataclass(frozen=True)
class Block:
    """One row block of similarities: what a detector sees. Read only."""

    sim_RC: Tensor  # no gradient; `OUT`, below −2, at candidates of the anchor's sample or group
    ids: Tensor  # (b,) sample ids, `num_views` rows for each
    candidate_ids: Tensor  # (C,)
    num_views: int
    num_negatives_b: Tensor  # candidates that are not `OUT`, equally many for all views
    pos_RP: Tensor | None = None  # similarities to the positives
    guide_bG: Tensor | None = None  # see `Pairs.guide`
    guide_CG: Tensor | None = None
    prepared: Tensor | None = None  # what `Detector.prepare` returned in this step

    @property
    def row_ids(self) -> Tensor:
        """(R,) sample id of each row."""
        return self.per_row(self.ids)

    @property
    def sim_bVC(self) -> Tensor:  # noqa: N802
        """(b, V, C) the similarities by sample and view."""
        return self.sim_RC.view(len(self.ids), self.num_views, -1)

    @property
    def num_per_sample(self) -> Tensor:
        """(b,) number of negatives of each sample over all its views."""
        return self.num_negatives_b * self.num_views

    def per_row(self, values_b: Tensor) -> Tensor:
        """(R,) values of samples, for each of their views."""
        return values_b.repeat_interleave(self.num_views)


@dataclass(frozen=True)
class Kin:
    """What a detector returns for a block: which candidates are kin, that is, false negatives.

    Args:
        degree: (R, C) bool, or degrees in [0, 1] where 0 means not kin. None: nothing is kin.
        ignore: (R, C) bool, candidates to leave out although they are not kin. None: none.
        update: name → (b, …) state to write after the step, one row for each sample of the block.
    """

    degree: Tensor | None = None
    ignore: Tensor | None = None
    update: Mapping[str, Tensor] = field(default_factory=dict)


def above(block: Block, level: Tensor) -> Tensor:
    """(R, C) bool: the candidates more similar than `level`, (R,) or (b,)."""
    level_R = level.to(block.sim_RC.dtype).repeat_interleave(len(block.sim_RC) // len(level))
    return block.sim_RC > level_R.clamp(min=-2).unsqueeze(1)


def same_key(key_R: Tensor, key_C: Tensor) -> Tensor:
    """(R, C) bool: candidates with the anchor's key. A key below 0 equals no other."""
    return (key_R.unsqueeze(1) == key_C) & (key_C >= 0)


def check_answer(answer: object, block: Block) -> tuple[Kin, ...]:
    levels, right = answer if isinstance(answer, tuple) else (answer,), tuple(block.sim_RC.shape)
    for kin in levels or (answer,):
        if not isinstance(kin, Kin):
            raise TypeError(f"`find` must return a `Kin`, or a tuple of them; received {kin!r:.80}")
        for name, value, floats in (("degree", kin.degree, FLOATS), ("ignore", kin.ignore, ())):
            dtype, shape = getattr(value, "dtype", type(value)), getattr(value, "shape", ())
            if value is not None and (shape != right or dtype not in (torch.bool, *floats)):
                kind = f"{'bool or float' if floats else 'bool'} of the shape {right}"
                raise ValueError(f"`{name}` of `Kin` (={dtype} {tuple(shape)}) must be {kind}")
        for name, value in kin.update.items():
            if not isinstance(value, Tensor) or value.shape[:1] != block.ids.shape:
                raise ValueError(
                    f"the update {name!r} (={getattr(value, 'shape', value)}) must have"
                    f" {len(block.ids)} rows, one per sample"
                )
    return levels


def integer_ids(ids: Tensor, device: torch.device | None = None, name: str = "ids") -> Tensor:
    """Floats are refused: float32 cannot distinguish numbers above 2²⁴."""
    if not isinstance(ids, Tensor):
        what = f"`{name}` (={type(ids).__name__})"
        raise TypeError(f"{what} must be an integer tensor: torch.as_tensor({name})")
    if not is_integer(ids):
        raise ValueError(f"`{name}` (={ids.dtype}) must be an integer tensor")
    return ids.to(device, torch.int64)


def is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def two_views(z1: Tensor, z2: Tensor, ids: Tensor) -> Pairs:
    """The pairs of SimCLR: every view is an anchor and a candidate, the other view the positive."""
    if z1.shape != z2.shape or z1.ndim != 2 or not z1.numel():
        shapes = f"`z1` (={tuple(z1.shape)}) and `z2` (={tuple(z2.shape)})"
        raise ValueError(f"{shapes} must have one shape (batch, embedding), neither of them 0")
    ids, views_B2D = integer_ids(ids, z1.device), unit(torch.stack((z1, z2), 1))
    views, others = views_B2D.flatten(0, 1), views_B2D.flip(1).view(-1, 1, z1.shape[1])
    return Pairs(views, views, others, ids, ids.repeat_interleave(2), num_views=2, unit=True)


def unit(z: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """In float32 at least, and with unit norm."""
    if z.is_complex():
        raise ValueError("embeddings must be real numbers; received complex ones")
    dtype = dtype or (torch.float64 if z.dtype == torch.float64 else torch.float32)
    return torch.nn.functional.normalize(z.to(dtype), dim=-1)


def to_unit(pairs: Pairs) -> Pairs:
    """In float32, or in float64 if one of the pairs is."""
    given = (pairs.anchors, pairs.candidates, pairs.positives)
    dtype = torch.float64 if any(z.dtype == torch.float64 for z in given) else torch.float32
    if pairs.unit and all(z.dtype == dtype for z in given):
        return pairs
    anchors = unit(pairs.anchors, dtype)
    same = pairs.candidates is pairs.anchors
    candidates = anchors if same else unit(pairs.candidates, dtype)
    positives = unit(pairs.positives, dtype)
    return pairs.with_changes(anchors=anchors, candidates=candidates, positives=positives)
