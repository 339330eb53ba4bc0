"""Heads that begin anew: their first weights again, others each time, and the same after a resume and on every rank."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn


@torch.no_grad()
def renew(heads: Iterable[nn.Module], seed: int) -> None:
    """Sets all parameters and running statistics of `heads` as their layers' `reset_parameters` would, by `seed` alone.

    In place, so that an optimiser and DDP keep them. Drawn on the CPU whatever the device, and torch's own generator is left where it was.

    Example:
        >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> renew([one], seed=1), renew([other], seed=1)
        (None, None)
        >>> torch.equal(one.weight, other.weight)
        True
    """
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=()):
        torch.set_rng_state(draw.get_state())
        for head in heads:
            fresh = copy.deepcopy(head).cpu()
            for layer in fresh.modules():
                if _owns(layer):
                    layer.reset_parameters()  # type: ignore[operator]
            head.load_state_dict(fresh.state_dict())


def require_renewable(*heads: nn.Module) -> None:
    """Refuses heads with parameters that nothing says how to begin."""
    for layer in (layer for head in heads for layer in head.modules()):
        if _owns(layer) and not hasattr(layer, "reset_parameters"):
            raise ValueError(f"`reinitialise` needs heads whose layers have `reset_parameters`, and {type(layer).__name__} has not")


def _owns(layer: nn.Module) -> bool:
    return any(True for _ in layer.parameters(recurse=False)) or isinstance(layer, nn.modules.batchnorm._NormBase)
