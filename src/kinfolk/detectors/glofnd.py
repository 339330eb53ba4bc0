"""GloFND: Balmaseda et al., Discovering Global False Negatives On the Fly for Self-supervised
Contrastive Learning, ICML 2025.

Dimension key: R rows of a block, C candidates, b samples of the block, N data set, F fields.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kinfolk.detectors import thresholds
from kinfolk.detectors.base import Bound, Detector, register
from kinfolk.detectors.thresholds import Init, Rule, ThresholdRule
from kinfolk.errors import require, warn_if_most_are_flagged
from kinfolk.pairs import Block, Kin, grade
from kinfolk.stores import PerSample


@register("glofnd", "Balmaseda et al., ICML 2025", "alpha")
class GloFND(Detector):
    """Flags candidates that are more similar than the sample's learned threshold λ, the (1 − α)
    quantile of its similarities to the whole data set.

    Each visit of a sample moves its λ by a rule of `thresholds.py`. "adam" and "sgd" flag with the
    new λ, as in the paper, "tracking" with that from before the count of this visit. A λ of 1 flags
    nothing.

    Args:
        num_samples: N; ids are in [0, N).
        alpha: α, the share of the negatives to flag: a number, or (N,) one for each sample.
        rule: "tracking", "adam" (the paper's) or "sgd".
        lr: step size of "adam" (default 0.05) and "sgd" (default 0.01 / α, so that a threshold that
            nothing reaches falls by 0.01 per visit). "tracking" has none.
        betas: betas of Adam.
        init: "one": λ starts at 1 and flags nothing. "quantile": a sample's first visit sets λ to
            the (1 − α) quantile of a normal distribution with the mean and spread of that visit.
            "adam" and "sgd" then learn from the second visit on, "tracking" from the first in both.
        shared: one λ for all samples (the paper's ablation), learned from each batch as a whole and
            used from the next batch on.

    State: per sample λ, and π, μ and σ (`place`, `mean`, `spread`) with one drift c for all samples
    ("tracking"), or the number of visits, m and v. In `eval()` nothing changes.

    Deviates from the paper in: the default rule (with Adam's constant step a threshold never
    settles); Adam's bias correction, which counts the sample's updates (published code: epochs).

    Example:
        >>> GloFND(num_samples=100, alpha=0.01, init="quantile").thresholds.shape
        torch.Size([100])
    """

    num_samples: int
    alphas: Tensor | None
    drift: Tensor | None
    tails: Tensor | None
    places: Tensor | None

    def __init__(
        self,
        *,
        num_samples: int,
        alpha: float | Tensor,
        rule: Rule = "tracking",
        lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.98),
        init: Init = "one",
        shared: bool = False,
    ) -> None:
        super().__init__()
        require(num_samples >= 1, "num_samples", num_samples, "at least 1")
        each = (
            _check_alpha(alpha, num_samples) if isinstance(alpha, Tensor) and alpha.ndim else None
        )
        if each is not None and shared:
            raise ValueError("`alpha` must be one number where `shared` is set: there is one λ")
        self.num_samples, self.shared = num_samples, shared
        self.alpha = float(alpha if each is None else each.mean())
        """The share of the negatives to flag; with one for each sample, their mean."""
        require(0 <= self.alpha <= 1, "alpha", self.alpha, "in [0, 1]")
        warn_if_most_are_flagged(self.alpha)
        self.register_buffer("alphas", each, persistent=False)
        default_lr = 0.01 / max(self.alpha, 1e-6) if rule == "sgd" else 0.05
        self.rule = ThresholdRule(rule, default_lr if lr is None else lr, tuple(betas), init)
        self.store = PerSample(1 if shared else num_samples, **self.rule.fields())
        place, tail = thresholds.normal(torch.as_tensor(self.alpha if each is None else each))
        self._place, self._tail = float(place.mean()), float(tail.mean())
        tracks, starts = rule == "tracking", rule != "tracking" and init == "quantile"
        if tracks:
            self.store.place.copy_(place)
        for name, value, needed in (("tails", tail, tracks), ("places", place, starts)):
            found = value.float() if needed and each is not None else None
            self.register_buffer(name, found, persistent=False)
        drift = torch.tensor(0.0) if tracks and not shared else None
        self.register_buffer("drift", drift)

    @classmethod
    def defaults(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        return {"alpha": 0.01}

    def silent_reason(self, first_epoch: int = 0) -> str | None:
        if self.alpha == 0:
            return "`alpha` (=0) is the share of the negatives to flag; choose one above 0"
        later = self.drift is not None and self.rule.init == "one"
        if not later or self.num_epochs - first_epoch >= 2:
            return None
        last = f"it learns only in the last of {self.num_epochs} epochs"
        when = "there is one epoch" if self.num_epochs == 1 else last
        first = "the first visit of a sample flags nothing with `init` (='one')"
        return f"{first} and {when}; set `init` to 'quantile'"

    @property
    def thresholds(self) -> Tensor:
        """(N,) λ of each sample."""
        return self._thresholds_of(slice(None))

    def _thresholds_of(self, ids: Tensor | slice) -> Tensor:
        """Looks them up before it clamps them, because N may be large."""
        return self.store.rows[:, 0].expand(self.num_samples)[ids].clamp(-1, 1)

    def bounds(self, ids: Tensor) -> list[Bound]:
        one_alpha = self.alpha > 0 and self.alphas is None
        return [Bound("threshold", self.alpha, self._thresholds_of(ids))] if one_alpha else []

    @torch.no_grad()
    def find(self, block: Block) -> Kin:
        if self.alpha == 0:
            return Kin()
        level_b, over_bVC, new_bF = self._visit(block)
        degree = grade(block, over_bVC.flatten(0, 1), level_b)
        return Kin(degree, update={} if new_bF is None else {"state": new_bF})

    @torch.no_grad()
    def observe(
        self, ids: Tensor, update: Mapping[str, Tensor], is_finite: Tensor | None = None
    ) -> None:
        new_bF = update["state"]
        if self.shared:
            ids, new_bF = ids.new_zeros(1), self._learn_shared(new_bF)
        elif self.drift is not None:
            drift = thresholds.next_drift(self.drift, new_bF[:, 4:])
            self.drift.copy_(
                drift if is_finite is None else torch.where(is_finite, drift, self.drift)
            )
            new_bF = new_bF[:, :4]
        self.store.write_rows(ids, new_bF, is_finite)

    def _visit(self, block: Block) -> tuple[Tensor, Tensor, Tensor | None]:
        """(b,) the level; (b, V, C) bool, the candidates above it, which are flagged; and (b, F)
        the new state, or what one shared λ learns from. Where it is NaN, the state stays."""
        ids = torch.zeros_like(block.ids) if self.shared else block.ids
        sim_bVC, n_b, state_bF = block.sim_bVC, block.num_per_sample, self.store.rows[ids]
        alpha = self.alpha if self.alphas is None else self.alphas[ids]
        new_bF: Tensor | None = None
        over_bVC: Tensor | None = None
        if not self.training or self.shared:
            level_b = state_bF[:, 0].clamp(-1, 1)
            if self.training:
                new_bF = self._measure(sim_bVC, n_b, state_bF[:, 0], ids)
        elif self.drift is not None:
            tail = self._tail if self.tails is None else self.tails[ids]
            level_b, over_bVC, new_bF = thresholds.track(
                sim_bVC, n_b, state_bF, self.drift, alpha, tail
            )
            if self.rule.init == "one":
                level_b, over_bVC = level_b.masked_fill(state_bF[:, 3] == 0, torch.inf), None
        else:
            share_b = thresholds.share_above(sim_bVC, n_b, state_bF[:, 0])
            new_bF = self.rule.descend(state_bF, share_b, alpha, self._start(sim_bVC, n_b, ids))
            new_bF = new_bF.where((n_b > 0).unsqueeze(1), torch.nan)
            level_b = new_bF[:, 0]
        if isinstance(alpha, Tensor):
            level_b, over_bVC = level_b.masked_fill(alpha == 0, torch.inf), None
            new_bF = None if new_bF is None else new_bF.where((alpha > 0).unsqueeze(1), torch.nan)
        if over_bVC is None:
            over_bVC = thresholds.exceeds(sim_bVC, level_b)
        return level_b, over_bVC, new_bF

    def _start(self, sim_bVC: Tensor, n_b: Tensor, ids: Tensor) -> Tensor | None:
        """(b,) the λ that a first visit sets, if it sets one; computed for all visits, because only
        the device knows which are the first."""
        if self.rule.init == "one":
            return None
        mean_b, spread_b, _ = thresholds.moments(sim_bVC, n_b)
        place = self._place if self.places is None else self.places[ids]
        return (mean_b + spread_b * place).to(self.store.rows.dtype).clamp(-1, 1)

    def _measure(self, sim_bVC: Tensor, n_b: Tensor, level_b: Tensor, ids: Tensor) -> Tensor:
        """(b, F) what one shared λ learns from; NaN for a sample without negatives."""
        shown = [thresholds.share_above(sim_bVC, n_b, level_b)]
        if self.rule.name == "tracking":
            shown += thresholds.moments(sim_bVC, n_b)
        elif (first_b := self._start(sim_bVC, n_b, ids)) is not None:
            shown.append(first_b)
        return torch.stack([x.to(level_b.dtype) for x in shown], 1)

    def _learn_shared(self, shown_bF: Tensor) -> Tensor:
        """(1, F) the new state of one shared λ, from the mean over the batch."""
        state_1F, mean_1F = self.store.rows, shown_bF.nanmean(0, keepdim=True)
        if self.rule.name != "tracking":
            first_1 = mean_1F[:, 1] if self.rule.init == "quantile" else None
            return self.rule.descend(state_1F, mean_1F[:, 0], self.alpha, first_1)
        share_1, now_mean_1, now_spread_1, n_1 = mean_1F.unbind(1)
        _, place_1, mean_1, spread_1 = state_1F.unbind(1)
        n_1 = n_1 * len(shown_bF)
        rise_1 = self._tail * thresholds.step(share_1 * n_1, self.alpha * n_1)
        place_1 = place_1 + rise_1.masked_fill(spread_1 == 0, 0.0)  # λ = 1 at first
        mean_1, spread_1 = thresholds.follow(mean_1, spread_1, (now_mean_1, now_spread_1, n_1))
        return torch.stack((mean_1 + spread_1 * place_1, place_1, mean_1, spread_1), 1)


def _check_alpha(alpha_N: Tensor, num_samples: int) -> Tensor:
    """A copy of one α for each sample; raises where the shape or a value is wrong."""
    if alpha_N.shape != (num_samples,):
        must = f"must be a number or have the shape ({num_samples},): one for each sample"
        raise ValueError(f"`alpha` (={tuple(alpha_N.shape)}) {must}")
    low, high = alpha_N.aminmax()
    if not (low >= 0 and high <= 1):
        raise ValueError(f"`alpha` (={low:.4g} to {high:.4g}) must be in [0, 1] for every sample")
    return alpha_N.detach().to(torch.get_default_dtype(), copy=True)
