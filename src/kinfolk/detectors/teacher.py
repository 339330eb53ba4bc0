"""A teacher: a slow copy of the encoder gives soft targets.

Denize et al., Similarity Contrastive Estimation for Self-Supervised Soft Contrastive Learning
(SCE), WACV 2023, equations 2 to 5; with λ = 0 Zheng et al., ReSSL: Relational Self-Supervised
Learning with Weak Augmentation, NeurIPS 2021, equations 3 to 5.

Dimension key: R rows of a block, C candidates, b samples of a block, G embedding of the teacher.
"""

from __future__ import annotations

import torch

from kinfolk.detectors.base import Detector, guide_similarities, register
from kinfolk.errors import require
from kinfolk.pairs import Block, Kin


@register(
    "teacher",
    "Denize et al., WACV 2023; Zheng et al., NeurIPS 2021",
    "a third, weak view (simclr, sogclr)",
    action="attract",
)
class Teacher(Detector):
    """Every candidate is kin, to the degree to which the teacher finds it similar to the anchor's
    sample.

        degree_ij = exp(τ_ij / t_m) / Σ_{k ≠ i} exp(τ_ik / t_m)

    τ are the similarities of the teacher, which sees a weakly augmented view. With `attract` the
    target of the anchor is y = λ · (own positive) + (1 − λ) · degree, which is SCE; λ is
    `own_weight`, here or of the objective. λ = 1 is the plain loss. λ = 0 is ReSSL, where with
    `decoupled` the own positive leaves the denominator too, as in its paper. With `reweight` the
    degrees are taken from the weights of the negatives; "eliminate" is refused.

    The framework has the teacher: `simclr` and `sogclr` keep a slow copy of encoder and head, which
    sees a third, weak view; for `moco` and `mocov3` it is the momentum encoder. Without a teacher,
    as for a bare loss, the similarities of the block are used instead. No state of its own.

    Args:
        temperature: t_m > 0, lower than that of the loss.
        own_weight: λ in [0, 1].
        momentum: of the slow copy of `simclr` and `sogclr`; None: 0.99. `moco` and `mocov3` have a
            momentum of their own.

    Example:
        >>> Teacher(temperature=0.05).own_weight
        0.5
    """

    guide = "teacher"
    soft = True

    def __init__(
        self, *, temperature: float = 0.05, own_weight: float = 0.5, momentum: float | None = None
    ) -> None:
        super().__init__()
        require(temperature > 0, "temperature", temperature, "above 0")
        require(0 <= own_weight <= 1, "own_weight", own_weight, "in [0, 1]")
        require(
            momentum is None or 0 <= momentum < 1,
            "momentum",
            momentum,
            "in [0, 1): at 1 the teacher would never learn",
        )
        self.temperature, self.own_weight, self.momentum = temperature, own_weight, momentum

    @torch.no_grad()
    def find(self, block: Block) -> Kin:
        return Kin(torch.softmax(guide_similarities(block) / self.temperature, 1))
