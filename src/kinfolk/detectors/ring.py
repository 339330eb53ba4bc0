"""Ring: Wu et al., Conditional Negative Sampling for Contrastive Learning of Visual Representations, ICLR 2021, section 4, algorithm 1.

Dimension key: R rows of a block, C candidates, b samples of the block, N data set, L levels of clusters, K drawn.

How the bounds of a ring move during training (section 4 and appendix E):

The share of the way that is done, d in [0, 1], moves both bounds. The lower one is ℓ₀ + d (ℓ − ℓ₀), from ℓ₀ = `start` to ℓ = `final` (0 to
90 % in the paper), and the upper one likewise. After e of E epochs, where e is fractional and set before every step:

    linear  d = min(1, e / E)
    step    d = min(1, ⌊J e / E⌋ / J)                in J jumps
    knn     whenever the accuracy is measured: up by m / E if it has risen in the m epochs since, else down by as much
    loss    every step: up by 1 / (E T) if the loss is below its running mean, else down by as much; T steps make an epoch
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from kinfolk.clustering.labels import PseudoLabels
from kinfolk.detectors.base import Detector, Found, Refreshed, TakesMetrics
from kinfolk.detectors.ring_learned import Boundaries
from kinfolk.detectors.selection import Cut, cut
from kinfolk.detectors.shared_labels import cluster_again, same_cluster
from kinfolk.kinship import Form, Interval, Mask, Roles, others
from kinfolk.pairs import Block
from kinfolk.stores.per_sample import Exact

Bounds = Literal["exact", "learned"]


class Ring(Detector, Refreshed, TakesMetrics):
    """Negatives are the candidates that are neither too far from the anchor nor too close to it.

    The anchor's n negatives stand from far to close; those at ⌊lower·n⌋ ≤ i < ⌊upper·n⌋ are its negatives. Those from ⌊upper·n⌋ on, too
    close, are kin; those before ⌊lower·n⌋ are left out whatever the action. `Ring(0, 1)` is the loss without a detector, bit for bit.
    An anchor keeps at least one negative: the closest of those not kin, or the farthest kin where the ring is empty.

    Args:
        lower, upper: ω_ℓ < ω_u, shares in [0, 1].
        num_samples: N, for learned bounds and clusters.
        draw: so many negatives, drawn anew for each anchor and step from its ring without replacement (as IR does); None: the whole ring.
            From torch's global generator. In `eval()` the ring is taken whole.
        anneal: how the bounds move from `start_lower` and `start_upper` to `lower` and `upper`: "none", "linear", "step", "knn" or "loss";
            see `Anneal`. "linear" moves at every step.
        start_lower: where `lower` begins.
        start_upper: where `upper` begins; None: it does not move. `Ring(0.9, 0.99, anneal="linear", start_upper=0.9)` excludes the closest
            tenth of the candidates above `lower` at all times, as the authors' configurations do.
        anneal_epochs: over how many epochs; None: a third of the training.
        anneal_jumps: of "step".
        boundaries: "exact": order statistics of each row. "learned": two thresholds per sample, learned from at most 4,096 candidates
            a visit; see `ring_learned.py`. Ids are then needed.
        num_clusters: Ring + C_i: kin are the members of the anchor's k-means cluster (a tuple: of any of several clusterings), wherever
            they lie; what is too close is left out. Meant to be attracted. None: no clusters.
        every: epochs between two clusterings.
        seed: of the clusterings.

    State: how far the bounds have moved, the learned thresholds, the clusters.

    Deviates from the paper in: the default of `anneal_epochs`, which is 100 there (of 300); the loss policy compares with the running
    mean of the loss, not with the step before.

    Example:
        >>> import torch, kinfolk as kf
        >>> loss_fn = kf.NTXent(temperature=0.1, detector=kf.Ring(lower=0.5, upper=0.9))
        >>> loss_fn(torch.eye(8), torch.eye(8)).isfinite().item()
        True
    """

    paper: ClassVar[str] = "Wu et al., ICLR 2021"
    needs: ClassVar[str] = "lower, upper"

    def __init__(
        self,
        lower: float,
        upper: float,
        num_samples: int | None = None,
        draw: int | None = None,
        anneal: Policy = "none",
        start_lower: float = 0.0,
        start_upper: float | None = None,
        anneal_epochs: int | None = None,
        anneal_jumps: int = 4,
        boundaries: Bounds = "exact",
        num_clusters: int | tuple[int, ...] | None = None,
        every: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, share in (("lower", lower), ("upper", upper)):
            if not 0 <= share <= 1:
                raise ValueError(f"`{name}` (={share}) must be in [0, 1]")
        if not lower < upper:
            raise ValueError(f"`lower` (={lower}) must be below `upper` (={upper})")
        if draw is not None and draw < 1:
            raise ValueError(f"`draw` (={draw}) must be at least 1")
        if boundaries not in get_args(Bounds):
            raise ValueError(f"`boundaries` (={boundaries!r}) must be one of {', '.join(get_args(Bounds))}")
        if num_samples is None and (boundaries == "learned" or num_clusters is not None):
            raise ValueError("`num_samples` must be given for learned boundaries and for clusters: they are kept by sample id")
        if every < 1:
            raise ValueError(f"`every` (={every}) must be at least 1")
        self.final_upper, self.start_upper, self.draw, self.every = upper, start_upper, draw, every
        self.num_samples = num_samples if boundaries == "learned" or num_clusters is not None else None
        self.anneal = Anneal(anneal, start_lower, lower, anneal_epochs, anneal_jumps)
        if start_upper is not None and anneal == "none":
            raise ValueError(f"`start_upper` (={start_upper}) must be None with `anneal` (='none'): the bounds then never move")
        if start_upper is not None and not start_lower < start_upper <= 1:
            raise ValueError(f"`start_upper` (={start_upper}) must be above `start_lower` (={start_lower}) and at most 1")
        self.boundaries = Boundaries(num_samples or 0) if boundaries == "learned" else None
        self.clusters = None if num_clusters is None else PseudoLabels(num_samples or 0, None, num_clusters, seed=seed)

    @classmethod
    def usual(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        return {"lower": 0.9, "upper": 0.99, "anneal": "linear"}

    def silent_reason(self) -> str | None:
        whole = self.anneal.final == 0 and self.upper == 1 and self.draw is None and self.clusters is None
        return "the ring from `lower` (=0) to `upper` (=1) holds all negatives; choose a smaller ring" if whole else None

    @property
    def lower(self) -> float:
        """The present lower share."""
        return self.anneal.lower

    @property
    def upper(self) -> float:
        """The present upper share."""
        return self.final_upper if self.start_upper is None else self.anneal.between(self.start_upper, self.final_upper)

    @property
    def wanted_metrics(self) -> frozenset[str]:  # type: ignore[override]
        return self.anneal.wanted_metrics

    @property
    def metrics(self) -> dict[str, float]:
        moving = {} if self.anneal.policy == "none" else {"ring_lower": self.lower}
        return moving if self.start_upper is None else {**moving, "ring_upper": self.upper}

    @torch.no_grad()
    def find(self, block: Block) -> Found:
        lower, upper, update = self.lower, self.upper, dict[str, Tensor]()
        if self.boundaries is None:
            shape = exact(block, lower, upper)
        else:
            if self.training:
                update, lower_b, upper_b = self.boundaries.learned(block, lower, upper)
            else:
                lower_b, upper_b = (self.boundaries.read(block)[f"{name}_level"] for name in ("lower", "upper"))
            shape = bounded(block, lower_b, upper_b, lower, upper)
        return Found((self._roles(block, shape),), update)

    def _roles(self, block: Block, shape: Shape) -> Roles:
        close, far = shape
        draw = self.draw if self.training else None
        if draw is None and self.clusters is None:
            return Roles(kin=close, drop=far)
        kept_RC = inside(block, shape) if draw is None else drawn(inside(block, shape), draw)
        if self.clusters is None:
            close_RC = torch.zeros_like(kept_RC) if close is None else close.mask(block.sim_RC) > 0
            return Roles(kin=close, drop=Mask(~(kept_RC | close_RC)))
        kin = same_cluster(self.clusters, block)
        kin_RC = torch.zeros_like(kept_RC) if kin is None else kin.mask(block.sim_RC) > 0
        bare_R1 = ~kept_RC.any(1, keepdim=True)  # an empty ring: nothing is left out
        return Roles(kin=kin, drop=Mask(~(kept_RC | kin_RC | bare_R1)))

    def observe(self, ids: Tensor, update: Mapping[str, Tensor], sound: Tensor | None = None) -> None:
        if self.boundaries is not None:
            self.boundaries.observe(ids, update, sound)

    def on_metric(self, name: str, value: float) -> None:
        self.anneal.on_metric(value)

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self.anneal.set_progress(epoch, num_epochs)

    def due(self, epoch: int) -> bool:
        return self.clusters is not None and epoch % self.every == 0

    def refresh(self, features: Tensor | None, progress: float) -> None:
        cluster_again(self.clusters, features)

    def __repr__(self) -> str:
        shown: dict[str, object] = {"lower": self.anneal.final, "upper": self.final_upper}
        others = {
            "num_samples": (self.num_samples, None),
            "draw": (self.draw, None),
            "anneal": (self.anneal.policy, "none"),
            "start_lower": (self.anneal.start, 0.0),
            "start_upper": (self.start_upper, None),
            "anneal_epochs": (self.anneal.epochs, None),
            "anneal_jumps": (self.anneal.jumps, 4),
            "boundaries": ("exact" if self.boundaries is None else "learned", "exact"),
            "num_clusters": (None if self.clusters is None else self.clusters.num_clusters, None),
            "every": (self.every, 1),
            "seed": (0 if self.clusters is None else self.clusters.seed, 0),
        }
        shown |= {name: value for name, (value, default) in others.items() if value != default}
        return f"Ring({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


Shape = tuple[Form | None, Form | None]
"""What is too close, and what is too far; None: nothing can be."""


def exact(block: Block, lower: float, upper: float) -> Shape:
    """⌊lower·n⌋ of each row's n negatives too far, those from ⌊upper·n⌋ on too close. Among equals, the first columns count as farther."""
    n_R, num_candidates = block.num_negatives_R, block.sim_RC.shape[1]
    own_R = num_candidates - n_R
    first_R = own_R + torch.minimum(index(lower, n_R), (n_R - 1).clamp(min=0))
    last_R = own_R + index(upper, n_R)
    if block.sim_RC.device.type == "cpu":
        return _by_cuts(block, first_R, last_R, lower > 0, upper < 1)
    order_RC = block.sim_RC.sort(dim=1, stable=True).indices
    place_C = torch.arange(num_candidates, device=order_RC.device).expand_as(order_RC)
    rank_RC = torch.empty_like(order_RC).scatter_(1, order_RC, place_C)
    close = Mask(rank_RC >= last_R.unsqueeze(1)) if upper < 1 else None
    return close, Mask(rank_RC < first_R.unsqueeze(1)) if lower > 0 else None


