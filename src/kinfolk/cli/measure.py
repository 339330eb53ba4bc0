"""What `kinfolk eval` measures: each protocol by name, on features that are embedded once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinfolk.evaluation import paired, protocols, whole
from kinfolk.evaluation.label_sets import read_label_sets
from kinfolk.evaluation.parts import Parts, require_labels, take_parts
from kinfolk.evaluation.results import read_results
from kinfolk.evaluation.subsets import FRACTIONS
from kinfolk.training.restored import restore

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kinfolk.data.images import ImageData
    from kinfolk.training.opened import OpenedRun


@dataclass(frozen=True)
class Choices:
    """What the user chose; None: the protocol's own."""

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


class Measures:
    """The protocols of one call. Whatever several of them need is made when the first asks for it."""

    def __init__(
        self, opened: OpenedRun, images: ImageData, source: str | None, choices: Choices, towers: paired.Towers | None = None
    ) -> None:
        self.opened, self.images, self.source, self.choices, self.towers = opened, images, source, choices, towers

    def __call__(self, protocol: str) -> dict[str, Any]:
        """The result of a protocol, as it is written, with the data it was measured on; several data sets name their own."""
        found = self._measure(protocol)
        return found if "sets" in found else {**found, "data": self.source}

    def _measure(self, protocol: str) -> dict[str, Any]:
        own, images = self.choices, self.images
        if protocol == "knn":
            return protocols.run_knn(self.parts, own.k, own.temperature)
        if protocol == "linear":
            return protocols.run_linear(self.parts, own.seed, own.probe, progress=True)
        if protocol == "semi":
            shares = own.shares or FRACTIONS
            return protocols.run_semi(self.parts, own.seed, own.probe, fractions=shares, draws=own.draws, progress=True)
        if protocol == "finetune":
            encoder, views, shares = self.opened.encoder(), self.opened.views(), own.shares or whole.FINETUNED
            return whole.run_finetune(encoder, images, views, self.parts, own.seed, fractions=shares, epochs=own.epochs, progress=True)
        if protocol == "transfer":
            before = read_results(self.opened.path).get("transfer")
            return protocols.run_transfer(self._transferred(), own.seed, str(self.source), own.metric, before, progress=True)
        if protocol == "clusters":
            return protocols.run_clusters(self.parts, own.num_clusters)
        if protocol == "kin":
            framework = restore(self.opened.path, self.opened.config, images)
            return whole.run_kin(framework, images, self.opened.views(), own.seed, alpha=own.alpha, progress=True)
        assert self.towers is not None, "looked for before any picture was read"
        if protocol == "retrieval":
            return paired.run_retrieval(self.towers, images, progress=True)
        return paired.run_zero_shot(self.towers, images, classes=own.names, templates=own.sentences, progress=True)

    @cached_property
    def features(self) -> NDArray[np.float32]:
        """(N, F) of all samples."""
        return self.opened.features(self.images, progress=True)

    @cached_property
    def parts(self) -> Parts:
        """Labelled features by split; data without labels is refused before anything is embedded."""
        require_labels(self.images.samples.labels)
        return take_parts(self.images, self.features)

    def _transferred(self) -> Parts:
        if self.choices.label_sets is None:
            return self.parts
        sets, _ = read_label_sets(self.choices.label_sets, self.images.samples.keys)
        return take_parts(self.images, self.features, sets)
