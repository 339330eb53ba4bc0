"""IR, instance discrimination: Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination, CVPR 2018; the loss is
equation 3 of Wu et al., Conditional Negative Sampling for Contrastive Learning of Visual Representations, ICLR 2021.

Dimension key: B batch, D embedding, N data set, K drawn candidates.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from kinfolk.actions import Action
from kinfolk.detectors.base import Detector
from kinfolk.frameworks.base import Framework
from kinfolk.models.heads import embedding_size
from kinfolk.objectives import NTXent
from kinfolk.pairs import Pairs
from kinfolk.stores import Bank


class IR(Framework):
    """One view of each sample against a bank with the last embedding of every sample.

        loss_i = −z_i·v_i / t + log( exp(z_i·v_i / t) + Σ_{j drawn, j ≠ i} w_ij exp(z_i·v_j / t) )

    v are the bank's entries, of before the step; then z of all ranks is written to it, in training, and only if the loss is finite. The
    own entry is the positive and never a negative.

    Args:
        encoder, head: see `Framework`.
        num_samples: N.
        num_negatives: K entries drawn anew at random in every step, without replacement; the whole bank where it holds no more, or
            with None.
        bank_momentum: m of the bank, see `Bank`; 0 overwrites.
        temperature, detector, action, min_negatives, kin_weight, block_rows: see `NTXent`.

    State: the bank, the number of draws and their seed, and the detector's. The draw is a function of both, so it is the same on every
    rank and after a resume.

    Deviates from the paper in: InfoNCE over the drawn entries, as in equation 3, where the first paper estimates by noise contrast; the
    draw is shared by the batch, where the published code draws for each anchor with replacement (the expectation is the same, and one
    matrix product serves all anchors). Of the K drawn entries an anchor's own is left out, where it is among them.
    """

    paper: ClassVar[str] = "Wu et al., CVPR 2018"
    needs: ClassVar[str] = "one vector per sample"
    num_views: ClassVar[int] = 1

    drawn: Tensor
    seed: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        num_samples: int,
        num_negatives: int | None = 4096,
        bank_momentum: float = 0.5,
        temperature: float = 0.07,
        detector: Detector | None = None,
        action: Action = "eliminate",
        min_negatives: int = 1,
        kin_weight: float = 0.5,
        block_rows: int | None = None,
    ) -> None:
        super().__init__(encoder, head, NTXent(temperature, detector, action, min_negatives, block_rows=block_rows, kin_weight=kin_weight))
        if num_negatives is not None and num_negatives < 1:
            raise ValueError(f"`num_negatives` (={num_negatives}) must be at least 1")
        self.num_negatives = num_negatives
        self.bank = Bank(num_samples, embedding_size(encoder, head), bank_momentum)
        self.register_buffer("drawn", torch.tensor(0))
        self.register_buffer("seed", torch.randint(1 << 62, ()))  # DDP hands rank zero's to all

    @property
    def known_features(self) -> Tensor:
        return self.bank.features

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        ids = ids.to(views.device, torch.int64)
        z: Tensor = self.head(self.encoder(views[0]))
        candidates, candidate_ids = self._candidates()
        loss = self.objective.on(Pairs(z, candidates, self.bank.read(ids).unsqueeze(1), ids, candidate_ids))
        if self.training and bool(loss.detach().isfinite()):  # the loss of the joined batch: all ranks agree
            self.bank.write(ids, z)
            self.drawn += 1
        return loss

    def _candidates(self) -> tuple[Tensor, Tensor]:
        """(K, D) the entries of this step and (K,) whose they are."""
        number, device = self.bank.num_samples, self.bank.features.device
        if self.num_negatives is None or self.num_negatives >= number:
            return self.bank.features, torch.arange(number, device=device)
        generator = torch.Generator().manual_seed(int(self.seed ^ self.drawn))
        chosen = torch.randperm(number, generator=generator)[: self.num_negatives].to(device)
        return self.bank.features[chosen], chosen
