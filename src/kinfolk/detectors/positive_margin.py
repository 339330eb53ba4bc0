"""Kin by the anchor's positive: candidates that are nearly as similar to the anchor as it is.

Moreira et al., NV-Retriever: Improving text embedding models with effective hard-negative mining,
2024, section 3 (TopK-MarginPos and TopK-PercPos); Solatorio, GISTEmbed, 2024, section 3, with the
encoder in training as its own guide.

Dimension key: R rows of a block, P positives per anchor, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.detectors.base import Detector, register
from kinfolk.errors import require
from kinfolk.pairs import Block, Kin, above


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

    s⁺ is the similarity of the anchor to its positive; of several positives, the highest, so that
    fewer candidates are kin. The level follows the anchor: where the positive is far away,
    candidates at the same distance are not false negatives. No state. An encoder that has learned
    nothing finds many candidates nearer than the positive, so a training from scratch needs a
    warm-up (`StartAt`).

    Args:
        margin: in [−1, 1]; the larger, the more candidates are kin. Below 0, only those that are
            more similar than the positive by so much.
        relative: whether the margin is a share of s⁺ or a difference.

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
    """The level `margin` below the similarity of the positive, as a share of it or a difference.

    Example:
        >>> level_below(torch.tensor([0.5, -0.5]), 0.2, relative=True)
        tensor([ 0.4000, -0.6000])
    """
    return positive - margin * (positive.abs() if relative else 1)
