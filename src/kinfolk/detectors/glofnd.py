"""GloFND: Balmaseda et al., Discovering Global False Negatives On the Fly for Self-supervised Contrastive Learning, ICML 2025.

Dimension key: R rows of a block, C candidates, b samples of the block, N data set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from kinfolk.detectors.base import Detector, Found
from kinfolk.detectors.quantile import State, Visit, followed
from kinfolk.detectors.threshold_rule import Init, Name, ThresholdRule
from kinfolk.kinship import Interval, Roles
from kinfolk.pairs import Block
from kinfolk.stores import PerSample


class GloFND(Detector):
    """Kin are the candidates more similar than the sample's learned threshold λ, the (1 − α) quantile over the whole data set.

    Each visit, in this order: p = mean over the sample's views and negatives of 1[s > λ] with the old λ; a step of λ towards p = α
    (equation 4; the rules are in `quantile.py`), within [−1, 1]; kin are s > λ with the **new** λ. λ = 1 flags nobody.

    "tracking" also follows an encoder that moves. What moves all thresholds alike shows in every batch, long before a sample is
    visited again: a common drift c, learned from the batches' mean share, moves λ by c·β before p is measured.

    Args:
        num_samples: N; ids are in [0, N).
        alpha: α, the share of the negatives to flag. 0 flags nobody: the loss is that without a detector, bit for bit.
        rule: "tracking", "adam" (the paper's) or "sgd".
        lr: step size; for "tracking" the fall per visit of a threshold that nothing reaches, and the first scale β.
        betas: of Adam.
        init: "one", or "quantile": a sample's first visit sets λ to the quantile of that visit, and learning starts at the second.
        shared: one λ for all samples (the ablation "single λ"), learned from the whole batch at once.

    State: per sample λ, the rule's own (β and evidence; m and v) and the number of visits; for "tracking" the common drift.
    A sample without negatives is left as it is. In `eval()` the stored λ is used as it is.

    Deviates from the paper in: the default rule (Adam's constant step keeps a threshold from settling); Adam's bias correction, which
    counts the sample's own updates (the published code counts epochs).

    Example:
        >>> detector = GloFND(num_samples=100, alpha=0.01, init="quantile")
        >>> detector.thresholds.shape
        torch.Size([100])
    """

    paper: ClassVar[str] = "Balmaseda et al., ICML 2025"
    needs: ClassVar[str] = "alpha"
    leveled: ClassVar[bool] = True
    addresses: ClassVar[bool] = True

    def __init__(
        self,
        num_samples: int,
        alpha: float,
        rule: Name = "tracking",
        lr: float = 0.05,
        betas: tuple[float, float] = (0.9, 0.98),
        init: Init = "one",
        shared: bool = False,
    ) -> None:
        super().__init__()
        if num_samples < 1:
            raise ValueError(f"`num_samples` (={num_samples}) must be at least 1")
        self.num_samples, self.alpha, self.shared = num_samples, alpha, shared
        self.rule = ThresholdRule(rule, alpha, lr, tuple(betas), init)
        self.store = PerSample(1 if shared else num_samples, **self.rule.fields())
        self.drift: Tensor | None
        self.register_buffer("drift", torch.tensor(0.0) if rule == "tracking" and not shared else None)
        self._settled: State = {}

    @classmethod
    def usual(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        return {"alpha": 0.01}

    @property
    def thresholds(self) -> Tensor:
        """(N,) λ of each sample."""
        thresholds: Tensor = self.store.threshold
        return thresholds.expand(self.num_samples)

    @property
    def surveys(self) -> bool:  # type: ignore[override]
        return self.shared and self.alpha > 0

    @torch.no_grad()
    def find(self, block: Block) -> Found:
        if self.alpha == 0:
            return Found((Roles(),))
        state = self._state(block)
        if not self.training:
            return Found((self._kin(block, state["threshold"]),))
        if self.shared:
            update = {name: rows.expand(len(block.ids)) for name, rows in self._settled.items()}
            return Found((self._kin(block, update["threshold"]),), update)
        update = self._learned(block, state, self._drifted(state))
        return Found((self._kin(block, update["threshold"]),), update)

    @torch.no_grad()
    def observe(self, ids: Tensor, update: Mapping[str, Tensor], sound: Tensor | None = None) -> None:
        rows = {name: update[name] for name in self.rule.fields()}
        if self.shared:
            ids, rows = torch.zeros_like(ids[:1]), {name: values[:1] for name, values in rows.items()}
        self.store.write(ids, rows, sound)
        if self.drift is not None:
            self.drift.copy_(followed(self.drift.double(), update["expected"].double().sum(), update["found"].double().sum()))

    def _kin(self, block: Block, level_b: Tensor) -> Roles:
        """Who is above the level. A level of 1 flags nobody, although rounding makes similarities of 1.0000001."""
        return Roles(kin=Interval(block.per_row(level_b.masked_fill(level_b >= 1, torch.inf))))

    def _drifted(self, state: State) -> State:
        """The thresholds moved by what all samples have in common, before anything is measured."""
        if self.drift is None:
            return state
        shift = torch.where(state["evidence"] > 0, self.drift * state["scale"], 0.0)
        return {**state, "threshold": (state["threshold"] + shift).clamp(-1, 1)}

    def _learned(self, block: Block, state: State, moved: State) -> State:
        """What this visit proposes for the samples' state, and for the drift how many were expected and found above."""
        visit, fresh = self.rule.measure(block, moved), self.rule.fresh(state)
        new = self.rule.step(moved, visit)
        if fresh.any():
            first = self.rule.start(state, visit, self.rule.own_quantile(block, fresh))
            new = {name: first[name].where(fresh, rows) for name, rows in new.items()}
        idle = visit.n == 0
        new = {name: state[name].where(idle, rows) for name, rows in new.items()}
        if self.drift is not None:
            known = (state["evidence"] > 0) & ~idle
            new |= {"expected": (self.alpha * visit.n).where(known, 0.0), "found": (visit.share * visit.n).where(known, 0.0)}
        return new

    def _state(self, block: Block) -> State:
        return self.store.read(torch.zeros_like(block.ids) if self.shared else block.ids)

    @torch.no_grad()
    def survey(self, block: Block) -> Tensor:
        """(b, 4) share, height, n, and on the first visit the own quantile."""
        state = self._state(block)
        visit, fresh = self.rule.measure(block, state), self.rule.fresh(state)
        own_b = self.rule.own_quantile(block, fresh) if fresh.any() else torch.zeros_like(visit.n)
        return torch.stack((visit.share, visit.height, visit.n, own_b.to(visit.n.dtype)), 1)

    @torch.no_grad()
    def settle(self, measured: Tensor) -> None:
        """One step of the shared threshold from the mean over all samples; it starts at the mean of the samples' own quantiles."""
        state = self.store.read(torch.zeros(1, dtype=torch.int64, device=measured.device))
        measured = measured[measured[:, 2] > 0].double()
        self._settled = state
        if len(measured):
            share, height, n, own = measured.mean(0, keepdim=True).to(state["threshold"].dtype).unbind(1)
            visit = Visit(share, height, n * len(measured))
            self._settled = self.rule.start(state, visit, own) if self.rule.fresh(state) else self.rule.step(state, visit)

    def __repr__(self) -> str:
        rule = self.rule
        learning = f"rule={rule.name!r}, lr={rule.lr}, betas={rule.betas}, init={rule.init!r}"
        return f"GloFND(num_samples={self.num_samples}, alpha={self.alpha}, {learning}, shared={self.shared})"
