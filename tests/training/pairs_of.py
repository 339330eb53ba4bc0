"""Pictures with captions for the tests, and a framework that learns from them with a loss of a few lines."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image
from torch import Tensor, nn

from kinfolk.actions import Action
from kinfolk.detectors.base import Detector
from kinfolk.frameworks.image_text import ImageText
from kinfolk.objectives import NTXent
from kinfolk.pairs import Pairs

COLOURS = {"red": (220, 30, 30), "green": (30, 220, 30), "blue": (30, 30, 220), "white": (230, 230, 230)}
SMALL = {
    "model.name": "resnet10",
    "model.width": 8,
    "views.preset": "clip",
    "views.size": 16,
    "head.layers": 1,
    "head.out_size": 16,
    "text.layers": 1,
    "text.width": 16,
    "text.heads": 2,
    "text.context": 12,
    "text.vocab_size": 300,
    "optimizer.name": "adamw",
    "optimizer.lr": 0.003,
    "optimizer.lr_scaling": "none",
    "trainer.precision": "32",
    "knn.every": 0,
}


def write_pairs(root: Path, count: int, captions: int = 2) -> Path:
    """A table of `count` pictures, each of one colour with a bright corner, with `captions` rows each; a quarter is for testing."""
    random = np.random.default_rng(0)
    rows = []
    for number in range(count):
        name = list(COLOURS)[number % 4]
        pixels = np.clip(np.array(COLOURS[name]) + random.integers(-20, 21, (16, 16, 3)), 0, 255).astype(np.uint8)
        pixels[: 4 + number % 9, : 4 + number % 7] = 128
        root.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(root / f"{number}.png")
        split = "test" if number % 4 == number // 4 % 4 else "train"
        rows += [(f"{number}.png", f"{('a', 'the')[k % 2]} {name} wall number {number}", split) for k in range(captions)]
    with open(root / "pairs.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("image", "caption", "split"), *rows])
    return root / "pairs.csv"


class PairLoss(NTXent):
    """Both directions, in one process."""

    def forward(self, z1: Tensor, z2: Tensor, ids: Tensor | None = None, groups: Tensor | None = None) -> Tensor:
        assert ids is not None
        one, other = (Pairs(a, b, b.unsqueeze(1), ids, ids, 1, groups, groups) for a, b in ((z1, z2), (z2, z1)))
        return (self.on(one) + self.on(other)) / 2


class ToyPair(ImageText):
    """Two towers with a constant temperature."""

    paper: ClassVar[str] = "none"

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        text_encoder: nn.Module,
        text_head: nn.Module,
        temperature: float = 0.1,
        known_groups: bool = True,
        detector: Detector | None = None,
        action: Action = "eliminate",
    ) -> None:
        super().__init__(encoder, head, text_encoder, text_head, PairLoss(temperature, detector, action), known_groups)

    @property
    def figures(self) -> dict[str, float]:
        return {"temperature": self.objective.temperature}
