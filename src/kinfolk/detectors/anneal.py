"""How the bounds of a ring move during training: Wu et al., Conditional Negative Sampling for Contrastive Learning of Visual
Representations, ICLR 2021, section 4 and appendix E.

The share of the way that is done, d in [0, 1], moves both bounds. The lower one is ℓ₀ + d (ℓ − ℓ₀), from ℓ₀ = `start` to ℓ = `final` (0 to
90 % in the paper), and the upper one likewise. After e of E epochs, where e is fractional and set before every step:

    linear  d = min(1, e / E)
    step    d = min(1, ⌊J e / E⌋ / J)                in J jumps
    knn     whenever the accuracy is measured: up by m / E if it has risen in the m epochs since, else down by as much
    loss    every step: up by 1 / (E T) if the loss is below its running mean, else down by as much; T steps make an epoch
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from kinfolk.stores.per_sample import Exact

Policy = Literal["none", "linear", "step", "knn", "loss"]
_MEMORY = 0.99
"""Of the running mean of the loss: two losses in a row differ by the draw of their batches, which says nothing of a trend."""


class Anneal(Exact):
    """How far the bounds have moved.

    Args:
        policy: "none" (`final` from the first step), "linear", "step", "knn" or "loss".
        start, final: ℓ₀ and ℓ of the lower bound.
        epochs: E; None: a third of the training, as in the paper (100 of 300).
        jumps: J.

    State: `done`; the last accuracy or the running mean of the loss; for "knn" the epoch of that accuracy; for "loss" the steps of this
    epoch and of the one before, by which T is known: the bounds stay where they begin in the first epoch.
    """

    on_host = ("done", "reference", "counted")
    done: Tensor
    reference: Tensor
    counted: Tensor

    def __init__(self, policy: Policy, start: float, final: float, epochs: int | None, jumps: int) -> None:
        super().__init__()
        if policy not in get_args(Policy):
            raise ValueError(f"`anneal` (={policy!r}) must be one of {', '.join(get_args(Policy))}")
        if not 0 <= start <= final:
            raise ValueError(f"`start_lower` (={start}) must be in [0, {final}]: it rises to `lower`")
        if epochs is not None and epochs < 1:
            raise ValueError(f"`anneal_epochs` (={epochs}) must be at least 1")
        if jumps < 1:
            raise ValueError(f"`anneal_jumps` (={jumps}) must be at least 1")
        self.policy, self.start, self.final, self.epochs, self.jumps = policy, start, final, epochs, jumps
        self.epoch, self.num_epochs = 0, 1
        self.register_buffer("done", torch.tensor(1.0 if policy == "none" else 0.0, dtype=torch.float64))
        self.register_buffer("reference", torch.tensor(math.nan, dtype=torch.float64))
        self.register_buffer("counted", torch.zeros(3, dtype=torch.int64))  # the epoch, its steps so far, the steps of the one before

    @property
    def wanted_metrics(self) -> frozenset[str]:
        """Which training metrics it needs."""
        needed = {"none": (), "linear": ("epoch",), "step": ("epoch",)}
        return frozenset(needed.get(self.policy, (self.policy,)))

    @property
    def lower(self) -> float:
        """The present lower bound."""
        return self.between(self.start, self.final)

    def between(self, start: float, final: float) -> float:
        """The present value of a bound that moves from `start` to `final`."""
        done = float(self.done)
        return final if done == 1 else start + done * (final - start)

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        """Called with the epoch, counted from 0, and the length of the training."""
        self.epoch, self.num_epochs = epoch, num_epochs
        if self.policy == "loss" and epoch != int(self.counted[0]):
            self.counted.copy_(torch.stack((torch.full_like(self.counted[0], epoch), self.counted[0] * 0, self.counted[1])))

    def on_metric(self, value: float) -> None:
        """Called with the number of epochs done (fractional), the accuracy of an epoch, or the loss of a step, as the policy needs."""
        if self.policy in ("linear", "step"):
            done = min(1.0, value / self._length())
            self.done.fill_(done if self.policy == "linear" else math.floor(done * self.jumps + 1e-9) / self.jumps)
            return
        last = float(self.reference)
        if self.policy == "knn":
            since = max(1, self.epoch - int(self.counted[0]))
            self.reference.fill_(value)
            self.counted[0] = self.epoch
            self._move(value > last, since / self._length(), math.isnan(last))
            return
        self.reference.fill_(value if math.isnan(last) else _MEMORY * last + (1 - _MEMORY) * value)
        self.counted[1] += 1
        steps = int(self.counted[2])
        self._move(value < last, 1 / (self._length() * max(1, steps)), not steps)

    def _move(self, better: bool, share: float, wait: bool) -> None:
        if not wait:
            self.done.fill_(min(max(float(self.done) + (share if better else -share), 0.0), 1.0))

    def _length(self) -> int:
        return max(1, round(self.num_epochs / 3)) if self.epochs is None else self.epochs
