"""LA, local aggregation: Zhuang et al., Local Aggregation for Unsupervised Learning of Visual Embeddings, ICCV 2019, section 3.

Dimension key: B batch, D embedding, N data set.
"""

from __future__ import annotations

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
    """One view of each sample against a bank of all samples: close neighbours are drawn in, of the background that is near.

    The loss is `LocalAggregation`; the bank is as in `IR`, the own entry is the positive and never a negative, and candidates are all
    entries. Close neighbours C_i share the anchor's k-means cluster in any of several clusterings of the bank, refreshed every epoch;
    the background B_i are the entries nearest to the anchor: `Neighbours`. With another detector, its kin are the close neighbours and what
    it does not drop is the background: `la+oracle:attract` has the samples of the anchor's class against the whole bank. With "eliminate"
    and "reweight" kin are not drawn in, but leave the background or count less there; this is `IR` with the whole bank and that detector.

    Args:
        encoder, head: see `Framework`.
        num_samples: N.
        num_background: size of B_i; None: the whole bank. This and the next three belong to `Neighbours`; another detector has its own.
        num_clusters: of each clustering; None: one for every 43 samples.
        num_clusterings: how many clusterings are united.
        warmup_epochs: the first epochs are instance discrimination (`IR` with the whole bank): the bank's first entries are random, and so
            would be their clusters.
        bank_momentum: m of the bank, see `Bank`; 0 overwrites.
        temperature, min_negatives, kin_weight, block_rows: see `LocalAggregation`.
        detector, action: None: `Neighbours`, attracted.

    State: the bank and the detector's.
    """

    paper: ClassVar[str] = "Zhuang et al., ICCV 2019"
    needs: ClassVar[str] = "one vector per sample; clusters, refreshed each epoch"
    num_views: ClassVar[int] = 1

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
        everybody = torch.arange(self.bank.num_samples, device=ids.device)
        pairs = Pairs(z, self.bank.features, self.bank.read(ids).unsqueeze(1), ids, everybody, unit_candidates=True)
        loss = self.objective.on(pairs)
        if self.training:
            sound = finite(loss)  # the loss of the joined batch: all ranks agree
            self.bank.write(ids, z, sound)
        return loss
