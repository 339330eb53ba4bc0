"""GloFND: Balmaseda et al., Discovering Global False Negatives On the Fly for Self-supervised Contrastive Learning, ICML 2025.

Dimension key: R rows of a block, C candidates, b samples of the block, N data set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from kinfolk.compiling import compiled
from kinfolk.detectors import quantile
from kinfolk.detectors.base import Detector, Found
from kinfolk.detectors.quantile import Seen, State, Visit
from kinfolk.detectors.threshold_rule import Init, Name, ThresholdRule, look, own_quantile, track
from kinfolk.kinship import Interval, Roles
from kinfolk.pairs import Block
from kinfolk.stores import PerSample
from kinfolk.stores.per_sample import kept


class GloFND(Detector):
    """Kin are the candidates more similar than the sample's learned threshold λ, the (1 − α) quantile over the whole data set.

    Each visit moves λ by what the sample's negatives show (the rules are in `quantile.py`). With "adam" and "sgd" kin are s > λ with the
    **new** λ, as in the paper. A λ of 1 flags nothing.

    "tracking" counts how many negatives are above λ and moves it in units of their mean excess, so that neither the mean nor the
    scale of the similarities matters; it follows jumps of all similarities and a slow drift common to all samples. It flags with the λ
    from before its own count, which makes the share flagged right on average even where less than one of a batch is to be flagged.

    Args:
        num_samples: N; ids are in [0, N).
        alpha: α, the share of the negatives to flag: a number, or (N,) one for each sample. 0 flags nothing; where it is 0 for all, the
            loss is that without a detector, bit for bit.
        rule: "tracking", "adam" (the paper's) or "sgd".
        lr: step size of "adam" (default 0.05) and "sgd" (default 0.01 / α: a threshold that nothing reaches falls by 0.01 a visit).
            "tracking" has none.
        betas: of Adam.
        init: "one": λ starts at 1. "quantile": a sample's first visit sets λ to the quantile of that visit, and learning starts at the
            second. "tracking" learns from the first visit on; "one" only means that the first visit flags nothing.
        shared: one λ for all samples (the ablation "single λ"), learned from the whole batch at once and used from the next batch on.

    State: per sample λ, the rule's own (β, mean and spread; m and v) and the number of visits; for "tracking" the common drift.
    A sample without negatives is left as it is. In `eval()` the stored λ is used as it is. `alpha` is no part of the state.

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
    alphas: Tensor | None
    drift: Tensor | None

    def __init__(
        self,
        num_samples: int,
        alpha: float | Tensor,
        rule: Name = "tracking",
        lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.98),
        init: Init = "one",
        shared: bool = False,
    ) -> None:
        super().__init__()
        if num_samples < 1:
            raise ValueError(f"`num_samples` (={num_samples}) must be at least 1")
        each = _checked(alpha, num_samples) if isinstance(alpha, Tensor) and alpha.ndim else None
        if each is not None and shared:
            raise ValueError("`alpha` must be one number where `shared` is set: there is one threshold for all samples")
        self.num_samples, self.shared = num_samples, shared
        self.alpha: float = float(alpha if each is None else each.mean())
        """The share of the negatives to flag; with one for each sample, their mean."""
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"`alpha` (={self.alpha}) must be in [0, 1]")
        self.register_buffer("alphas", each, persistent=False)
        usual = 0.01 / max(self.alpha, 1e-6) if rule == "sgd" else 0.05
        self.rule = ThresholdRule(rule, usual if lr is None else lr, tuple(betas), init)
        self.store = PerSample(1 if shared else num_samples, **self.rule.fields())
        self.register_buffer("drift", torch.tensor(0.0) if rule == "tracking" and not shared else None)

    @classmethod
    def usual(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        return {"alpha": 0.01}

    @property
    def learns_first(self) -> bool:  # type: ignore[override]
        return self.rule.name == "tracking" and self.rule.init == "one" and not self.shared

    def silent_reason(self) -> str | None:
        if not torch.as_tensor(self.alpha).any():
            return "`alpha` (=0) is the share of the negatives to flag; choose one above 0"
        if self.learns_first and self.num_epochs < 2:
            return "the first visit of a sample flags nothing with `init` (='one') and there is one epoch; set `init` to 'quantile'"
        return None

    @property
    def thresholds(self) -> Tensor:
        """(N,) λ of each sample."""
        state = dict(self.store.named_buffers())
        return self._in_use(state).expand(self.num_samples)

    @torch.no_grad()
    def find(self, block: Block) -> Found:
        if self.alpha == 0:
            return Found((Roles(),))
        state = self.store.read(torch.zeros_like(block.ids) if self.shared else block.ids)
        alpha_b = self._alpha(block.ids, state["threshold"].dtype)
        if not self.training:
            return Found((self._kin(block, self._in_use(state), alpha_b),))
        if self.shared:
            return Found((self._kin(block, self._in_use(state), alpha_b),), self._noted(block, state, alpha_b))
        learned_b = alpha_b.clamp(min=torch.finfo(alpha_b.dtype).tiny)
        if self.drift is None:
            new, counts = self.rule.step(block, state, learned_b), State()
            level_b = new["threshold"]
        else:
            new, level_b, counts = compiled(track, block.compiles)(self.rule, block, state, learned_b, self.drift)
            level_b = level_b.masked_fill((state["visits"] == 0) & (self.rule.init == "one"), 1.0).clamp(-1, 1)
        moving = (block.over_views(block.num_negatives_R.to(alpha_b.dtype)) > 0) & (alpha_b > 0)
        update = {name: rows.where(moving, state[name]) for name, rows in new.items()}
        update |= {name: rows.where(moving, 0.0) for name, rows in counts.items()}
        return Found((self._kin(block, level_b.where(moving, self._in_use(state)), alpha_b),), update)

    @torch.no_grad()
    def observe(self, ids: Tensor, update: Mapping[str, Tensor], sound: Tensor | None = None) -> None:
        if self.shared:
            self._learn_shared(update, sound)
            return
        self.store.write(ids, {name: update[name] for name in self.rule.fields()}, sound)
        if self.drift is not None:
            expected, found = (update[name].double().sum() for name in ("expected", "found"))
            self.drift.copy_(kept(sound, quantile.followed(self.drift.double(), expected, found), self.drift.double()))

    def _alpha(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """(b,) α of these samples."""
        if self.alphas is None:
            return torch.full(ids.shape, self.alpha, dtype=dtype, device=ids.device)
        return self.alphas[ids].to(dtype)

    def _in_use(self, state: State) -> Tensor:
        """The thresholds that the stored state stands for."""
        level_b = state["threshold"] if self.drift is None else quantile.in_use(state, self.drift)
        return level_b.clamp(-1, 1)

    def _kin(self, block: Block, level_b: Tensor, alpha_b: Tensor) -> Roles:
        """Kin are above the level. A level of 1 flags nothing, although rounding makes similarities of 1.0000001; nor does an α of 0."""
        level_b = level_b.masked_fill((level_b >= 1) | (alpha_b == 0), torch.inf)
        return Roles(kin=Interval(block.per_row(level_b)))

    def _noted(self, block: Block, state: State, alpha_b: Tensor) -> State:
        """What each sample of the block shows of the shared threshold."""
        visit = self.rule.measure(block, state["threshold"])
        noted = vars(visit)
        if self.rule.name == "tracking":
            return {**noted, **vars(look(block, visit.n.dtype))}
        return noted if self.rule.init == "one" else {**noted, "own": own_quantile(block, alpha_b, state["visits"] == 0).to(visit.n.dtype)}

    def _learn_shared(self, noted: Mapping[str, Tensor], sound: Tensor | None) -> None:
        """One step of the shared threshold from the mean over all samples of the batch."""
        first = torch.zeros_like(noted["n"][:1], dtype=torch.int64)
        state, counts_B = self.store.read(first), noted["n"] > 0
        number = counts_B.sum().clamp(min=1)
        mean = {name: rows.double().where(counts_B, 0.0).sum(0, keepdim=True) / number for name, rows in noted.items()}
        mean = {name: rows.to(state["threshold"].dtype) for name, rows in mean.items()}
        alpha, fresh = self._alpha(first, state["threshold"].dtype), state["visits"] == 0
        visit = Visit(mean["share"], mean["excess"], (mean["n"] * number).clamp(min=1 / self.alpha))
        if self.rule.name == "tracking":
            before, jump = quantile.moved(state, Seen(**{name: mean[name] for name in Seen.__dataclass_fields__}), alpha)
            as_wanted = Visit(alpha, alpha * before["tail"], visit.n)  # what was counted before a jump tells nothing
            visit = Visit(*(now.where(jump, then) for now, then in zip(vars(as_wanted).values(), vars(visit).values(), strict=True)))
            new = quantile.tracking_step(before, visit, alpha, torch.zeros_like(alpha))
        else:
            new = self.rule.descend(state, visit, alpha)
            if self.rule.init == "quantile":
                new = {name: rows.where(fresh, new[name]) for name, rows in self.rule.started(state, mean["own"]).items()}
        self.store.write(first, {name: rows.where(counts_B.any(), state[name]) for name, rows in new.items()}, sound)

    def __repr__(self) -> str:
        rule = self.rule
        alpha = self.alpha if self.alphas is None else f"<{len(self.alphas)} in [{self.alphas.min():.4g}, {self.alphas.max():.4g}]>"
        learning = f"rule={rule.name!r}, lr={rule.lr:.4g}, betas={rule.betas}, init={rule.init!r}"
        return f"GloFND(num_samples={self.num_samples}, alpha={alpha}, {learning}, shared={self.shared})"


def _checked(alpha_N: Tensor, num_samples: int) -> Tensor:
    """One α for each sample, as it has to be."""
    if alpha_N.shape != (num_samples,):
        raise ValueError(f"`alpha` (={tuple(alpha_N.shape)}) must be a number or have the shape ({num_samples},): one for each sample")
    alpha_N = alpha_N.detach().to(torch.get_default_dtype())
    if not bool(((alpha_N >= 0) & (alpha_N <= 1)).all()):
        raise ValueError(f"`alpha` (={alpha_N.min():.4g} to {alpha_N.max():.4g}) must be in [0, 1] for every sample")
    return alpha_N.clone()
