"""Blocks of similarities without the engine."""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.detectors import Detector
from kinfolk.kinship import Roles, select
from kinfolk.pairs import Block


def block_of(z: Tensor, ids: Tensor, num_views: int = 1) -> Block:
    """All views (sample-major) against all views; own candidates −inf."""
    z = torch.nn.functional.normalize(z, dim=1)
    row_ids = ids.repeat_interleave(num_views)
    own = row_ids.unsqueeze(1) == row_ids
    return Block((z @ z.T).masked_fill(own, -torch.inf), ids, row_ids, num_views, (~own[::num_views]).sum(1))


def random_block(seed: int, ids: list[int], num_views: int = 2, dtype: torch.dtype = torch.float32, dim: int = 4) -> Block:
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(len(ids) * num_views, dim, generator=g, dtype=torch.float64)
    return block_of(z.to(dtype), torch.tensor(ids), num_views)


def kin(detector: Detector, block: Block) -> Tensor:
    return mask(detector.find(block).levels[0], block)


def mask(roles: Roles, block: Block) -> Tensor:
    """(R, C) True where kin, however the detector said it."""
    return _where(select(block.sim_RC, Roles(roles.kin))[0], block)


def dropped(roles: Roles, block: Block) -> Tensor:
    """(R, C) True where left out although not kin, however the detector said it."""
    return _where(select(block.sim_RC, Roles(drop=roles.drop))[1], block)


def _where(found_RC: Tensor | None, block: Block) -> Tensor:
    return torch.zeros_like(block.sim_RC, dtype=torch.bool) if found_RC is None else found_RC > 0


def step(detector: Detector, block: Block) -> Tensor:
    """One training step on a batch of one block, as the engine does it: (R, C) who was flagged."""
    found = detector.find(block)
    if detector.training and found.update:
        detector.observe(block.ids, found.update)
    return mask(found.levels[0], block)
