from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from kinfolk.data.open_source import open_source, typical_side


def test_the_shorter_side_of_most_images(tmp_path: Path) -> None:
    for name, size in {"a": (300, 200), "b": (200, 250), "c": (90, 900), "d": (201, 400)}.items():
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    assert typical_side(open_source(tmp_path)) == 200


def test_arrays_have_one_size() -> None:
    assert typical_side(open_source(np.zeros((4, 20, 30, 3), np.uint8))) == 20


def test_unreadable_images_have_no_typical_size(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no image")
    assert typical_side(open_source(tmp_path)) is None
