"""IR, instance discrimination: Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination, CVPR 2018; the loss is
equation 3 of Wu et al., Conditional Negative Sampling for Contrastive Learning of Visual Representations, ICLR 2021.

Dimension key: B batch, D embedding, N data set, K drawn candidates.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from typing_extensions import Unpack

from kinfolk.frameworks.base import Framework
from kinfolk.models.heads import embedding_size
from kinfolk.objectives import LocalAggregation, NTXent, Objective
from kinfolk.objectives.debiased import Estimate, without_estimate
from kinfolk.pairs import Pairs, integer_ids
from kinfolk.stores import Bank
from kinfolk.stores.memory_bank import Draw
from kinfolk.stores.per_sample import finite


class IR(Framework):
    """Contrasts one view of each sample with a bank that has the last embedding of every sample.

        loss_i = −z_i·v_i / t + log( exp(z_i·v_i / t) + Σ_{j drawn, j ≠ i} w_ij exp(z_i·v_j / t) )

    v are the entries of the bank before the step. In training, z of all ranks is then written to the bank, but only if the loss is finite.
    The entry of the anchor's own sample is the positive and never a negative.

    Args:
        encoder, head: see `Framework`.
        num_samples: N.
        num_negatives: K entries drawn at random in every step, without replacement. The whole bank is used if it has no more entries, or
            with None.
        bank_momentum: m of the bank, see `Bank`. 0 overwrites.
        temperature, detector, action, min_negatives, kin_weight, block_rows, prior, hardness, decoupled: see `NTXent`.
        pool_kin: whether attracted kin are summed inside the logarithm, as in equation 5 of the Ring paper. The loss is then
            `LocalAggregation`, which is small if some of them are near. If False, each of them is a separate positive. Without attracted
            kin there is no difference.

    State: the bank, the draw, and the state of the detector.

    Deviates from the paper in: the loss is InfoNCE over the drawn entries, as in equation 3, while the first paper uses noise-contrastive
    estimation; the draw is shared by the batch, while the published code draws for each anchor with replacement (the expectation is the
    same, and one matrix product serves all anchors). The anchor's own entry is left out if it is drawn.
    """

    paper: ClassVar[str] = "Wu et al., CVPR 2018"
    needs: ClassVar[str] = "one vector per sample"
    num_views: ClassVar[int] = 1

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        num_samples: int,
        num_negatives: int | None = 4096,
        bank_momentum: float = 0.5,
        temperature: float = 0.07,
        pool_kin: bool = False,
        **shared: Unpack[Estimate],
    ) -> None:
        shared.setdefault("action", "eliminate")
        super().__init__(encoder, head, bank_objective(temperature, pool_kin, shared))
        self.bank = Bank(num_samples, embedding_size(encoder, head), bank_momentum)
        self.draw = Draw(num_samples, num_negatives)

    @property
    def known_features(self) -> Tensor | None:
        return self.bank.features if self.bank.complete else None

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        ids = integer_ids(ids, views.device)
        z: Tensor = self.head(self.encoder(views[0]))
        chosen = self.draw.ids(ids.device)
        candidates = self.bank.features if self.draw.everything else self.bank.features[chosen]
        loss = self.objective.on(Pairs(z, candidates, self.bank.read(ids).unsqueeze(1), ids, chosen, unit_candidates=True))
        if self.training:
            sound = finite(loss)  # of the joined batch, so all ranks agree
            self.bank.write(ids, z, sound)
            self.draw.advance(sound)
        return loss


def bank_objective(temperature: float, pool_kin: bool, given: Estimate) -> Objective:
    """The loss over entries of a bank: `LocalAggregation` if attracted kin are summed inside the logarithm, otherwise `NTXent`."""
    return LocalAggregation(temperature, **without_estimate(given)) if pool_kin else NTXent(temperature, **given)
