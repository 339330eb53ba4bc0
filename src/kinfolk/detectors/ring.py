"""Ring: Wu et al., ICLR 2021, section 4, algorithm 1.

Dimension key: R rows of a block, C candidates, b samples of the block, N data set, L levels of
clusters, K drawn.

How the bounds of a ring move during training (section 4 and appendix E):

The lower bound is ℓ₀ + d (ℓ − ℓ₀), d in [0, 1], from ℓ₀ = `start` to ℓ = `final`; the upper one
likewise. After e of E epochs, where e is fractional:

    linear  d = min(1, e / E)
    step    d = min(1, ⌊J e / E⌋ / J)                in J jumps
    knn     whenever the accuracy is measured: up by m / E if it has risen in the m epochs since,
            else down by as much
    loss    every step: up by 1 / (E T) if the loss is below its running mean, else down by as much;
            T steps make an epoch
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from kinfolk.clustering.labels import PseudoLabels
from kinfolk.detectors.base import Bound, register
from kinfolk.detectors.clusters import Clustering, same_cluster
from kinfolk.errors import require, require_at_least, require_choice
from kinfolk.pairs import Block, Kin
from kinfolk.stores.per_sample import Exact, to_device


@register("ring", "Wu et al., ICLR 2021", "lower, upper")
class Ring(Clustering):
    """Negatives are the candidates that are neither too far from the anchor nor too close to it.

    Of the anchor's n negatives, from far to close, those at ⌊lower·n⌋ ≤ i < ⌊upper·n⌋ remain. Those
    from ⌊upper·n⌋ on are kin; those before ⌊lower·n⌋ are left out whatever the action. Equal
    similarities are treated alike. An anchor keeps at least one negative. `Ring(lower=0, upper=1)`
    is the loss without a detector, bit for bit.

    Args:
        lower, upper: ω_ℓ < ω_u, shares in [0, 1].
        num_samples: N, for clusters.
        draw: number of negatives drawn from the ring in each step, by torch's global generator;
            None, and in `eval()`: all.
        anneal: how the bounds move to `lower` and `upper`: "none", "linear", "step", "knn" or
            "loss"; see the top of this file.
        start_lower, start_upper: where the bounds begin; None: `upper` does not move. The authors'
            configurations have `lower=0.9`, `upper=0.99`, `start_upper=0.9`.
        anneal_epochs, anneal_jumps: E, None: a third of the training; J.
        num_clusters: Ring + C_i: kin, to be attracted, are the members of the anchor's k-means
            cluster (a tuple: of any of several clusterings); what is too close is left out.
        every, seed: epochs between two clusterings, and their seed.

    State: how far the bounds have moved, and the clusters.

    Deviates from the paper in: the default of `anneal_epochs`, there 100 of 300; "loss" compares
    with the running mean, not with the step before.

    Example:
        >>> import torch, kinfolk as kf
        >>> loss_fn = kf.NTXentLoss(temperature=0.1, detector=kf.Ring(lower=0.5, upper=0.9))
        >>> loss_fn(torch.eye(8), torch.eye(8)).isfinite().item()
        True
    """

    def __init__(
        self,
        *,
        lower: float,
        upper: float,
        num_samples: int | None = None,
        draw: int | None = None,
        anneal: Policy = "none",
        start_lower: float = 0.0,
        start_upper: float | None = None,
        anneal_epochs: int | None = None,
        anneal_jumps: int = 4,
        num_clusters: int | tuple[int, ...] | None = None,
        every: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, share in (("lower", lower), ("upper", upper)):
            require(0 <= share <= 1, name, share, "in [0, 1]")
        require(lower < upper, "lower", lower, f"below `upper` (={upper})")
        require_at_least(1, draw=draw)
        if num_samples is None and num_clusters is not None:
            raise ValueError("`num_samples` must be given for clusters: they are kept by sample id")
        require_at_least(1, every=every)
        self.final_upper, self.start_upper, self.draw, self.every = upper, start_upper, draw, every
        self.num_samples = None if num_clusters is None else num_samples
        self.anneal = Anneal(anneal, start_lower, lower, anneal_epochs, anneal_jumps)
        if start_upper is not None:
            never = "None with `anneal` (='none'): the bounds then never move"
            require(anneal != "none", "start_upper", start_upper, never)
            higher = f"above `start_lower` (={start_lower}) and at most 1"
            require(start_lower < start_upper <= 1, "start_upper", start_upper, higher)
        self.clusters = None
        if num_clusters is not None:
            self.clusters = PseudoLabels(num_samples or 0, num_clusters, seed=seed)

    @classmethod
    def defaults(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        return {"lower": 0.9, "upper": 0.99, "anneal": "linear"}

    def silent_reason(self, first_epoch: int = 0) -> str | None:
        bounded = self.anneal.final != 0 or self.upper != 1
        drops = bounded or self.draw is not None or self.clusters is not None
        why = "the ring from `lower` (=0) to `upper` (=1) holds all negatives; choose a smaller one"
        return None if drops else why

    @property
    def lower(self) -> float:
        return self.anneal.between(self.anneal.start, self.anneal.final)

    @property
    def upper(self) -> float:
        if self.start_upper is None:
            return self.final_upper
        return self.anneal.between(self.start_upper, self.final_upper)

    @property
    def needed_metrics(self) -> frozenset[str]:  # type: ignore[override]
        return self.anneal.needed_metrics

    @property
    def metrics(self) -> dict[str, float]:
        moving = {} if self.anneal.policy == "none" else {"ring_lower": self.lower}
        return moving if self.start_upper is None else {**moving, "ring_upper": self.upper}

    def bounds(self, ids: Tensor) -> list[Bound]:
        shares = {"lower": self.lower, "upper": self.upper}
        return [Bound(name, 1 - share) for name, share in shares.items() if 0 < share < 1]

    def prepare(self, ids_C: Tensor, candidates_CD: Tensor, guide_CG: Tensor | None) -> Tensor:
        """(2,) the present shares: numbers would be a reason to compile anew."""
        return self._shares(ids_C.device)

    def _shares(self, device: torch.device) -> Tensor:
        return to_device(torch.tensor([self.lower, self.upper], dtype=torch.float64), device)

    @torch.no_grad()
    def find(self, block: Block) -> Kin:
        shares = self._shares(block.sim_RC.device) if block.prepared is None else block.prepared
        close_RC, far_RC = outside_ring(block, *shares.unbind(0))
        if self.draw is not None and self.training:
            ring_RC = (block.sim_RC > -2) & ~far_RC & ~close_RC
            far_RC = far_RC | (ring_RC & ~draw_places(ring_RC, self.draw))
        if self.clusters is None:
            return Kin(close_RC, far_RC)
        same_RC, outside_RC = same_cluster(self.clusters, block), far_RC | close_RC
        # an empty ring drops nothing
        bare_R1 = ~((block.sim_RC > -2) & ~outside_RC).any(1, keepdim=True)
        return Kin(same_RC, outside_RC & ~same_RC & ~bare_R1)

    def on_metric(self, name: str, value: float) -> None:
        self.anneal.on_metric(value)

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self.anneal.set_progress(epoch, num_epochs)


def outside_ring(block: Block, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """(R, C) too close, (R, C) too far."""
    n_R, last = block.per_row(block.num_negatives_b), block.sim_RC.shape[1] - 1
    own_R, order_RC = last + 1 - n_R, block.sim_RC.sort(1).values
    first_R = torch.minimum(floor_index(lower, n_R), (n_R - 1).clamp(min=0))
    close_R = floor_index(upper, n_R)
    far_R1, level_R1 = (
        order_RC.gather(1, (own_R + place_R).clamp(max=last).unsqueeze(1))
        for place_R in (first_R, close_R)
    )
    return (block.sim_RC >= level_R1) & (close_R < n_R).unsqueeze(1), block.sim_RC < far_R1


def floor_index(share: Tensor, n_R: Tensor) -> Tensor:
    """⌊share·n⌋ of the share as it was written: 0.29 · 100, in floating point below 29, is 29.

    Example:
        >>> floor_index(torch.tensor(0.29, dtype=torch.float64), torch.tensor([100, 99]))
        tensor([29, 28])
    """
    return torch.minimum((n_R.double() * share * (1 + 1e-12)).floor().long(), n_R)


def draw_places(ring_RC: Tensor, number: int) -> Tensor:
    """(R, C) `number` of each row's True places, without replacement."""
    if number >= ring_RC.shape[1]:
        return ring_RC
    key_RC = torch.rand(ring_RC.shape, device=ring_RC.device).masked_fill_(~ring_RC, 2.0)
    drawn_RK = key_RC.topk(number, dim=1, largest=False).indices
    return torch.zeros_like(ring_RC).scatter_(1, drawn_RK, True) & ring_RC


