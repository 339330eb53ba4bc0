"""The slow copy of encoder and head: He et al., Momentum Contrast for Unsupervised Visual Representation Learning, CVPR 2020, eq. 2; its
momentum rises to 1 as in Grill et al., Bootstrap Your Own Latent, NeurIPS 2020, section 3.3, or is constant.
"""

from __future__ import annotations

import copy
import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MomentumSchedule = Literal["constant", "cosine"]


class MomentumCopy(nn.Module):
    """A copy of encoder and head that follows them slowly: θ′ ← m·θ′ + (1 − m)·θ after every optimiser step.

    Its parameters have no gradient: the optimiser leaves them out, and so does DDP, where every rank computes them alike. Its buffers are
    its own, as in the published code: in training its BatchNorms normalise by the batch before them, whose running statistics they
    keep for `eval()`; the average of the weights has nothing to say about those.

    Args:
        encoder, head: what is copied, as it is now.
        momentum: m in [0, 1); 0: an exact copy after every step.
        schedule: "constant"; or "cosine": in epoch e of E, 1 − (1 − m) (1 + cos(π e / E)) / 2, which rises from m to 1. `set_progress`
            moves it, once an epoch, where BYOL moves it with every step.

    State: all of its parameters and buffers, in `state_dict()`.
    """

    def __init__(self, encoder: nn.Module, head: nn.Module, momentum: float, schedule: MomentumSchedule = "constant") -> None:
        super().__init__()
        if not 0 <= momentum < 1:
            raise ValueError(f"`momentum` (={momentum}) must be in [0, 1): at 1 the copy would never learn")
        if schedule not in get_args(MomentumSchedule):
            raise ValueError(f"`momentum_schedule` (={schedule!r}) must be one of {', '.join(get_args(MomentumSchedule))}")
        self.base_momentum = self.momentum = momentum
        self.schedule = schedule
        self.encoder, self.head = copy.deepcopy(encoder), copy.deepcopy(head)
        self.requires_grad_(False)

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        """Sets the momentum of this epoch, counted from 0."""
        if self.schedule == "cosine":
            self.momentum = 1 - (1 - self.base_momentum) * (1 + math.cos(math.pi * epoch / num_epochs)) / 2

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """(B, D) embeddings, without gradient."""
        embedded: Tensor = self.head(self.encoder(images))
        return embedded

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """(B, F) features, without gradient."""
        features: Tensor = self.encoder(images)
        return features

    def embed(self, images: Tensor) -> Tensor:
        """(B, D) embeddings of unit norm, without gradient."""
        return F.normalize(self(images), dim=-1)

    @torch.no_grad()
    def follow(self, encoder: nn.Module, head: nn.Module) -> None:
        """One step towards the weights of `encoder` and `head`."""
        fast = [param.detach() for part in (encoder, head) for param in part.parameters()]
        slow = [param.detach() for part in (self.encoder, self.head) for param in part.parameters()]
        torch._foreach_lerp_(slow, fast, 1 - self.momentum)

    def extra_repr(self) -> str:
        return f"momentum={self.base_momentum}" + ("" if self.schedule == "constant" else f", schedule={self.schedule!r}")
