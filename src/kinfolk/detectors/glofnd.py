"""GloFND: Balmaseda et al., Discovering Global False Negatives On the Fly, ICML 2025, equations 2 to 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kinfolk.detectors.base import Detector, Found
from kinfolk.pairs import Block, Roles
from kinfolk.stores import PerSample


class GloFND(Detector):
    """One learned similarity threshold per sample (first version: Adam only; the step rules follow)."""

    paper: ClassVar[str] = "Balmaseda et al., ICML 2025"
    needs: ClassVar[str] = "alpha"

    def __init__(
        self,
        num_samples: int,
        alpha: float,
        rule: Literal["tracking", "adam", "sgd"] = "tracking",
        lr: float = 0.05,
        betas: tuple[float, float] = (0.9, 0.98),
        init: Literal["one", "quantile"] = "one",
        shared: bool = False,
    ) -> None:
        super().__init__()
        self.alpha, self.lr, self.betas, self.init = alpha, lr, betas, init
        self.store = PerSample(num_samples, threshold=torch.tensor(1.0), m=torch.tensor(0.0), v=torch.tensor(0.0), count=torch.tensor(0))

    @property
    def thresholds(self) -> Tensor:
        thresholds: Tensor = self.store.threshold
        return thresholds

    def find(self, block: Block) -> Found:
        if self.alpha == 0:
            return Found((Roles(),))
        s, V = self.store.read(block.ids), block.num_views
        lam = s["threshold"].to(block.sim_RC.dtype)
        update: dict[str, Tensor] = {}
        if self.training:
            if self.init == "quantile":
                k = max(1, round(self.alpha * block.sim_RC.shape[1] * V))
                first = block.sim_RC.view(len(block.ids), -1).topk(k + 1, 1).values[:, -1]
                lam = torch.where(s["count"] == 0, first, lam)
            share = block.over_views((block.sim_RC > lam.repeat_interleave(V).unsqueeze(1)).sum(1) / block.num_negatives_R)
            g, n = self.alpha - share, s["count"] + 1
            m = self.betas[0] * s["m"] + (1 - self.betas[0]) * g
            v = self.betas[1] * s["v"] + (1 - self.betas[1]) * g * g
            step = self.lr * (m / (1 - self.betas[0] ** n)) / ((v / (1 - self.betas[1] ** n)).sqrt() + 1e-8)
            lam = (lam - step).clamp(-1, 1)
            update = {"threshold": lam, "m": m, "v": v, "count": n}
        return Found((Roles(kin_RC=block.sim_RC > lam.repeat_interleave(V).unsqueeze(1)),), update)

    def observe(self, ids: Tensor, update: Mapping[str, Tensor]) -> None:
        self.store.write(ids, update)
