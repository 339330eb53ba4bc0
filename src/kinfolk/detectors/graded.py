"""Degrees of kinship for detectors whose answer is yes or no.

Dimension key: R rows of a block, C candidates, L levels of keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from kinfolk.detectors.base import Detector, Found, Space
from kinfolk.kinship import Interval, Keys, Mask, Roles
from kinfolk.pairs import Block


class Graded(Detector):
    """Wraps a detector: its kin are the same, and each has a degree, by which it is attracted or taken from the denominator.

        kin above a threshold (FNC, GloFND)         degree = (s − threshold) / (1 − threshold)
        kin by clusters (IFND, Neighbours, Ring)    degree = share of the levels or clusterings at which anchor and candidate agree
        kin with degrees of their own (Hierarchy)   these

    What a detector answers in other forms (Oracle, Known, a hard Guide) keeps the degree 1. Levels that would each be a loss of their own
    become one answer. `eliminate` knows no degrees, so there nothing changes but that.

    Args:
        detector: the wrapped one.

    Example:
        >>> from kinfolk.detectors.fnc import FNC
        >>> Graded(FNC(top_k=2))
        Graded(FNC(top_k=2))
    """

    paper: ClassVar[str] = "weighted attraction of any detector's kin"

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    @property
    def addresses(self) -> bool:  # type: ignore[override]
        return self.detector.addresses

    @torch.no_grad()
    def find(self, block: Block) -> Found:
        found = self.detector.find(block)
        return Found(tuple(graded(roles, block.sim_RC) for roles in joined(found.levels)), found.update)

    def observe(self, ids: Tensor, update: Mapping[str, Tensor], sound: Tensor | None = None) -> None:
        self.detector.observe(ids, update, sound)

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
        return f"Graded({self.detector!r})"


def joined(levels: Sequence[Roles]) -> tuple[Roles, ...]:
    """Levels that differ in their keys alone as one, whose keys they are; others as they are."""
    keys = [roles.kin for roles in levels]
    if len(levels) == 1 or any(not isinstance(each, Keys) or each.apart for each in keys) or any(roles.drop is not None for roles in levels):
        return tuple(levels)
    rows = torch.cat([each.key_LR if each.level is None else each.key_LR[[each.level]] for each in keys if isinstance(each, Keys)])
    columns = torch.cat([each.key_LC if each.level is None else each.key_LC[[each.level]] for each in keys if isinstance(each, Keys)])
    return (Roles(kin=Keys(rows, columns)),)


def graded(roles: Roles, sim_RC: Tensor) -> Roles:
    """The same kin with degrees, where something is known to make them of."""
    kin = roles.kin
    if isinstance(kin, Interval) and kin.lower_R is not None:
        lower_R1 = kin.lower_R.to(sim_RC.dtype).clamp(-1, 1).unsqueeze(1)
        width_R1 = (1 - lower_R1).clamp(min=torch.finfo(sim_RC.dtype).eps)
        return replace(roles, kin=Mask(kin.mask(sim_RC), ((sim_RC - lower_R1) / width_R1).clamp(0, 1)))
    if isinstance(kin, Keys) and kin.level is None and not kin.apart:
        return replace(roles, kin=replace(kin, graded=True))
    return roles
