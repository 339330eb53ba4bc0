"""A warm-up for any detector: it stays silent until the embedding has some meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from kinfolk.detectors.base import Detector, Found, Space
from kinfolk.kinship import Roles
from kinfolk.pairs import Block


class StartAt(Detector):
    """Wraps a detector: nobody is flagged before `epoch`, and its state does not move before `update_from`.

    Args:
        detector: the wrapped one.
        epoch: first epoch, counted from 0, in which kin are flagged. The wrapped detector's annealing begins with it.
        update_from: first epoch in which the state moves; None: `epoch`.
    """

    paper: ClassVar[str] = "Balmaseda et al., ICML 2025, section 4.3"

    def __init__(self, detector: Detector, epoch: int, update_from: int | None = None) -> None:
        super().__init__()
        if epoch < 0:
            raise ValueError(f"`epoch` (={epoch}) must be at least 0")
        if update_from is not None and not 0 <= update_from <= epoch:
            raise ValueError(f"`update_from` (={update_from}) must be in [0, {epoch}]: the state starts to move before kin are flagged")
        self.detector, self.start, self.update_from = detector, epoch, epoch if update_from is None else update_from

    @property
    def addresses(self) -> bool:  # type: ignore[override]
        return self.detector.addresses

    @property
    def leveled(self) -> bool:  # type: ignore[override]
        return self.detector.leveled

    @property
    def reads(self) -> str | None:  # type: ignore[override]
        return self.detector.reads

    @property
    def soft(self) -> bool:  # type: ignore[override]
        return self.detector.soft

    @property
    def own_weight(self) -> float | None:  # type: ignore[override]
        return self.detector.own_weight

    def find(self, block: Block) -> Found:
        if self.epoch < self.update_from:
            return Found((Roles(),))
        found = self.detector.find(block)
        return found if self.epoch >= self.start else Found((Roles(),), found.update)

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
        return self.detector.refreshed_at_end and self.epoch >= self.update_from

    @property
    def metrics(self) -> dict[str, float]:
        return self.detector.metrics

    def collect(self, ids: Tensor, anchors: Tensor, sound: Tensor | None = None) -> None:
        self.detector.collect(ids, anchors, sound)

    def due(self, epoch: int) -> bool:
        """A refresh that was due before `update_from` is made up for at `update_from`."""
        first = range(epoch + 1) if epoch == self.update_from else (epoch,)
        return epoch >= self.update_from and any(self.detector.due(each) for each in first)

    def silent_reason(self) -> str | None:
        if self.start >= self.num_epochs:
            return f"the detector starts in epoch {self.start}, counted from 0, of {self.num_epochs}; start it earlier"
        if self.detector.learns_first and self.update_from >= self.num_epochs - 1:
            return f"it learns only in the last of {self.num_epochs} epochs, and a first visit flags nothing; set an earlier `update_from`"
        return self.detector.silent_reason()

    def refresh(self, features: Tensor | None, progress: float) -> None:
        self.detector.refresh(features, progress)

    def on_metric(self, name: str, value: float) -> None:
        if self.epoch >= self.start:
            self.detector.on_metric(name, value - self.start if name == "epoch" else value)

    def set_loss_temperature(self, temperature: float) -> None:
        self.detector.set_loss_temperature(temperature)

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self.detector.set_progress(epoch, num_epochs)

    def __repr__(self) -> str:
        return f"StartAt({self.detector!r}, epoch={self.start}, update_from={self.update_from})"
