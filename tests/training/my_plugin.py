"""A plugin for the tests: a detector of its own, registered under a name."""

from __future__ import annotations

from typing import ClassVar

from kinfolk.detectors.base import Detector
from kinfolk.pairs import Block, Kin
from kinfolk.plugins import register_detector


class Nearest(Detector):
    """Flags candidates above a fixed similarity."""

    paper: ClassVar[str] = "none"

    def __init__(self, threshold: float = 0.5) -> None:
        super().__init__()
        self.threshold = threshold

    def find(self, block: Block) -> Kin:
        return Kin(block.sim_RC > self.threshold)


register_detector("nearest_of_test", Nearest)
