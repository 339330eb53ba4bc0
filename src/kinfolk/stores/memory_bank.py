"""A memory bank, and the draw of a step's negatives.

Dimension key: N data set, D embedding, K drawn, b rows of a write, of all ranks together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk import distributed
from kinfolk.errors import require, require_at_least
from kinfolk.stores.per_sample import (
    Exact,
    StepRandom,
    check_ids,
    check_num_samples,
    is_broken,
    means_by_id,
    refuse_recomputation,
    to_device,
    unless_broken,
)


class Draw(StepRandom):
    """K of N samples (None: all), without replacement, others in each step."""

    def __init__(self, num_samples: int, number: int | None) -> None:
        super().__init__()
        require_at_least(1, num_negatives=number)
        self.num_samples, self.number = num_samples, number

    @property
    def everything(self) -> bool:
        return self.number is None or self.number >= self.num_samples

    def ids(self, device: torch.device | None = None) -> Tensor:
        """(K,) the samples of this step."""
        if self.everything:
            return torch.arange(self.num_samples, device=device)
        assert self.number is not None
        drawn = distinct(self.num_samples, self.number, self.generator())
        return drawn if device is None else to_device(drawn, device)


def distinct(num_samples: int, number: int, generator: torch.Generator) -> Tensor:
    """(number,) distinct numbers in [0, num_samples), uniformly, at a cost that depends on
    `number`."""
    if 2 * number > num_samples:  # a permutation is cheaper
        return torch.randperm(num_samples, generator=generator)[:number]
    drawn = torch.empty(0, dtype=torch.int64)
    while len(drawn) < number:
        # mostly enough for `number` distinct ones
        expected = -num_samples * math.log1p(-number / num_samples)
        more = torch.randint(
            num_samples, (math.ceil(expected + 4 * math.sqrt(expected)) + 4,), generator=generator
        )
        drawn = _without_repetitions(torch.cat((drawn, more)))
    return drawn[:number]


def _without_repetitions(drawn: Tensor) -> Tensor:
    """The numbers in the order in which they came."""
    in_order, place = drawn.sort(stable=True)
    first = torch.ones_like(drawn, dtype=torch.bool)
    first[1:] = in_order[1:] != in_order[:-1]
    return drawn[place[first].sort().values]


class Bank(Exact):
    """The embedding of every sample as it was last seen.

        v_i ← normalised( m · v_i + (1 − m) · f_i )

    Before its sample is seen, an entry is a random unit vector, the same on every rank; two banks
    need two seeds.

    Args:
        num_samples, dim: N and D; ids are in [0, N).
        momentum: m in [0, 1); 0 overwrites.

    State: `features` (N, D), unit norm; `seen` (N,).

    Example:
        >>> bank = Bank(num_samples=3, dim=2, momentum=0.0)
        >>> bank.write(torch.tensor([1]), torch.tensor([[0.0, 2.0]]))
        >>> bank.read(torch.tensor([1])).tolist()
        [[0.0, 1.0]]
    """

    features: Tensor
    seen: Tensor

    def __init__(self, num_samples: int, dim: int, momentum: float = 0.5, seed: int = 0) -> None:
        super().__init__()
        check_num_samples(num_samples)
        require_at_least(1, dim=dim)
        below_1 = "in [0, 1): at 1 the bank would never learn"
        require(0 <= momentum < 1, "momentum", momentum, below_1)
        self.num_samples, self.dim, self.momentum, self.seed = num_samples, dim, momentum, seed
        first = torch.randn(num_samples, dim, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("features", F.normalize(first, dim=1))
        self.register_buffer("seen", torch.zeros(num_samples, dtype=torch.bool))

    def __len__(self) -> int:
        return self.num_samples

    @property
    def complete(self) -> bool:
        """Whether every sample was seen."""
        return bool(self.seen.all())

    def read(self, ids: Tensor) -> Tensor:
        """(b, D) a copy of some entries."""
        check_ids(ids, self.num_samples)
        return self.features[ids]

    @torch.no_grad()
    def write(self, ids: Tensor, z: Tensor, is_finite: Tensor | None = None) -> None:
        """Moves the entries of `ids` (b,) towards `z` (b, D), of any norm, of all ranks; of several
        rows of one id the mean counts."""
        check_ids(ids, self.num_samples)
        if z.shape != (len(ids), self.dim):
            raise ValueError(f"`z` (={tuple(z.shape)}) must have the shape {(len(ids), self.dim)}")
        refuse_recomputation("a loss over a memory bank")
        if is_broken(is_finite):
            return
        ids, z = distributed.gather_all(ids, z)
        old_bD = self.features[ids]
        mean_bD = means_by_id(ids, F.normalize(z.to(self.features.dtype), dim=1))
        new_bD = F.normalize(torch.lerp(mean_bD, old_bD, self.momentum), dim=1)
        self.features[ids] = unless_broken(is_finite, new_bD, old_bD)
        self.seen[ids] = True if is_finite is None else self.seen[ids] | is_finite

    def sizes_of(self) -> Mapping[str, Mapping[str, int]]:
        return {"features": {"num_samples": self.num_samples, "dim": self.dim}}

    def extra_repr(self) -> str:
        names = ("num_samples", "dim", "momentum", "seed")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)