Policy = Literal["none", "linear", "step", "knn", "loss"]
_MEMORY = 0.99  # of the running mean of the loss: two losses in a row differ by their batches


class Anneal(Exact):
    """How far the bounds have moved; `start` and `final` are those of the lower one.

    State: `done`; the last accuracy or the running mean of the loss; its epoch, or the steps of
    this epoch and of the one before, which is T: in the first nothing moves.
    """

    on_host = ("done", "reference", "counted")
    done: Tensor
    reference: Tensor
    counted: Tensor

    def __init__(
        self, policy: Policy, start: float, final: float, epochs: int | None, jumps: int
    ) -> None:
        super().__init__()
        require_choice("anneal", policy, get_args(Policy))
        rises = f"in [0, {final}]: it rises to `lower`"
        require(0 <= start <= final, "start_lower", start, rises)
        require_at_least(1, anneal_epochs=epochs, anneal_jumps=jumps)
        self.policy, self.start, self.final = policy, start, final
        self.epochs, self.jumps = epochs, jumps
        self.epoch, self.num_epochs = 0, 1
        for name, first in (("done", float(policy == "none")), ("reference", math.nan)):
            self.register_buffer(name, torch.tensor(first, dtype=torch.float64))
        # the epoch, its steps so far, the steps of the one before
        self.register_buffer("counted", torch.zeros(3, dtype=torch.int64))

    @property
    def needed_metrics(self) -> frozenset[str]:
        needed = {"none": (), "linear": ("epoch",), "step": ("epoch",)}
        return frozenset(needed.get(self.policy, (self.policy,)))

    def between(self, start: float, final: float) -> float:
        done = float(self.done)
        return final if done == 1 else start + done * (final - start)

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        self.epoch, self.num_epochs = epoch, num_epochs
        if self.policy == "loss" and epoch != int(self.counted[0]):
            self.counted.copy_(torch.tensor([epoch, 0, int(self.counted[1])]))

    def on_metric(self, value: float) -> None:
        """`value`: the epoch (fractional), the accuracy of an epoch, or the loss of a step."""
        if self.policy in ("linear", "step"):
            done = min(1.0, value / self._length())
            jumped = math.floor(done * self.jumps + 1e-9) / self.jumps
            self.done.fill_(done if self.policy == "linear" else jumped)
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
