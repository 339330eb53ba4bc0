"""FNC: Huynh et al., Boosting Contrastive Self-Supervised Learning with False Negative Cancellation, WACV 2022, section 3.

Dimension key: R rows of a block, C candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from kinfolk.detectors.base import Detector, Found
from kinfolk.kinship import Interval, Roles
from kinfolk.pairs import Block


class FNC(Detector):
    """Kin are the candidates of the batch most similar to the anchor: the first k, those above a similarity, or both at once.

    k = round(fraction · n), at least 1, of the anchor's n negatives, or `top_k`. One order statistic per row, no sort: kin are all
    candidates not below the k-th largest similarity by more than rounding, so ties with it are kin too and the order of the candidates is
    of no consequence. No state.

    Args:
        fraction: share of the negatives, in (0, 1).
        top_k: their number; not together with `fraction`.
        min_similarity: only candidates above this cosine similarity.

    Example:
        >>> FNC(fraction=0.01, min_similarity=0.3)
        FNC(fraction=0.01, min_similarity=0.3)
    """

    paper: ClassVar[str] = "Huynh et al., WACV 2022"
    needs: ClassVar[str] = "fraction, top_k or min_similarity"
    leveled: ClassVar[bool] = True

    def __init__(self, fraction: float | None = None, top_k: int | None = None, min_similarity: float | None = None) -> None:
        super().__init__()
        if fraction is None and top_k is None and min_similarity is None:
            raise ValueError("FNC needs at least one of `fraction`, `top_k` and `min_similarity`")
        if fraction is not None and top_k is not None:
            raise ValueError(f"`fraction` (={fraction}) and `top_k` (={top_k}) exclude each other")
        if fraction is not None and not 0 < fraction < 1:
            raise ValueError(f"`fraction` (={fraction}) must be in (0, 1)")
        if top_k is not None and top_k < 1:
            raise ValueError(f"`top_k` (={top_k}) must be at least 1")
        if min_similarity is not None and not -1 <= min_similarity <= 1:
            raise ValueError(f"`min_similarity` (={min_similarity}) must be in [-1, 1]")
        self.fraction, self.top_k, self.min_similarity = fraction, top_k, min_similarity

    @classmethod
    def usual(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        return {} if any(value is not None for value in given.values()) else {"fraction": 0.01}

    def silent_reason(self) -> str | None:
        impossible = self.min_similarity is not None and self.min_similarity >= 1
        return f"no candidate is above `min_similarity` (={self.min_similarity}); choose one below 1" if impossible else None

    def find(self, block: Block) -> Found:
        sim_RC, n_R = block.sim_RC, block.num_negatives_R
        if self.fraction is None and self.top_k is None:
            assert self.min_similarity is not None
            return Found((Roles(kin=Interval(torch.full_like(n_R, self.min_similarity, dtype=sim_RC.dtype))),))
        k_R = n_R.clamp(max=self.top_k) if self.fraction is None else (n_R.double() * self.fraction).round().long()
        k_R = k_R.clamp(min=1)
        most = sim_RC.shape[1] if self.fraction is None else max(1, round(sim_RC.shape[1] * self.fraction))  # n is at most C
        top_RK = sim_RC.topk(most if self.top_k is None else min(most, self.top_k), dim=1, sorted=True).values
        level_R = top_RK.gather(1, k_R.unsqueeze(1) - 1).squeeze(1) - 8 * torch.finfo(sim_RC.dtype).eps
        if self.min_similarity is not None:
            level_R = level_R.clamp(min=self.min_similarity)
        level_R = level_R.masked_fill(n_R == 0, torch.inf)
        return Found((Roles(kin=Interval(level_R, degrees_from=-1.0 if self.min_similarity is None else self.min_similarity)),))

    def __repr__(self) -> str:
        given = {"fraction": self.fraction, "top_k": self.top_k, "min_similarity": self.min_similarity}
        return f"FNC({', '.join(f'{name}={value}' for name, value in given.items() if value is not None)})"
