"""Detectors that only studies use; importing this module registers them."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from kinfolk.detectors import DETECTORS, GloFND, Guide, Union
from kinfolk.plugins import register_detector


class OwnOrGuide(Union):
    """Kin by the encoder's own similarity (GloFND) or by a guide.

    Args:
        features: of the guide.
        num_samples: N.
        alpha: share of the negatives that GloFND flags.
        guide_alpha: share that the guide flags.
    """

    def __init__(
        self,
        features: Tensor | str | Path,
        *,
        num_samples: int,
        alpha: float = 0.02,
        guide_alpha: float = 0.05,
    ) -> None:
        own = GloFND(num_samples=num_samples, alpha=alpha, init="quantile")
        super().__init__(own, Guide(features, alpha=guide_alpha))


if "own_or_guide" not in DETECTORS:
    register_detector("own_or_guide", OwnOrGuide)
