"""GloFND: Balmaseda et al., Discovering Global False Negatives On the Fly for Self-supervised Contrastive Learning, ICML 2025.

Dimension key: R rows of a block, C candidates, b samples of the block, N data set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kinfolk.compiling import compiled
from kinfolk.detectors import thresholds
from kinfolk.detectors.base import Detector, Found
from kinfolk.detectors.thresholds import Init, Rule, State, ThresholdRule, batch_quantile
from kinfolk.kinship import Interval, Roles
from kinfolk.pairs import Block
from kinfolk.stores import PerSample
from kinfolk.stores.per_sample import skips


class GloFND(Detector):
    """Kin are the candidates more similar than the sample's learned threshold λ, the (1 − α) quantile over the whole data set.

    Each visit of a sample moves its λ by what its negatives show (the rules are in `thresholds.py`). With "adam" and "sgd" kin are s > λ
    with the **new** λ, as in the paper. A λ of 1 flags nothing.

    "tracking" counts how many negatives are above λ and moves it in units of their mean excess, so that neither the mean nor the scale of
    the similarities matters. λ moves with the mean and the spread of the sample's similarities, and with a drift that all samples share. It
    flags with the λ from before its own count, which makes the share flagged right on average even where less than one candidate of a
    batch is to be flagged.

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

    State: per sample λ and the rule's own: π, β, μ and σ (`place`, `tail`, `mean`, `spread`), and c (`drift`) for all samples; or the
    number of visits, m and v. A sample without negatives is left as it is. In `eval()` the stored λ is used as it is. `alpha` is not part
    of the state.

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
    num_samples: int
    alphas: Tensor | None
    drift: Tensor | None
    first_epoch = 0
    """The first epoch in which the state changes. `StartAt` sets it."""

    def __init__(
        self,
        num_samples: int,
        alpha: float | Tensor,
        rule: Rule = "tracking",
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
        if rule == "tracking":
            first = thresholds.start(torch.tensor(self.alpha, dtype=torch.float64) if each is None else each)
            self.store.rows[:, 1:3] = torch.stack(first, -1)
        self._num_similarities = 0  # of a sample in the last batch, with all its views; known to the host, so not state

    @classmethod
    def usual(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        return {"alpha": 0.01}

    def silent_reason(self) -> str | None:
        if not torch.as_tensor(self.alpha).any():
            return "`alpha` (=0) is the share of the negatives to flag; choose one above 0"
        first_visit_flags = self.rule.name != "tracking" or self.rule.init != "one" or self.shared
        if not first_visit_flags and self.num_epochs - self.first_epoch < 2:
            when = "there is one epoch" if self.num_epochs == 1 else f"it learns only in the last of {self.num_epochs} epochs"
            return f"the first visit of a sample flags nothing with `init` (='one') and {when}; set `init` to 'quantile'"
        return None

    @property
    def thresholds(self) -> Tensor:
        """(N,) λ of each sample."""
        level_N: Tensor = self.store.threshold.clamp(-1, 1)
        return level_N.expand(self.num_samples)

    @torch.no_grad()
    def find(self, block: Block) -> Found:
        if self.alpha == 0:
            return Found((Roles(),))
        self._num_similarities = block.num_similarities
        if not self.training:
            return Found((_flagged(self.thresholds[block.ids], self._alpha(block.ids)),))
        if self.shared:
            return self._find_shared(block)
        state_bF, alpha = self.store.read_rows(block.ids), self._alpha(block.ids)
        positive = alpha.clamp(min=torch.finfo(alpha.dtype).tiny) if isinstance(alpha, Tensor) else alpha
        if self.drift is not None:
            fixed = block.compiles and not isinstance(positive, Tensor)
            given = (positive, block.num_similarities)
            at = thresholds.gains_on(*given, state_bF.device, state_bF.dtype) if fixed else thresholds.gains(*given)
            new_bF, level_b = compiled(thresholds.track, block.compiles)(
                block.per_sample, block.num_per_sample, state_bF, self.drift, at, self.rule.init
            )
        else:
            new_bF, level_b = self._descended(block, state_bF, positive)
        if not isinstance(alpha, Tensor):
            kin = Interval(level_b)
        else:
            new_bF = new_bF.where((alpha > 0).unsqueeze(1), torch.nan)  # NaN: the state stays as it is
            kin = Interval(level_b.masked_fill(alpha == 0, torch.inf))
        return Found((Roles(kin=kin),), {"state": new_bF})

    @torch.no_grad()
    def observe(self, ids: Tensor, update: Mapping[str, Tensor], sound: Tensor | None = None) -> None:
        if self.shared:
            self._learn_shared(update["visit"], sound)
            return
        new_bF = update["state"]
        if self.drift is not None and not skips(sound):
            if sound is not None and sound.device.type != "cpu":
                new_bF = new_bF.masked_fill(~sound, torch.nan)  # NaN: the state stays as it is
            at, expected = thresholds.gains(self.alpha, self._num_similarities), self.alpha * self._num_similarities * len(ids)
            thresholds.move_drift(self.drift, new_bF[:, 5], expected, at)
            new_bF, sound = new_bF[:, :5], None
        self.store.write_rows(ids, new_bF, sound)

    def _alpha(self, ids: Tensor) -> float | Tensor:
        """α, or (b,) that of each sample."""
        return self.alpha if self.alphas is None else self.alphas[ids].to(self.store.rows.dtype)

    def _descended(self, block: Block, state_bF: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor]:
        """A visit under "adam" or "sgd": (b, F) the new state, and (b,) the level above which candidates are flagged."""
        state: State = dict(zip(self.store.fields, state_bF.unbind(1), strict=True))
        n_b = block.num_per_sample
        new = self.rule.descend(state, thresholds.above(block.per_sample, n_b, state["threshold"])[0], alpha)
        if self.rule.init == "quantile":
            fresh = state["visits"] == 0
            first = {**state, "threshold": _own_quantile(block, alpha, fresh).to(state_bF.dtype), "visits": state["visits"] + 1}
            new = {name: first[name].where(fresh, rows) for name, rows in new.items()}
        new_bF = torch.stack([new[name] for name in self.store.fields], 1).masked_fill((n_b == 0).unsqueeze(1), torch.nan)
        level_b = new_bF[:, 0]
        return new_bF, level_b.masked_fill(level_b >= 1, torch.inf)

    def _find_shared(self, block: Block) -> Found:
        """Flags with the one threshold as it was before this batch, and notes what each sample of the block shows of it."""
        alpha, state_bF = self.alpha, self.store.rows.expand(len(block.ids), -1)
        sim_bM, n_b = block.per_sample, block.num_per_sample
        if self.rule.name == "tracking":
            mean_b, spread_b = thresholds.moments(sim_bM, n_b).to(state_bF.dtype).unbind(0)
            first_b = torch.addcmul(mean_b, spread_b, state_bF[:, 1])
            level_b = torch.where(state_bF[:, 4] == 0, first_b, state_bF[:, 0])
            noted: tuple[Tensor, ...] = (*thresholds.above(sim_bM, n_b, level_b), mean_b, spread_b)
        else:
            noted = (*thresholds.above(sim_bM, n_b, state_bF[:, 0]),)
            if self.rule.init == "quantile":
                fresh = state_bF[:, 1] == 0
                noted = (*noted, _own_quantile(block, alpha, fresh).to(state_bF.dtype).masked_fill(n_b == 0, torch.nan))
        return Found((_flagged(self.thresholds[: len(block.ids)], alpha),), {"visit": torch.stack((*noted, n_b.to(state_bF.dtype)), 1)})

    def _learn_shared(self, visit_bF: Tensor, sound: Tensor | None) -> None:
        """One step of the shared threshold, from the mean over all samples of the batch. Without any negative it stays as it is."""
        mean_1F, before_1F = visit_bF.nanmean(0, keepdim=True).to(self.store.rows.dtype), self.store.rows
        if self.rule.name == "tracking":
            at = thresholds.gains(self.alpha, float(self._num_similarities) * len(visit_bF))
            moments_21 = thresholds.follow(before_1F, mean_1F[:, 2:4].T, at)
            tail_1, y_1 = thresholds.counted(before_1F[:, 2], moments_21[1], mean_1F[:, :2].T, at)
            place_1 = torch.addcmul(before_1F[:, 1], tail_1, y_1)
            level_1 = torch.addcmul(moments_21[0], moments_21[1], place_1)
            new_1F = torch.stack((level_1, place_1, tail_1, *moments_21), 1)
        else:
            state: State = dict(zip(self.store.fields, before_1F.unbind(1), strict=True))
            new = self.rule.descend(state, mean_1F[:, 0], self.alpha)
            if self.rule.init == "quantile":
                first = {**state, "threshold": mean_1F[:, 2], "visits": state["visits"] + 1}
                new = {name: first[name].where(state["visits"] == 0, rows) for name, rows in new.items()}
            new_1F = torch.stack([new[name] for name in self.store.fields], 1)
        self.store.write_rows(torch.zeros(1, dtype=torch.int64, device=new_1F.device), new_1F, sound)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        if self.rule.name == "tracking" and f"{prefix}store.visits" in state_dict:
            thresholds.convert(state_dict, prefix, torch.tensor(self.alpha) if self.alphas is None else self.alphas)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def __repr__(self) -> str:
        rule = self.rule
        alpha = self.alpha if self.alphas is None else f"<{len(self.alphas)} in [{self.alphas.min():.4g}, {self.alphas.max():.4g}]>"
        learning = f"rule={rule.name!r}, lr={rule.lr:.4g}, betas={rule.betas}, init={rule.init!r}"
        return f"GloFND(num_samples={self.num_samples}, alpha={alpha}, {learning}, shared={self.shared})"


def _flagged(level_b: Tensor, alpha: float | Tensor) -> Roles:
    """Kin are above the level. A level of 1 flags nothing, although rounding makes similarities of 1.0000001; nor does an α of 0."""
    nothing_b = level_b >= 1 if not isinstance(alpha, Tensor) else (level_b >= 1) | (alpha == 0)
    return Roles(kin=Interval(level_b.masked_fill(nothing_b, torch.inf)))


def _own_quantile(block: Block, alpha: float | Tensor, wanted_b: Tensor) -> Tensor:
    """(b,) the quantile over each wanted sample's views and negatives of this block; 1 elsewhere."""
    if wanted_b.device.type == "cpu" and not bool(wanted_b.any()):  # on a CPU looking costs nothing, and saves a selection
        return torch.ones(len(block.ids), dtype=torch.float64)
    return batch_quantile(block.per_sample, block.num_per_sample, alpha if isinstance(alpha, float) else alpha.double()).where(
        wanted_b, 1.0
    )


def _checked(alpha_N: Tensor, num_samples: int) -> Tensor:
    """One α for each sample, as it has to be."""
    if alpha_N.shape != (num_samples,):
        raise ValueError(f"`alpha` (={tuple(alpha_N.shape)}) must be a number or have the shape ({num_samples},): one for each sample")
    alpha_N = alpha_N.detach().to(torch.get_default_dtype())
    if not bool(((alpha_N >= 0) & (alpha_N <= 1)).all()):
        raise ValueError(f"`alpha` (={alpha_N.min():.4g} to {alpha_N.max():.4g}) must be in [0, 1] for every sample")
    return alpha_N.clone()
