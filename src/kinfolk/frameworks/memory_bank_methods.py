"""Methods with a memory bank.

- IR, instance discrimination: Wu et al., CVPR 2018; the loss is equation 3 of Wu et al., ICLR 2021.
- CMC, contrastive multiview coding: Tian et al., ECCV 2020; the loss is that of the ICLR paper.
- LA, local aggregation: Zhuang et al., ICCV 2019, section 3.

Dimension key: V views, B batch, D embedding (of one part, for CMC), N data set, K drawn candidates.
"""

from __future__ import annotations

import copy
import math
from abc import ABC
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.detectors import Neighbours, StartAt
from kinfolk.errors import require, require_at_least
from kinfolk.frameworks.base import Framework
from kinfolk.models.heads import embedding_size
from kinfolk.objectives import LocalAggregationLoss, NTXentLoss, Objective
from kinfolk.pairs import Pairs, integer_ids, unit
from kinfolk.stores import Bank, Draw
from kinfolk.stores.per_sample import finite


class BankFramework(Framework, ABC):
    """Abstract. Contrasts one view of each sample with a bank, as it was before the step."""

    num_views: ClassVar[int] = 1

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        objective: Objective,
        num_samples: int,
        bank_momentum: float,
    ) -> None:
        super().__init__(encoder, head, objective)
        self.bank = Bank(num_samples, embedding_size(encoder, head), bank_momentum)
        self.draw: Draw | None = None  # all entries are candidates

    @property
    def known_features(self) -> Tensor | None:
        return self.bank.features if self.bank.complete else None

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        ids = integer_ids(ids, views.device)
        z: Tensor = self.head(self.encoder(views[0]))
        loss = self.objective.on(bank_pairs(z, self.bank, ids, self.draw))
        if self.training:
            is_finite = finite(loss)  # of the global batch, so all ranks agree
            self.bank.write(ids, z, is_finite)
            if self.draw is not None:
                self.draw.advance(is_finite)
        return loss


def bank_pairs(
    z: Tensor, bank: Bank, ids: Tensor, draw: Draw | None, collected: Tensor | None = None
) -> Pairs:
    """Pairs of `z` (B, D) and the drawn entries of a bank, or all."""
    positives, candidates = unit(bank.read(ids)).unsqueeze(1), bank.features
    if draw is None:
        chosen = torch.arange(bank.num_samples, device=ids.device)
    else:
        chosen = draw.ids(ids.device)
        candidates = candidates if draw.everything else candidates[chosen]
    return Pairs(unit(z), candidates, positives, ids, chosen, unit=True, collected=collected)


class IR(BankFramework):
    """Contrasts one view of each sample with a bank of the last embeddings v of all samples.

    loss_i = −z_i·v_i / t + log( exp(z_i·v_i / t) + Σ_{j drawn, j ≠ i} w_ij exp(z_i·v_j / t) )
    """

    paper: ClassVar[str] = "Wu et al., CVPR 2018"
    loss_kind = NTXentLoss
    needs: ClassVar[str] = "one vector per sample"
    draw: Draw

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        num_samples: int,
        num_negatives: int | None = 4096,
        bank_momentum: float = 0.5,
        temperature: float = 0.07,
        pool_kin: bool = False,
        **given: Any,
    ) -> None:
        objective = bank_objective(temperature, pool_kin, given)
        super().__init__(encoder, head, objective, num_samples, bank_momentum)
        self.draw = Draw(num_samples, num_negatives)


def bank_objective(temperature: float, pool_kin: bool, given: dict[str, Any]) -> Objective:
    given = {"action": "eliminate", **given}
    if pool_kin:
        unset = [name for name in LocalAggregationLoss.refused if not given.get(name)]
        kept = {name: value for name, value in given.items() if name not in unset}
        return LocalAggregationLoss(temperature=temperature, **kept)
    return NTXentLoss(temperature=temperature, **given)


