"""Detectors that wrap another one: everything but the answer of `find` is that of the wrapped detector.

Dimension key: R rows of a block, C candidates.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from kinfolk.detectors.base import Detector, Found, Space
from kinfolk.kinship import Form, Mask, Roles
from kinfolk.pairs import LEFT_OUT, Block


class Wrapped(Detector, ABC):
    """Abstract. A detector that changes the answer of another one.

    Args:
        detector: the wrapped detector.
    """

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    @property
    def addresses(self) -> bool:  # type: ignore[override]
        return self.detector.addresses

    @property
    def space(self) -> Space:  # type: ignore[override]
        return self.detector.space

    @property
    def wanted_metrics(self) -> frozenset[str]:  # type: ignore[override]
        return self.detector.wanted_metrics

    @property
    def collects(self) -> bool:  # type: ignore[override]
        return self.detector.collects

    @property
    def learns_first(self) -> bool:  # type: ignore[override]
        return self.detector.learns_first

    @property
    def refreshed_at_end(self) -> bool:  # type: ignore[override]
        return self.detector.refreshed_at_end

    @property
    def reads(self) -> str | None:  # type: ignore[override]
        return self.detector.reads

    @property
    def soft(self) -> bool:  # type: ignore[override]
        return self.detector.soft

    @property
    def own_weight(self) -> float | None:  # type: ignore[override]
        return self.detector.own_weight

    @property
    def metrics(self) -> dict[str, float]:
        return self.detector.metrics

    def observe(self, ids: Tensor, update: Mapping[str, Tensor], sound: Tensor | None = None) -> None:
        self.detector.observe(ids, update, sound)

    def collect(self, ids: Tensor, anchors: Tensor, sound: Tensor | None = None) -> None:
        self.detector.collect(ids, anchors, sound)

    def due(self, epoch: int) -> bool:
        return self.detector.due(epoch)

    def silent_reason(self) -> str | None:
        return self.detector.silent_reason()

    def refresh(self, features: Tensor | None, progress: float) -> None:
        self.detector.refresh(features, progress)

    def on_metric(self, name: str, value: float) -> None:
        self.detector.on_metric(name, value)

    def set_loss_temperature(self, temperature: float) -> None:
        self.detector.set_loss_temperature(temperature)

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self.detector.set_progress(epoch, num_epochs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.detector!r})"


def unwrapped(detector: Detector | None) -> Detector | None:
    """The detector inside of any number of wrappers."""
    while isinstance(detector, Wrapped):
        detector = detector.detector
    return detector


class Elsewhere(Wrapped):
    """The wrapped detector goes by the embeddings that `Pairs` has as its guide, one for each anchor, instead of those that are contrasted.

    For a second head: its attraction follows what the first one finds similar."""

    paper: ClassVar[str] = "Zheng et al., ICCV 2021"

    @torch.no_grad()
    def find(self, block: Block) -> Found:
        if block.guide_bG is None or block.guide_CG is None:  # the embeddings of the first head are contrasted themselves
            return self.detector.find(block)
        sim_RC = (block.guide_bG @ block.guide_CG.T).masked_fill_(block.sim_RC < -2, LEFT_OUT)
        there = replace(block, sim_RC=sim_RC, guide_bG=None, guide_CG=None, candidates_CD=block.guide_CG)
        found = self.detector.find(there)
        moved = tuple(Roles(_moved(roles.kin, sim_RC), _moved(roles.drop, sim_RC)) for roles in found.levels)
        return Found(moved, found.update)


def _moved(form: Form | None, sim_RC: Tensor) -> Form | None:
    """The same candidates and degrees, whatever the similarities they are applied to."""
    if form is None:
        return None
    return Mask(form.mask(sim_RC), form.degree(sim_RC) if form.graded else None)
