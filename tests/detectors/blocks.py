"""Blocks of similarities without the engine."""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.detectors import Detector
from kinfolk.pairs import Block, Roles


def block_of(z: Tensor, ids: Tensor, num_views: int = 1) -> Block:
    """All views (sample-major) against all views; own candidates −inf."""
    z = torch.nn.functional.normalize(z, dim=1)
    row_ids = ids.repeat_interleave(num_views)
    own = row_ids.unsqueeze(1) == row_ids
    return Block((z @ z.T).masked_fill(own, -torch.inf), ids, row_ids, num_views, (~own).sum(1))


def random_block(seed: int, ids: list[int], num_views: int = 2, dtype: torch.dtype = torch.float32, dim: int = 4) -> Block:
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(len(ids) * num_views, dim, generator=g, dtype=torch.float64)
    return block_of(z.to(dtype), torch.tensor(ids), num_views)


def kin(detector: Detector, block: Block) -> Tensor:
    return mask(detector.find(block).levels[0], block)


def mask(roles: Roles, block: Block) -> Tensor:
    """(R, C) True where kin, however the detector said it."""
    if roles.kin_RC is not None:
        return roles.kin_RC
    if roles.kin_above_R is not None:
        return block.sim_RC > roles.kin_above_R.unsqueeze(1)
    found = torch.zeros_like(block.sim_RC, dtype=torch.bool)
    if roles.kin is not None:
        found[roles.kin] = True
    return found


def dropped(roles: Roles, block: Block) -> Tensor:
    """(R, C) True where left out although not kin, however the detector said it."""
    out = torch.zeros_like(block.sim_RC, dtype=torch.bool) if roles.drop_RC is None else roles.drop_RC.clone()
    if roles.drop_below_R is not None:
        out |= block.sim_RC < roles.drop_below_R.unsqueeze(1)
    if roles.drop is not None:
        out[roles.drop] = True
    return out & (block.sim_RC > -torch.inf)


def step(detector: Detector, block: Block) -> Tensor:
    """One training step on a batch of one block, as the engine does it: (R, C) who was flagged."""
    found = detector.find(block)
    if detector.training and found.update:
        detector.observe(block.ids, found.update)
    return mask(found.levels[0], block)