def bounded(block: Block, lower_b: Tensor, upper_b: Tensor, lower: float, upper: float) -> Shape:
    """Below one threshold too far, above the other too close; a share of 0 or 1 has no threshold."""
    upper_R = block.per_row(upper_b.to(block.sim_RC.dtype))
    lower_R = torch.minimum(block.per_row(lower_b.to(block.sim_RC.dtype)), upper_R)
    return Interval(upper_R) if upper < 1 else None, Interval(upper_R=lower_R) if lower > 0 else None


def inside(block: Block, shape: Shape) -> Tensor:
    """(R, C) True in the ring; of an interval that lies above all, the most similar."""
    close, far = shape
    if isinstance(far, Interval) and far.upper_R is not None:
        far = Interval(upper_R=torch.minimum(far.upper_R, block.sim_RC.amax(1)))
    inside_RC = others(block.sim_RC)
    for form in (close, far):
        inside_RC = inside_RC if form is None else inside_RC * (1 - form.mask(block.sim_RC))
    return inside_RC > 0


def index(share: float, n_R: Tensor) -> Tensor:
    """(R,) ⌊share·n⌋ of the share as it was written: 0.29 · 100 is 28.999999999999996 in floating point, but counts as 29.

    A product that falls short of a whole number by less than 10⁻¹² of itself is that number.

    Example:
        >>> index(0.29, torch.tensor([100, 99]))
        tensor([29, 28])
    """
    return torch.minimum((n_R.double() * share * (1 + 1e-12)).floor().long(), n_R)


