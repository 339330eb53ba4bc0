"""Fixed rules on the similarities of an anchor.

- FNC: Huynh et al., WACV 2022, section 3.
- Positive margin: Moreira et al., NV-Retriever, 2024, section 3 (TopK-MarginPos and TopK-PercPos);
  Solatorio, GISTEmbed, 2024, section 3, with the encoder in training as its own guide.

Dimension key: R rows of a block, P positives per anchor, C candidates.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kinfolk.detectors.base import Bound, Detector, register
from kinfolk.errors import require, require_at_least, warn_if_most_are_flagged
from kinfolk.pairs import Block, Kin, above


@register("fnc", "Huynh et al., WACV 2022", "alpha, top_k or min_similarity")
class FNC(Detector):
    """Kin are the candidates of the batch most similar to the anchor: the first k, those above a
    similarity, or both at once.

    k = round(alpha · n), at least 1, of the anchor's n negatives, or `top_k`. Candidates as similar
    as the k-th, up to rounding, are kin too.

    Args:
        alpha, top_k: share of the negatives, in (0, 1), or their number.
        min_similarity: only candidates above this cosine similarity.

    Example:
        >>> FNC(alpha=0.01, min_similarity=0.3)
        FNC(alpha=0.01, min_similarity=0.3)
    """

    def __init__(
        self,
        *,
        alpha: float | None = None,
        top_k: int | None = None,
        min_similarity: float | None = None,
    ) -> None:
        super().__init__()
        if alpha is None and top_k is None and min_similarity is None:
            raise ValueError("FNC needs at least one of `alpha`, `top_k` and `min_similarity`")
        if alpha is not None and top_k is not None:
            raise ValueError(f"`alpha` (={alpha}) and `top_k` (={top_k}) exclude each other")
        require(alpha is None or 0 < alpha < 1, "alpha", alpha, "in (0, 1)")
        require_at_least(1, top_k=top_k)
        level = -1.0 if min_similarity is None else min_similarity
        require(-1 <= level <= 1, "min_similarity", level, "in [-1, 1]")
        warn_if_most_are_flagged(alpha)
        self.alpha, self.top_k, self.min_similarity = alpha, top_k, min_similarity

    @classmethod
    def defaults(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        return {} if any(value is not None for value in given.values()) else {"alpha": 0.01}

    def silent_reason(self, first_epoch: int = 0) -> str | None:
        why = f"no candidate is above `min_similarity` (={self.min_similarity}); choose one below 1"
        return why if self.min_similarity == 1 else None

    def bounds(self, ids: Tensor) -> list[Bound]:
        return [] if self.alpha is None else [Bound("threshold", self.alpha)]

    @torch.no_grad()
    def find(self, block: Block) -> Kin:
        sim_RC, n_R = block.sim_RC, block.per_row(block.num_negatives_b)
        least = -2.0 if self.min_similarity is None else self.min_similarity
        level_R = torch.full_like(sim_RC[:, 0], least)
        if self.alpha is None and self.top_k is None:
            return Kin(above(block, level_R))
        kth_R = top_level(sim_RC, n_R, self.alpha, self.top_k)
        return Kin(above(block, torch.maximum(kth_R, level_R).masked_fill(n_R == 0, torch.inf)))


def top_level(sim_RC: Tensor, n_R: Tensor, alpha: float | None, top_k: int | None = None) -> Tensor:
    """(R,) just below the k-th highest similarity, k = round(alpha · n), at least 1, or `top_k`."""
    most = sim_RC.shape[1]
    most = min(most, top_k or most) if alpha is None else max(1, round(most * alpha))
    k_R = n_R if alpha is None else (n_R.double() * alpha).round().long()
    k_R1 = k_R.clamp(1, most).unsqueeze(1)
    kth_R = sim_RC.topk(most, dim=1).values.gather(1, k_R1 - 1).squeeze(1)
    return kth_R - 8 * torch.finfo(sim_RC.dtype).eps


@register(
    "positive_margin",
    "Moreira et al., 2024; Solatorio, 2024",
    "—",
    variants={"absolute": {"relative": False}},
)
class PositiveMargin(Detector):
    """Kin are the candidates more similar to the anchor than its positive, less a margin.

        relative    s_ij > s⁺_i − margin · |s⁺_i|     for s⁺ > 0: above (1 − margin) · s⁺
        absolute    s_ij > s⁺_i − margin

    s⁺ is the similarity of the anchor to its most similar positive. For an untrained encoder many
    candidates are nearer, so a training from scratch needs a warm-up (`StartAt`). No state.

    Args:
        margin: in [−1, 1]; the larger, the more candidates are kin.
        relative: whether the margin is a share of s⁺, not a difference.

    Example:
        >>> import torch, kinfolk as kf
        >>> loss_fn = kf.CLIPLoss(temperature=0.05, detector=kf.PositiveMargin(margin=0.05))
        >>> loss_fn(torch.eye(4), torch.eye(4)).isfinite().item()
        True
    """

    def __init__(self, *, margin: float = 0.05, relative: bool = True) -> None:
        super().__init__()
        require(-1 <= margin <= 1, "margin", margin, "in [-1, 1]")
        self.margin, self.relative = margin, relative

    @torch.no_grad()
    def find(self, block: Block) -> Kin:
        if block.pos_RP is None:  # a finished run: positives are not known
            return Kin()
        return Kin(above(block, level_below(block.pos_RP.amax(1), self.margin, self.relative)))


def level_below(positive: Tensor, margin: float, relative: bool) -> Tensor:
    """The level `margin` below a positive.

    Example:
        >>> level_below(torch.tensor([0.5, -0.5]), 0.2, relative=True)
        tensor([ 0.4000, -0.6000])
    """
    return positive - margin * (positive.abs() if relative else 1)
