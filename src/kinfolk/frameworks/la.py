"""LA, local aggregation: Zhuang et al., Local Aggregation for Unsupervised Learning of Visual Embeddings, ICCV 2019, section 3.

Dimension key: B batch, D embedding, N data set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from kinfolk.detectors import Neighbours, StartAt
from kinfolk.frameworks.base import Framework
from kinfolk.models.heads import embedding_size
from kinfolk.objectives import LocalAggregation
from kinfolk.objectives.base import Shared
from kinfolk.pairs import Pairs, integer_ids
from kinfolk.stores import Bank
from kinfolk.stores.per_sample import finite


class LA(Framework):
    """Contrasts one view of each sample with a bank of all samples, and attracts close neighbours relative to the near background.

    The loss is `LocalAggregation`. The bank is that of `IR`: the entry of the anchor's own sample is the positive and never a negative. All
    entries are candidates. The detector `Neighbours` finds both sets: close neighbours C_i share the anchor's k-means cluster in any of
    several clusterings of the bank, refreshed every epoch, and the background B_i are the entries nearest to the anchor. With another
    detector, its kin are the close neighbours, and all candidates that it does not drop are the background: `la+oracle:attract` contrasts
    the samples of the anchor's class with the whole bank. With "eliminate" and "reweight", kin are not attracted but removed from the
    background or given less weight; this equals `IR` with the whole bank and that detector.

    Args:
        encoder, head: see `Framework`.
        num_samples: N.
        num_background: size of B_i. None means the whole bank. This and the next three arguments apply only to `Neighbours`.
        num_clusters: clusters of each clustering. None means one for every 43 samples.
        num_clusterings: number of clusterings that are combined.
        warmup_epochs: epochs of instance discrimination (`IR` with the whole bank) at the start, because the first entries of the bank are
            random.
        bank_momentum: m of the bank, see `Bank`. 0 overwrites.
        temperature, min_negatives, kin_weight, block_rows: see `LocalAggregation`.
        detector, action: None means `Neighbours` with "attract".

    State: the bank and the state of the detector.
    """

    paper: ClassVar[str] = "Zhuang et al., ICCV 2019"
    needs: ClassVar[str] = "one vector per sample; clusters, refreshed each epoch"
    num_views: ClassVar[int] = 1
    refused: ClassVar[Mapping[str, str]] = LocalAggregation.refused

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
        **shared: Unpack[Shared],
    ) -> None:
        if shared.get("detector") is None:
            if warmup_epochs < 0:
                raise ValueError(f"`warmup_epochs` (={warmup_epochs}) must be at least 0")
            shared["detector"] = StartAt(Neighbours(num_samples, num_clusters, num_clusterings, num_background), epoch=warmup_epochs)
            shared["action"] = "attract"
        objective = LocalAggregation(temperature, **shared)
        super().__init__(encoder, head, objective)
        self.bank = Bank(num_samples, embedding_size(encoder, head), bank_momentum)

    @property
    def known_features(self) -> Tensor | None:
        return self.bank.features if self.bank.complete else None

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        ids = integer_ids(ids, views.device)
        z: Tensor = self.head(self.encoder(views[0]))
        all_ids = torch.arange(self.bank.num_samples, device=ids.device)
        pairs = Pairs(z, self.bank.features, self.bank.read(ids).unsqueeze(1), ids, all_ids, unit_candidates=True)
        loss = self.objective.on(pairs)
        if self.training:
            sound = finite(loss)  # of the joined batch, so all ranks agree
            self.bank.write(ids, z, sound)
        return loss
