"""Images with captions for the tests, and settings of a small training on them."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 220, 30),
    "blue": (30, 30, 220),
    "white": (230, 230, 230),
}
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
    """A table of `count` images, each of one colour with a bright corner, with `captions` rows
    each; a quarter is for testing."""
    random = np.random.default_rng(0)
    rows = []
    for number in range(count):
        name = list(COLOURS)[number % 4]
        pixels = np.clip(
            np.array(COLOURS[name]) + random.integers(-20, 21, (16, 16, 3)), 0, 255
        ).astype(np.uint8)
        pixels[: 4 + number % 9, : 4 + number % 7] = 128
        root.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(root / f"{number}.png")
        split = "test" if number % 4 == number // 4 % 4 else "train"
        rows += [
            (f"{number}.png", f"{('a', 'the')[k % 2]} {name} wall number {number}", split)
            for k in range(captions)
        ]
    with open(root / "pairs.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("image", "caption", "split"), *rows])
    return root / "pairs.csv"
