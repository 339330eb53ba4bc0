"""Which samples are drawn in a step: the same on every rank and after a resume.

Dimension key: N data set, K drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.stores.exact import OnHost, skips


class Draw(OnHost):
    """Some of N samples, without replacement, anew after each `advance`; a function of its seed and of how often it advanced.

    Args:
        num_samples: N.
        number: K; all samples where there are no more, or with None.

    State: `seed`, drawn from torch's generator when it is made, and `count`.
    """

    on_host = ("count", "seed")
    count: Tensor
    seed: Tensor

    def __init__(self, num_samples: int, number: int | None) -> None:
        super().__init__()
        if number is not None and number < 1:
            raise ValueError(f"`num_negatives` (={number}) must be at least 1")
        self.num_samples, self.number = num_samples, number
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("seed", torch.randint(1 << 62, ()))

    @property
    def everything(self) -> bool:
        """Whether nothing is left out."""
        return self.number is None or self.number >= self.num_samples

    def ids(self, device: torch.device | None = None) -> Tensor:
        """(K,) the samples of this step; reads only."""
        if self.everything:
            return torch.arange(self.num_samples, device=device)
        generator = torch.Generator().manual_seed(int(self.seed ^ self.count))
        return torch.randperm(self.num_samples, generator=generator)[: self.number].to(device or "cpu", non_blocking=True)

    def advance(self, sound: Tensor | None = None) -> None:
        """The next step draws others, unless this one is known to be broken."""
        if not skips(sound):
            self.count += 1
