"""GloFND: Balmaseda et al., ICML 2025.

Dimension key: R rows of a block, V views, C candidates, b samples of the block, F fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import torch
from torch import Tensor

from kinfolk.detectors import thresholds
from kinfolk.detectors.base import Bound, Detector, register
from kinfolk.detectors.thresholds import Init, Rule
from kinfolk.errors import require, require_choice, warn_if_most_are_flagged
from kinfolk.pairs import Block, Kin
from kinfolk.stores import PerSample


@register("glofnd", "Balmaseda et al., ICML 2025", "alpha")
class GloFND(Detector):
    """Flags candidates that are more similar than the sample's learned threshold λ, the (1 − α)
    quantile of its similarities to the whole data set.

    Each visit of a sample moves its λ. "adam" and "sgd" flag with the new λ, as in the paper,
    "tracking" with that from before. A λ of 1 flags nothing. In `eval()` nothing changes.

    Args:
        num_samples: N; ids are in [0, N).
        alpha: α, the share of the negatives to flag.
        rule: "tracking", "adam" (the paper's) or "sgd".
        lr: step size of "adam" (default 0.05) and "sgd" (default 0.01 / α).
        betas: of Adam.
        init: "one": λ starts at 1 and flags nothing. "quantile": a sample's first visit sets λ to
            the quantile of a normal distribution with the mean and spread of that visit.
        shared: one λ for all samples (the paper's ablation), with "adam" or "sgd". It learns from
            each batch as a whole, for the next.

    State: per sample λ, and π, μ and σ (`place`, `mean`, `spread`) with one drift c for all samples
    ("tracking"), or the number of visits, m and v.

    Deviates from the paper in: the default rule (with Adam's constant step a threshold never
    settles); Adam's bias correction, which counts the sample's updates (published code: epochs).

    Example:
        >>> GloFND(num_samples=100, alpha=0.01, init="quantile").thresholds.shape
        torch.Size([100])
    """

    num_samples: int
    drift: Tensor | None

    def __init__(
        self,
        *,
        num_samples: int,
        alpha: float,
        rule: Rule = "tracking",
        lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.98),
        init: Init = "one",
        shared: bool = False,
    ) -> None:
        super().__init__()
        require(0 <= alpha <= 1, "alpha", alpha, "in [0, 1]")
        warn_if_most_are_flagged(alpha)
        require_choice("rule", rule, get_args(Rule))
        require_choice("init", init, get_args(Init))
        require(lr is None or lr > 0, "lr", lr, "above 0")
        right = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
        require(right, "betas", betas, "two numbers in [0, 1)")
        must = "'adam' or 'sgd' with `shared`: tracking follows each sample's own similarities"
        require(not shared or rule != "tracking", "rule", rule, must)
        self.num_samples, self.alpha, self.rule, self.init = num_samples, float(alpha), rule, init
        default_lr = 0.01 / max(alpha, 1e-6) if rule == "sgd" else 0.05
        self.lr, self.betas, self.shared = default_lr if lr is None else lr, tuple(betas), shared
        self.place, self.tail = thresholds.normal(self.alpha)
        first = dict.fromkeys(thresholds.FIELDS[rule], 0.0) | {"threshold": 1.0}
        self.store = PerSample(1 if shared else num_samples, **first)
        if rule == "tracking":
            self.store.place.fill_(self.place)
        self.register_buffer("drift", torch.tensor(0.0) if rule == "tracking" else None)

    @classmethod
    def defaults(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        return {"alpha": 0.01}

    def silent_reason(self, first_epoch: int = 0) -> str | None:
        if self.alpha == 0:
            return "`alpha` (=0) is the share of the negatives to flag; choose one above 0"
        later = self.rule == "tracking" and self.init == "one"
        if not later or self.num_epochs - first_epoch >= 2:
            return None
        return (
            "the first visit of a sample flags nothing with `init` (='one') and it learns only in"
            f" the last of {self.num_epochs} epochs; set `init` to 'quantile'"
        )

    @property
    def thresholds(self) -> Tensor:
        """(N,) λ of each sample."""
        return self._thresholds_of(slice(None))

    def _thresholds_of(self, ids: Tensor | slice) -> Tensor:
        """Clamps after the lookup, because N may be large."""
        return self.store.rows[:, 0].expand(self.num_samples)[ids].clamp(-1, 1)

    def bounds(self, ids: Tensor) -> list[Bound]:
        return [Bound("threshold", self.alpha, self._thresholds_of(ids))] if self.alpha else []

    @torch.no_grad()
    def find(self, block: Block) -> Kin:
        if self.alpha == 0:
            return Kin()
        if not self.training:
            return Kin(self._above(block, self._thresholds_of(block.ids)))
        sim_bVC, n_b = block.sim_bVC, block.num_per_sample
        state_bF = self.store.rows[torch.zeros_like(block.ids) if self.shared else block.ids]
        if self.drift is not None:
            over_bVC, new_bF = thresholds.track(
                sim_bVC, n_b, state_bF, self.drift, self.alpha, self.tail
            )
            if self.init == "one":
                was_visited_b = state_bF[:, 3] > 0
                over_bVC = over_bVC & was_visited_b.view(-1, 1, 1)
            return Kin(over_bVC.flatten(0, 1), update={"state": new_bF})
        share_b, first_b = thresholds.share_above(sim_bVC, n_b, state_bF[:, 0]), None
        if self.init == "quantile":  # of all visits: only the device knows which are the first
            mean_b, spread_b, _ = thresholds.moments(sim_bVC, n_b)
            first_b = (mean_b + spread_b * self.place).to(state_bF.dtype).clamp(-1, 1)
        if self.shared:  # learns in `observe`, from the whole batch
            seen = [share_b.to(state_bF.dtype), *([] if first_b is None else [first_b])]
            level_b, new_bF = state_bF[:, 0].clamp(-1, 1), torch.stack(seen, 1)
        else:
            new_bF = self._descend(state_bF, share_b, first_b)
            new_bF = new_bF.where((n_b > 0).unsqueeze(1), torch.nan)  # the state stays
            level_b = new_bF[:, 0]
        return Kin(self._above(block, level_b), update={"state": new_bF})

    def _above(self, block: Block, level_b: Tensor) -> Tensor:
        return thresholds.exceeds(block.sim_bVC, level_b).flatten(0, 1)

    def _descend(self, state_bF: Tensor, share_b: Tensor, first_b: Tensor | None) -> Tensor:
        betas = self.betas if self.rule == "adam" else None
        return thresholds.descend(state_bF, share_b, self.alpha, self.lr, betas, first_b)

    @torch.no_grad()
    def observe(
        self, ids: Tensor, update: Mapping[str, Tensor], is_finite: Tensor | None = None
    ) -> None:
        new_bF = update["state"]
        if self.shared:
            share_1, *first = new_bF.nanmean(0, keepdim=True).unbind(1)
            new_bF = self._descend(self.store.rows, share_1, first[0] if first else None)
            ids = ids.new_zeros(1)
        if self.drift is not None:
            drift = thresholds.next_drift(self.drift, new_bF[:, 4:])
            self.drift.copy_(
                drift if is_finite is None else torch.where(is_finite, drift, self.drift)
            )
            new_bF = new_bF[:, :4]
        self.store.write_rows(ids, new_bF, is_finite)
