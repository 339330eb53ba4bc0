"""FNC: Huynh et al., Boosting Contrastive Self-Supervised Learning with False Negative Cancellation, WACV 2022.

Dimension key: R rows of a block, C candidates.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from kinfolk.detectors.base import Detector, Found
from kinfolk.pairs import Block, Roles


class FNC(Detector):
    """Kin are the candidates of the batch most similar to the anchor: the first k, those above a similarity, or both at once.

    k = round(fraction · n), at least 1, of the anchor's n negatives, or `top_k`. No state.

    Args:
        fraction: share of the negatives in (0, 1).
        top_k: their number; not together with `fraction`.
        min_similarity: only candidates above this cosine similarity.
    """

    paper: ClassVar[str] = "Huynh et al., WACV 2022"

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

    def find(self, block: Block) -> Found:
        sim_RC = block.sim_RC
        kin_RC = None if self.min_similarity is None else sim_RC > self.min_similarity
        if self.fraction is None and self.top_k is None:
            return Found((Roles(kin_RC=kin_RC),))
        n_R = block.num_negatives_R
        k_R = n_R.clamp(max=self.top_k) if self.fraction is None else (n_R * self.fraction).round().clamp(min=1).long()
        most = int(k_R.max())
        top = sim_RC.topk(most, dim=1)
        chosen = (torch.arange(most, device=sim_RC.device) < k_R.unsqueeze(1)) & (top.values > -torch.inf)
        first_RC = torch.zeros_like(sim_RC, dtype=torch.bool).scatter_(1, top.indices, chosen)
        return Found((Roles(kin_RC=first_RC if kin_RC is None else first_RC & kin_RC),))

    def __repr__(self) -> str:
        given = {"fraction": self.fraction, "top_k": self.top_k, "min_similarity": self.min_similarity}
        return f"FNC({', '.join(f'{name}={value}' for name, value in given.items() if value is not None)})"
