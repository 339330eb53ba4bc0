"""Runs the protocols of one `kinfolk eval` call by name. Features are computed once and shared by
all protocols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kinfolk.embedding import Parts, own_normalisation, require_labels, take_parts
from kinfolk.evaluation import protocols, retrieval
from kinfolk.evaluation.gradient_training import FRACTIONS
from kinfolk.evaluation.probes import read_label_sets
from kinfolk.evaluation.protocols import read_results
from kinfolk.training.load_run import measure_kin

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kinfolk.data.augmentation.views import Views
    from kinfolk.data.images import ImageData
    from kinfolk.evaluation.detection import Normaliser
    from kinfolk.training.load_run import OpenedRun


@dataclass(frozen=True)
class Choices:
    """Options of the command line. None means the default of the protocol."""

    seed: int
    k: int
    temperature: float
    probe: str
    shares: Sequence[float] | None
    draws: int
    epochs: int | None
    metric: str | None
    num_clusters: int | None
    alpha: float | None
    label_sets: Path | None
    names: Sequence[str] | None
    sentences: Sequence[str]
    normaliser: Normaliser = "arithmetic"
    subsets: Sequence[Path] = ()
    finetuning: str = "ifnd"
    unpooled: bool = False
    own_mean: bool = False


class ProtocolRunner:
    """Runs protocols on one run and one data source. Shared inputs are computed on first use."""

    def __init__(
        self,
        opened: OpenedRun,
        images: ImageData,
        source: str | None,
        choices: Choices,
        towers: retrieval.Towers | None = None,
    ) -> None:
        self.opened, self.images, self.source, self.choices, self.towers = (
            opened,
            images,
            source,
            choices,
            towers,
        )

    def __call__(self, protocol: str) -> dict[str, Any]:
        """The result of a protocol with the data it was measured on. Results over several data sets
        name the data of each."""
        found = self._run(protocol)
        return found if "sets" in found else {**found, "data": self.source}

    def _run(self, protocol: str) -> dict[str, Any]:
        own, images = self.choices, self.images
        shares = own.shares or (
            () if own.subsets else FRACTIONS if protocol == "semi" else protocols.FINETUNED
        )
        if protocol == "knn":
            return {
                **protocols.run_knn(self.parts, own.k, own.temperature),
                **self._feature_options(),
            }
        if protocol == "linear":
            return {
                **protocols.run_linear(self.parts, own.seed, own.probe, progress=True),
                **self._feature_options(),
            }
        if protocol == "semi":
            some: Any = {
                "fractions": shares,
                "draws": own.draws,
                "lists": own.subsets,
                "keys": images.samples.keys,
            }
            return {
                **protocols.run_semi(self.parts, own.seed, own.probe, **some, progress=True),
                **self._feature_options(),
            }
        if protocol == "finetune":
            some = {
                "fractions": shares,
                "lists": own.subsets,
                "settings": own.finetuning,
                "epochs": own.epochs,
            }
            tuned = protocols.run_finetune(
                self.opened.encoder(),
                images,
                self.views,
                self.parts,
                own.seed,
                **some,
                progress=True,
            )
            return {**tuned, **self._feature_options(of_features=False)}
        if protocol == "transfer":
            before = read_results(self.opened.path).get("transfer")
            given = (self._transfer_parts(), own.seed, str(self.source), own.metric, before)
            return protocols.run_transfer(*given, how=self._feature_options(), progress=True)
        if protocol == "clusters":
            return {
                **protocols.run_clusters(self.parts, own.num_clusters, normaliser=own.normaliser),
                **self._feature_options(),
            }
        if protocol == "kin":
            return measure_kin(self.opened, images, own.seed, alpha=own.alpha, progress=True)
        assert self.towers is not None, "opened before any image was read"
        if protocol == "sts":
            return retrieval.run_sts(self.towers, images)
        if protocol == "retrieval" and images.texts is not None:
            return retrieval.run_pair_retrieval(self.towers, images, own.seed)
        if protocol == "retrieval":
            return retrieval.run_retrieval(self.towers, images, progress=True)
        return retrieval.run_zero_shot(
            self.towers, images, classes=own.names, templates=own.sentences, progress=True
        )

    def _feature_options(self, of_features: bool = True) -> dict[str, str]:
        """Entries of the result about features that are not the default."""
        unpooled = {"features": "before pooling"} if self.choices.unpooled and of_features else {}
        return unpooled | (
            {"normalised_by": "the data's own mean"} if self.choices.own_mean else {}
        )

    @cached_property
    def views(self) -> Views:
        """The views of the run. With `own_mean`, normalised by the training split of the data, or
        by all samples if it has none."""
        views, num = self.opened.views(), self.images.num_train or len(self.images)
        return (
            own_normalisation(self.images, views, torch.arange(num))
            if self.choices.own_mean
            else views
        )

    @cached_property
    def features(self) -> NDArray[np.float32]:
        """(N, F) features of all samples."""
        return self.opened.features(
            self.images, views=self.views, unpooled=self.choices.unpooled, progress=True
        )

    @cached_property
    def parts(self) -> Parts:
        """Labelled features by split. Data without labels is an error before anything is
        embedded."""
        require_labels(self.images.samples.labels)
        return take_parts(self.images, self.features)

    def _transfer_parts(self) -> Parts:
        if self.choices.label_sets is None:
            return self.parts
        sets, _ = read_label_sets(self.choices.label_sets, self.images.samples.keys)
        return take_parts(self.images, self.features, sets)
