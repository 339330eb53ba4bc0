"""`kf.load(run).preprocess` prepares images as `kf.embed` does, whatever their shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import kinfolk as kf
from kinfolk.errors import UsageError

SIZES = [(30, 50), (50, 30), (24, 24), (90, 140), (200, 70), (64, 20)]
SETTINGS: dict[str, Any] = {
    "model.name": "resnet10",
    "model.width": 4,
    "views.size": 16,
    "knn.every": 0,
}
SETTINGS |= {"trainer.loggers": []}


def photo(height: int, width: int, seed: int) -> Image.Image:
    """Smooth, and different in every place, so that a wrong crop shows."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("images")
    for number, size in enumerate(SIZES * 2):
        photo(*size, number).save(place / f"{number:02}.png")
    return place


def start(data: Any, out: Path) -> kf.Run:
    return kf.train(data, out, epochs=1, settings=SETTINGS, report=False, progress=False)


@pytest.fixture(scope="module")
def encoder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return kf.load(start(str(folder), tmp_path_factory.mktemp("runs") / "run"))


def agree(encoder: Any, prepared: torch.Tensor, expected: Any) -> None:
    with torch.no_grad():
        found = encoder(prepared)
    cosine = F.cosine_similarity(found.double(), torch.from_numpy(expected).double())
    torch.testing.assert_close(cosine, torch.ones_like(cosine), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["Pillow", "array", "tensor"])
def test_images_of_any_shape_agree(encoder: Any, folder: Path, kind: str) -> None:
    images: list[Any] = [Image.open(path) for path in sorted(folder.glob("*.png"))]
    if kind != "Pillow":
        images = [np.asarray(image) for image in images]
    if kind == "tensor":
        images = [torch.from_numpy(np.array(image)) for image in images]
    expected = kf.embed(encoder.run.path)
    agree(encoder, encoder.preprocess(images), expected)
    agree(encoder, encoder.preprocess(images[3]), expected[3:4])


def test_images_are_turned_by_their_tag(encoder: Any, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    photo(30, 50, 0).save(tmp_path / "a.png", exif=exif)
    agree(
        encoder,
        encoder.preprocess(Image.open(tmp_path / "a.png")),
        kf.embed(encoder.run.path, str(tmp_path)),
    )


@pytest.mark.parametrize("size", [(12, 30), (40, 20), (90, 70)])
def test_arrays_are_preprocessed_as_by_embed(tmp_path: Path, size: tuple[int, int]) -> None:
    images = np.stack([np.asarray(photo(*size, seed)) for seed in range(12)])
    run = start(images, tmp_path / "run")
    encoder = kf.load(run)
    agree(encoder, encoder.preprocess(images), kf.embed(run, images))


def test_what_is_no_image_is_refused(encoder: Any) -> None:
    for wrong in (np.zeros((4, 4, 3)), np.zeros((4, 4), dtype=np.uint8)):
        with pytest.raises(
            UsageError,
            match=r"`pixels` \(=.*\) must be uint8 of the shape \(B, H, W, 3\), or Pillow images",
        ):
            encoder.preprocess(wrong)
    with pytest.raises(UsageError, match="`pixels` is empty"):
        encoder.preprocess([])
