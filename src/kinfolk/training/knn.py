"""Nearest-neighbour accuracy during training: how well the encoder's features separate the labels, with nothing trained on them."""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.data.images import ImageData
from kinfolk.data.seeding import generator
from kinfolk.data.views import Views
from kinfolk.errors import UsageError
from kinfolk.evaluation.clusters import nmi
from kinfolk.evaluation.embed import embed
from kinfolk.evaluation.knn import knn_accuracy
from kinfolk.frameworks.base import Framework
from kinfolk.training.module import TrainingModule
from kinfolk.training.sections import KnnConfig

TEST_SPLITS = ("test", "val")


class Knn:
    """A measurement of the journal: `knn`, every so many epochs and after the last one; and of the same features, where it is wanted,
    `features_nmi` with `features_nmi_deviation`: how well k-means, with as many clusters as classes, finds the labels, over several seeds.

    Classified are the validation or test samples by the training samples; where there are none of them, the training samples by each other.
    Nothing is measured without labels.
    """

    def __init__(self, data: ImageData, views: Views, config: KnnConfig, *, epochs: int, seed: int, autocast: torch.dtype | None) -> None:
        self.data, self.views, self.config, self.epochs, self.autocast = data, views, config, epochs, autocast
        self.bank, self.queries = _parts(data, config.max_samples, seed)

    def __call__(self, module: TrainingModule, epoch: int) -> dict[str, float]:
        every = self.config.every
        if self.bank is None or every == 0 or (epoch % every and epoch != self.epochs):
            return {}
        assert self.data.labels is not None
        ids = self.bank if self.queries is None else torch.cat((self.bank, self.queries))
        features = embed(module.framework, self.data, self.views, ids, device=module.device, autocast=self.autocast)
        module.require_finite(features, "features")
        labels, size = self.data.labels[ids], len(self.bank)
        test_x, test_y = (None, None) if self.queries is None else (features[size:], labels[size:])
        found = {"knn": knn_accuracy(features[:size], labels[:size], test_x, test_y, self.config.k, self.config.temperature)}
        if self.config.nmi_seeds:
            spread = nmi(features[:size], labels[:size], seeds=range(self.config.nmi_seeds))
            found |= {"features_nmi": spread.mean, "features_nmi_deviation": spread.deviation}
        return found


def require_measured(framework: Framework, knn: Knn, method: str) -> None:
    """Refuses a method that goes by the accuracy in a training where it is never measured."""
    if any("knn" in detector.hears for detector in framework.detectors) and (knn.bank is None or knn.config.every == 0):
        what = "`knn.every` (=0) must be at least 1" if knn.config.every == 0 else "the data must have labels"
        raise UsageError(f"{what}: {method} goes by the nearest-neighbour accuracy during training")


def _parts(data: ImageData, max_samples: int, seed: int) -> tuple[Tensor | None, Tensor | None]:
    """Ids of the labelled training samples, and of the labelled samples of the first other split there is; each image once."""
    if data.labels is None:
        return None, None
    labelled = data.labels >= 0
    bank = data.once(labelled[: data.num_train].nonzero()[:, 0])
    if len(bank) < 2:
        return None, None
    bank = _drawn(bank, max_samples, seed, "bank")
    for split in TEST_SPLITS:
        ids = torch.from_numpy(data.samples.rows_of(split))
        ids = ids[labelled[ids]]
        if len(ids):
            return bank, _drawn(data.once(ids), max_samples, seed, "queries")
    return bank, None


def _drawn(ids: Tensor, limit: int, seed: int, what: str) -> Tensor:
    """At most `limit` of the ids, at random: samples are often sorted by class."""
    if len(ids) <= limit:
        return ids
    return ids[torch.randperm(len(ids), generator=generator(seed, "knn", what))[:limit].sort().values]