class CMC(Framework):
    """Contrasts the lightness of an image with a bank of colours, and its colours with a bank of
    lightness.

        loss = Σ_{(x, Y) = (L, bank of ab), (ab, bank of L)} mean_i l_i(x, Y)
        l_i(x, Y) = −x_i·Y_i / t + log( exp(x_i·Y_i / t) + Σ_{j drawn, ≠ i} w_ij exp(x_i·Y_j / t) )

    x_i is the embedding of part x of sample i (one view in CIE Lab), Y the bank of the other part.

    Args:
        encoder, head: a `SplitEncoder` with channels (1, 2), and a `SplitHead` that returns (B,
            2D).
    """

    paper: ClassVar[str] = "Tian et al., ECCV 2020"
    loss_kind = NTXentLoss
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
        **given: Any,
    ) -> None:
        second = {**given, "detector": copy.deepcopy(given.get("detector"))}
        light, colour = (bank_objective(temperature, pool_kin, each) for each in (given, second))
        super().__init__(encoder, head, light)
        size = embedding_size(encoder, head)
        must = "of an even number of outputs: half of them embed lightness, half colour"
        require(size % 2 == 0, "head", size, must)
        self.colour_objective = colour
        self.light_bank, self.colour_bank = (
            Bank(num_samples, size // 2, bank_momentum, seed) for seed in (0, 1)
        )
        self.draw = Draw(num_samples, num_negatives)

    @property
    def objectives(self) -> tuple[Objective, ...]:
        return self.objective, self.colour_objective

    @property
    def known_features(self) -> Tensor | None:
        if not self.light_bank.complete:
            return None
        return _join(self.light_bank.features, self.colour_bank.features)

    def embed(self, images: Tensor) -> Tensor:
        """(B, 2D) joined embeddings, of unit norm."""
        parts = self.head(self.features(images)).chunk(2, -1)
        return _join(*(F.normalize(part, dim=-1) for part in parts))

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        ids = integer_ids(ids, views.device)
        light, colour = self.head(self.encoder(views[0])).chunk(2, -1)
        embedded = _join(*(F.normalize(part.detach().float(), dim=-1) for part in (light, colour)))
        # a detector that collects features receives them in the space of `embed`
        given = (ids, self.draw, embedded)
        loss = self.objective.on(bank_pairs(light, self.colour_bank, *given))
        loss = loss + self.colour_objective.on(bank_pairs(colour, self.light_bank, *given))
        if self.training:
            is_finite = finite(loss)  # of the global batch, so all ranks agree
            self.light_bank.write(ids, light, is_finite)
            self.colour_bank.write(ids, colour, is_finite)
            self.draw.advance(is_finite)
        return loss


def _join(light: Tensor, colour: Tensor) -> Tensor:
    """Unit-norm vectors, whose cosine is the mean of those of the parts."""
    return torch.cat((light, colour), -1) / math.sqrt(2)


class LA(BankFramework):
    """Contrasts one view of each sample with a bank of all samples, and attracts close neighbours
    relative to the near background (`LocalAggregationLoss`). The detector, by default `Neighbours`,
    finds both."""

    paper: ClassVar[str] = "Zhuang et al., ICCV 2019"
    loss_kind = LocalAggregationLoss
    needs: ClassVar[str] = "one vector per sample; clusters, refreshed each epoch"
    refused: ClassVar[Mapping[str, str]] = LocalAggregationLoss.refused

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        num_samples: int,
        num_background: int | None = 4096,
        num_clusters: int | None = None,
        num_clusterings: int = 10,
        warmup_epochs: int = 10,
        bank_momentum: float = 0.5,
        temperature: float = 0.07,
        **given: Any,
    ) -> None:
        if given.get("detector") is None:
            require_at_least(0, warmup_epochs=warmup_epochs)
            neighbours = Neighbours(
                num_samples=num_samples,
                num_clusters=num_clusters,
                num_clusterings=num_clusterings,
                num_background=num_background,
            )
            given["detector"] = StartAt(neighbours, epoch=warmup_epochs)
            given["action"] = "attract"
        objective = LocalAggregationLoss(temperature=temperature, **given)
        super().__init__(encoder, head, objective, num_samples, bank_momentum)
