"""CLIP: Radford et al., Learning Transferable Visual Models From Natural Language Supervision, ICML 2021, figure 3.

Dimension key: B batch, D embedding.
"""

from __future__ import annotations

from typing_extensions import Unpack

from kinfolk.detectors.base import Detector
from kinfolk.objectives.base import call
from kinfolk.objectives.bimodal import Bimodal
from kinfolk.objectives.debiased import Estimate
from kinfolk.objectives.learned_temperature import LearnedTemperature
from kinfolk.objectives.ntxent import NTXent


class CLIPLoss(Bimodal[NTXent]):
    """InfoNCE of image and text in both directions, with a learned temperature.

        loss = ½ mean_i ( −s_ii / t + log( exp(s_ii / t) + Σ_{j ≠ i} w_ij exp(s_ij / t) ) )     images i, texts j
             + ½ mean_i ( −s_ii / t + log( exp(s_ii / t) + Σ_{j ≠ i} v_ij exp(s_ji / t) ) )     texts i, images j

    w, v: 1; 0 where j shares the group of i; for kin as the action says, see `NTXent`. Without groups and detector it is the cross-entropy
    over rows and columns of the matrix of similarities. State: the temperature, as the logarithm of its inverse (`learned.logit_scale`),
    and that of the two detectors.

    Args:
        temperature: t at the start.
        learnable: False keeps it.
        min_temperature: the learned t never falls below; 0.01 is the scale of at most 100 of the paper.
        detector, action, min_negatives, kin_weight, block_rows, gather: see `NTXent`; the detector is copied for the second direction.

    Example:
        >>> import torch, kinfolk as kf
        >>> loss_fn = kf.CLIPLoss(temperature=0.5)
        >>> round(loss_fn(torch.eye(4), torch.eye(4)).item(), 4)
        0.3408
        >>> round(loss_fn(torch.eye(4), torch.eye(4), group_ids=torch.tensor([0, 0, 0, 1])).item(), 4)
        0.1804
    """

    def __init__(
        self,
        temperature: float = 0.07,
        learnable: bool = True,
        min_temperature: float = 0.01,
        **shared: Unpack[Estimate],
    ) -> None:
        def make(each: Detector | None) -> NTXent:
            given: Estimate = {**shared, "detector": each}
            return NTXent(temperature, **given)

        super().__init__(make, shared.get("detector"), LearnedTemperature(temperature, min_temperature) if learnable else None)

    def __repr__(self) -> str:
        learned = {"learnable": False} if self.learned is None else {"min_temperature": self.learned.lowest}
        return call("CLIPLoss", self.image, temperature=self.image.temperature, **learned)
