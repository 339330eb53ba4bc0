"""Bimodal SogCLR: Yuan et al., Provable Stochastic Optimization for Global Contrastive Learning, ICML 2022, for image and text, as in
GloFND (Balmaseda et al., ICML 2025), section 3.3 and appendix B.

Dimension key: N data set.
"""

from __future__ import annotations

from typing_extensions import Unpack

from kinfolk.detectors.base import Detector
from kinfolk.objectives.base import Shared, call, with_detector
from kinfolk.objectives.bimodal import Bimodal
from kinfolk.objectives.sogclr import SogCLR, check_decay, cosine_gamma


class BimodalSogCLR(Bimodal[SogCLR]):
    """The global contrastive loss of image and text: a moving average of each image's negatives, and one of each text's.

        ĝ_I,i = mean over the kept texts j ≠ i of exp(s_ij / t),   u_I,i ← (1 − γ) u_I,i + γ ĝ_I,i       and so for texts: ĝ_T, u_T
        value    mean_i( −s_ii + ½ t·log u_I,i + ½ t·log u_T,i )
        gradient mean_i( −∇s_ii + ½ (t / u_I,i) ∇ĝ_I,i + ½ (t / u_T,i) ∇ĝ_T,i )

    Whatever shares the anchor's group, and with `eliminate` or `attract` its kin, is not in ĝ. State: u of each direction (`image.u`,
    `text.u`), and that of the two detectors. With γ = 1 it is the estimate of the batch.

    Args:
        num_samples: N; ids are in [0, N).
        temperature: t, constant.
        gamma: γ at its end, the weight of the new value.
        decay_epochs: epochs in which γ falls from 1 to `gamma` along a cosine; `set_progress` moves it. None: it is constant.
        detector, action, min_negatives, kin_weight, block_rows, gather: see `SogCLR`; the detector is copied for the second direction.

    Deviates from the paper in: the mean of the two directions, half of its sum; a constant, t times the logarithm of the number of
    negatives, is left out.

    Example:
        >>> import torch, kinfolk as kf
        >>> loss_fn = kf.BimodalSogCLR(num_samples=100)
        >>> round(loss_fn(torch.eye(4), torch.eye(4), torch.arange(4)).item(), 4)
        -1.0
    """

    def __init__(
        self,
        num_samples: int,
        temperature: float = 0.03,
        gamma: float = 0.2,
        decay_epochs: int | None = 18,
        **shared: Unpack[Shared],
    ) -> None:
        def make(each: Detector | None) -> SogCLR:
            return SogCLR(num_samples, temperature, gamma, **with_detector(shared, each))

        super().__init__(make, shared.get("detector"))
        self.num_samples, self.gamma, self.decay_epochs = num_samples, gamma, check_decay(decay_epochs)
        self.set_progress(0, 1)

    def set_progress(self, epoch: float, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self.image.gamma = self.text.gamma = cosine_gamma(self.gamma, int(epoch), self.decay_epochs)

    def __repr__(self) -> str:
        schedule = {"gamma": self.gamma, "decay_epochs": self.decay_epochs}
        return call("BimodalSogCLR", self.image, num_samples=self.num_samples, temperature=self.image.temperature, **schedule)
