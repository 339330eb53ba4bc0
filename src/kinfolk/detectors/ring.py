"""Ring: Wu et al., Conditional Negative Sampling for Contrastive Learning of Visual Representations, ICLR 2021, section 4, algorithm 1.

Dimension key: R rows of a block, C candidates, b samples of the block, N data set, L levels of clusters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from kinfolk.clustering.labels import ClusterLabels
from kinfolk.detectors.anneal import Anneal, Policy
from kinfolk.detectors.base import Detector, Found
from kinfolk.detectors.boundaries import Boundaries
from kinfolk.detectors.members import members, refreshed_by
from kinfolk.detectors.ring_shape import Shape, bounded, drawn, exact, inside
from kinfolk.kinship import Mask, Roles
from kinfolk.pairs import Block

Bounds = Literal["exact", "learned"]


class Ring(Detector):
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
            see `anneal.py`. "linear" moves at every step.
        start_lower: where `lower` begins.
        start_upper: where `upper` begins; None: it does not move. `Ring(0.9, 0.99, anneal="linear", start_upper=0.9)` excludes the closest
            tenth of the candidates above `lower` at all times, as the authors' configurations do.
        anneal_epochs: over how many epochs; None: a third of the training.
        anneal_jumps: of "step".
        boundaries: "exact": order statistics of each row. "learned": two thresholds per sample, learned from at most 4,096 candidates
            a visit; see `boundaries.py`. Ids are then needed.
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
    variants: ClassVar[Mapping[str, Mapping[str, object]]] = {"learned": {"boundaries": "learned"}}

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
        self.final_upper, self.start_upper, self.num_samples, self.draw, self.every = upper, start_upper, num_samples, draw, every
        self.anneal = Anneal(anneal, start_lower, lower, anneal_epochs, anneal_jumps)
        if start_upper is not None and anneal == "none":
            raise ValueError(f"`start_upper` (={start_upper}) must be None with `anneal` (='none'): the bounds then never move")
        if start_upper is not None and not start_lower < start_upper <= 1:
            raise ValueError(f"`start_upper` (={start_upper}) must be above `start_lower` (={start_lower}) and at most 1")
        self.boundaries = Boundaries(num_samples or 0) if boundaries == "learned" else None
        self.clusters = None if num_clusters is None else ClusterLabels(num_samples or 0, None, num_clusters, seed=seed)

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
    def addresses(self) -> bool:  # type: ignore[override]
        return self.boundaries is not None or self.clusters is not None

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
        kin = members(self.clusters, block)
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
        refreshed_by(self.clusters, features)

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
