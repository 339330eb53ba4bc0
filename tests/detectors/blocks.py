"""Blocks of similarities without the engine, and what a detector answers to them."""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.detectors import Detector
from kinfolk.evaluation.detection import flagged_mask
from kinfolk.pairs import OUT, Block, Kin


def block_of(z: Tensor, ids: Tensor, num_views: int = 1) -> Block:
    """All views (sample-major) against all views; the anchor's sample is `OUT`."""
    z = torch.nn.functional.normalize(z, dim=1)
    row_ids = ids.repeat_interleave(num_views)
    own = row_ids.unsqueeze(1) == row_ids
    negatives = (~own[::num_views]).sum(1)
    return Block((z @ z.T).masked_fill(own, OUT), ids, row_ids, num_views, negatives)


def random_block(
    seed: int,
    ids: list[int],
    num_views: int = 2,
    dtype: torch.dtype = torch.float32,
    dim: int = 4,
) -> Block:
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(len(ids) * num_views, dim, generator=g, dtype=torch.float64)
    return block_of(z.to(dtype), torch.tensor(ids), num_views)


def levels(detector: Detector, block: Block) -> tuple[Kin, ...]:
    """The answer of a detector, one `Kin` for each level."""
    found = detector.find(block)
    return found if isinstance(found, tuple) else (found,)


def kin(detector: Detector, block: Block) -> Tensor:
    """(R, C) True where the first level is kin."""
    return mask(levels(detector, block)[0], block)


def mask(found: Kin, block: Block) -> Tensor:
    """(R, C) True where kin, ignored or not."""
    return flagged_mask(found, block, with_ignored=True)


def dropped(found: Kin, block: Block) -> Tensor:
    """(R, C) True where left out, kin or not. Never the anchor's sample."""
    if found.ignore is None:
        return torch.zeros_like(block.sim_RC, dtype=torch.bool)
    return found.ignore & (block.sim_RC > -2)


def step(detector: Detector, block: Block) -> Tensor:
    """One training step on a batch of one block, as the engine does it: (R, C) who was flagged."""
    found = levels(detector, block)
    update = {name: rows for level in found for name, rows in level.update.items()}
    if detector.training and update:
        detector.observe(block.ids, update)
    return mask(found[0], block)
