"""A warm-up for any detector: nothing is flagged until the embedding has some meaning."""

from __future__ import annotations

from typing import ClassVar

from kinfolk.detectors.base import Detector, Found
from kinfolk.detectors.wrapped import Wrapped
from kinfolk.kinship import Roles
from kinfolk.pairs import Block


class StartAt(Wrapped):
    """Wraps a detector: nothing is flagged before `epoch`, and its state does not change before `update_from`.

    Args:
        detector: the wrapped detector.
        epoch: first epoch, counted from 0, in which kin are flagged. The annealing of the wrapped detector begins with it.
        update_from: first epoch in which the state changes; None means `epoch`.
    """

    paper: ClassVar[str] = "Balmaseda et al., ICML 2025, section 4.3"

    def __init__(self, detector: Detector, epoch: int, update_from: int | None = None) -> None:
        super().__init__(detector)
        if epoch < 0:
            raise ValueError(f"`epoch` (={epoch}) must be at least 0")
        if update_from is not None and not 0 <= update_from <= epoch:
            raise ValueError(f"`update_from` (={update_from}) must be in [0, {epoch}]: the state starts to move before kin are flagged")
        self.start, self.update_from = epoch, epoch if update_from is None else update_from

    @property
    def leveled(self) -> bool:  # type: ignore[override]
        return self.detector.leveled

    @property
    def refreshed_at_end(self) -> bool:  # type: ignore[override]
        return self.detector.refreshed_at_end and self.epoch >= self.update_from

    def find(self, block: Block) -> Found:
        if self.epoch < self.update_from:
            return Found((Roles(),))
        found = self.detector.find(block)
        return found if self.epoch >= self.start else Found((Roles(),), found.update)

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

    def on_metric(self, name: str, value: float) -> None:
        if self.epoch >= self.start:
            self.detector.on_metric(name, value - self.start if name == "epoch" else value)

    def __repr__(self) -> str:
        return f"StartAt({self.detector!r}, epoch={self.start}, update_from={self.update_from})"