def drawn(ring_RC: Tensor, number: int) -> Tensor:
    """(R, C) True at `number` places of each row, drawn from its True ones without replacement; at all of them where there are no more."""
    if number >= ring_RC.shape[1]:
        return ring_RC
    key_RC = torch.rand(ring_RC.shape, device=ring_RC.device).masked_fill_(~ring_RC, 2.0)
    drawn_RK = key_RC.topk(number, dim=1, largest=False).indices
    return torch.zeros_like(ring_RC).scatter_(1, drawn_RK, True) & ring_RC


def _by_cuts(block: Block, first_R: Tensor, last_R: Tensor, far: bool, close: bool) -> Shape:
    """The same by order statistics alone, without a sort, which takes seven times as long over a queue: for a CPU."""
    sim_RC, last = block.sim_RC, block.sim_RC.shape[1]
    wanted = [place_R.clamp(max=last - 1) for place_R, needed in ((first_R, far), (last_R, close)) if needed]
    found, forms = list(cut(sim_RC, *wanted)), list[Form | None]()
    for place_R, needed, above in ((last_R, close, True), (first_R, far, False)):
        if not needed:
            forms.append(None)
            continue
        at = found[-1] if above else found[0]
        level_R = at.value_R.masked_fill(place_R == last, torch.inf)
        equals_R = (place_R - at.below_R).where(place_R < last, 0)  # how many of those at the value count as farther
        if bool((equals_R > 0).any()):
            forms.append(Mask(_beyond(sim_RC, at, equals_R, above) & (place_R < last if above else place_R > -1).unsqueeze(1)))
        else:
            down_R = torch.full_like(level_R, -torch.inf)
            forms.append(Interval(torch.nextafter(level_R, down_R), gradable=False) if above else Interval(upper_R=level_R))
    return forms[0], forms[1]


def _beyond(sim_RC: Tensor, at: Cut, number_R: Tensor, above: bool) -> Tensor:
    """(R, C) True above the row's value, or below it, where the first `number_R` columns that hold it count as below."""
    value_R1 = at.value_R.unsqueeze(1)
    equal_RC = sim_RC == value_R1
    farther_RC = (sim_RC < value_R1) | (equal_RC & (equal_RC.cumsum(1) <= number_R.unsqueeze(1)))
    return ~farther_RC if above else farther_RC


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
