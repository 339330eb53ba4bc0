"""CMC: Tian et al., Contrastive Multiview Coding, ECCV 2020, with lightness and colour as the two views, in the form of Wu et al.,
Conditional Negative Sampling for Contrastive Learning of Visual Representations, ICLR 2021, section 2: the sum of two
instance-discrimination losses (their equation 3) with the banks swapped.

Dimension key: V views, B batch, D embedding of one part, N data set, K drawn candidates.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from kinfolk.frameworks.base import Framework
from kinfolk.frameworks.ir import bank_objective
from kinfolk.models.heads import embedding_size
from kinfolk.objectives import Objective
from kinfolk.objectives.debiased import Estimate
from kinfolk.pairs import Pairs, integer_ids
from kinfolk.stores import Bank, Draw
from kinfolk.stores.per_sample import finite


class CMC(Framework):
    """Contrasts the lightness of an image with a bank of colours, and its colours with a bank of lightness.

        loss = Σ_{(x, Y) = (L, bank of ab), (ab, bank of L)} mean_i l_i(x, Y)
        l_i(x, Y) = −x_i·Y_i / t + log( exp(x_i·Y_i / t) + Σ_{j drawn, j ≠ i} w_ij exp(x_i·Y_j / t) )

    x_i is the unit-norm embedding of part x of sample i, and Y is the bank of the other part before the step. Then both parts of all ranks
    are written to their banks, but only if the loss is finite. The entry of the anchor's own sample is the positive and never a negative.
    One view is augmented in RGB and converted to CIE Lab; its two parts are contrasted. The detector is copied, so that each direction has
    its own state.

    Args:
        encoder, head: (B, 3, H, W) → (B, F) → (B, 2D), where the first half embeds L and the second ab: a `SplitEncoder` with
            channels (1, 2) and a `SplitHead`. The joined features of both are evaluated and exported.
        num_samples: N.
        num_negatives: K entries drawn at random in every step, without replacement, the same for both banks. The whole banks are used if
            they have no more entries, or with None.
        bank_momentum: m of both banks, see `Bank`. 0 overwrites.
        temperature, detector, action, min_negatives, kin_weight, block_rows, prior, hardness, decoupled: see `NTXent`.
        pool_kin: whether attracted kin are summed inside the logarithm; see `IR`.

    State: both banks, the draw, and the state of both detectors.

    Deviates from the paper in: the loss is InfoNCE over the drawn entries, while the code of the first paper uses noise-contrastive
    estimation; the draw is shared by the batch, as in `IR`.
    """

    paper: ClassVar[str] = "Tian et al., ECCV 2020"
    needs: ClassVar[str] = "colour images; two encoders, two vectors per sample"
    num_views: ClassVar[int] = 1
    channels: ClassVar[tuple[int, ...]] = (1, 2)
    view_options: ClassVar[Mapping[str, object]] = {"space": "lab"}

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
        first: Estimate = {"action": "eliminate", **shared}
        second: Estimate = {**first, "detector": copy.deepcopy(first.get("detector"))}
        light, colour = (bank_objective(temperature, pool_kin, given) for given in (first, second))
        super().__init__(encoder, head, light)
        size = embedding_size(encoder, head)
        if size % 2:
            raise ValueError(f"`head` (={size} outputs) must have an even number of outputs: half of them embed lightness, half colour")
        self.colour_objective = colour
        self.light_bank, self.colour_bank = (Bank(num_samples, size // 2, bank_momentum, seed) for seed in (0, 1))
        self.draw = Draw(num_samples, num_negatives)

    @property
    def objectives(self) -> tuple[Objective, ...]:
        return self.objective, self.colour_objective

    @property
    def known_features(self) -> Tensor | None:
        return _joined(self.light_bank.features, self.colour_bank.features) if self.light_bank.complete else None

    def embed(self, images: Tensor) -> Tensor:
        """(B, 2D) joined embeddings of both parts, of unit norm."""
        light, colour = (F.normalize(part, dim=-1) for part in self.head(self.features(images)).chunk(2, -1))
        return _joined(light, colour)

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        ids = integer_ids(ids, views.device)
        light, colour = self.head(self.encoder(views[0])).chunk(2, -1)
        chosen = self.draw.ids(ids.device)
        embedded = _joined(*(F.normalize(part.detach().float(), dim=-1) for part in (light, colour)))
        loss = self._one_direction(self.objective, light, self.colour_bank, ids, chosen, embedded)
        loss = loss + self._one_direction(self.colour_objective, colour, self.light_bank, ids, chosen, embedded)
        if self.training:
            sound = finite(loss)  # of the joined batch, so all ranks agree
            self.light_bank.write(ids, light, sound)
            self.colour_bank.write(ids, colour, sound)
            self.draw.advance(sound)
        return loss

    def _one_direction(self, objective: Objective, z: Tensor, bank: Bank, ids: Tensor, chosen: Tensor, embedded: Tensor) -> Tensor:
        """Loss of `z` (B, D) against the entries `chosen` (K,) of the bank of the other part. A detector that collects features receives
        `embedded` (B, 2D), in the same space as `embed`."""
        candidates = bank.features if self.draw.everything else bank.features[chosen]
        own = bank.read(ids).unsqueeze(1)
        return objective.on(Pairs(z, candidates, own, ids, chosen, unit_candidates=True, collected=embedded))


def _joined(light: Tensor, colour: Tensor) -> Tensor:
    """Joins two unit-norm parts into one unit-norm vector, whose cosine is the mean of the cosines of the parts."""
    return torch.cat((light, colour), -1) / math.sqrt(2)
