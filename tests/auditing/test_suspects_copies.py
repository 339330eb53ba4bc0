"""Copies are found by their pixels; different images with the same background are not copies."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter, ImageOps

import kinfolk as kf
from kinfolk.auditing.inputs import read_input
from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare


def textured(seed: int, size: int = 128) -> Image.Image:
    """A smooth random image, as different from another as two photographs are."""
    rng = np.random.default_rng(seed)
    noise = Image.fromarray(rng.integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8))
    return noise.resize((size, size), Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(1))


def parachute(seed: int, size: int = 128) -> Image.Image:
    """A small object on a blue sky that is the same in all images."""
    rng = np.random.default_rng(seed)
    sky = np.linspace(90, 230, size, dtype=np.uint8)
    image = Image.fromarray(
        np.stack(
            [
                np.tile(sky[:, None] // 2, (1, size)),
                np.tile(sky[:, None], (1, size)),
                np.full((size, size), 240),
            ],
            2,
        ).astype(np.uint8)
    )
    x, y, r = (int(rng.integers(low, high)) for low, high in ((20, 80), (15, 70), (12, 26)))
    draw = ImageDraw.Draw(image)
    draw.pieslice(
        (x, y, x + 2 * r, y + 2 * r), 180, 360, fill=tuple(rng.integers(0, 255, 3).tolist())
    )
    draw.line((x, y + r, x + r, y + 3 * r), fill=(30, 30, 30), width=2)
    return image


def recompressed(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


def groups_of(folder: Path, images: dict[str, Image.Image]) -> list[set[str]]:
    folder.mkdir()
    for name, image in images.items():
        image.save(folder / f"{name}.png")
    data = prepare(open_source(folder), image_size=64)
    # candidates come from the thumbnails alone
    features = np.random.default_rng(0).normal(size=(len(data), 8))
    found = kf.audit(features, 0.1, images=data, keys=data.samples.keys)
    assert found.verified
    names = [key.removesuffix(".png") for key in data.samples.keys]
    return [
        {names[row["sample"]] for row in found.groups[found.groups["group"] == group]}
        for group in np.unique(found.groups["group"])
    ]


def test_resized_recompressed_and_cropped_copies_are_found(tmp_path: Path) -> None:
    images = {f"image{i}": textured(i) for i in range(24)}
    images["small"] = images["image0"].resize((48, 48), Image.Resampling.LANCZOS)
    images["jpeg"] = recompressed(images["image1"], 30)
    images["cropped"] = images["image2"].crop((8, 8, 120, 120))
    images["side"] = images["image3"].crop((0, 9, 117, 128))
    images["wide"] = images["image4"].resize((200, 90))
    images["mirrored"] = ImageOps.mirror(images["image5"])
    copies = ("small", "jpeg", "cropped", "side", "wide", "mirrored")
    expected = [{f"image{i}", name} for i, name in enumerate(copies)]
    found = groups_of(tmp_path / "photos", images)
    assert sorted(map(sorted, found)) == sorted(map(sorted, expected))


def test_different_objects_before_the_same_sky_are_no_group(tmp_path: Path) -> None:
    assert groups_of(tmp_path / "sky", {f"parachute{i}": parachute(i) for i in range(8)}) == []


def framed(image: Image.Image, frame: str) -> Image.Image:
    """The image faint and between bars or in a frame, whose edges are the strongest in it."""
    faint = Image.blend(Image.new("RGB", image.size, (90, 90, 90)), image, 0.35)
    out = Image.new("RGB", image.size, (255, 255, 255))
    left, top = (24, 0) if frame == "bars" else (24, 24) if frame == "frame" else (0, 24)
    out.paste(faint.resize((128 - 2 * left, 128 - 2 * top)), (left, top))
    return out


@pytest.mark.parametrize("frame", ["bars", "letterbox", "frame"])
def test_different_images_between_the_same_bars_are_no_group(tmp_path: Path, frame: str) -> None:
    images = {f"image{i}": framed(textured(i), frame) for i in range(12)}
    images["copy"] = recompressed(images["image3"], 60)
    assert groups_of(tmp_path / frame, images) == [{"image3", "copy"}]


def test_a_strong_edge_in_the_same_place_is_not_enough(tmp_path: Path) -> None:
    """A bright post that covers a part of different images, away from their borders."""
    images = {}
    for i in range(12):
        images[f"image{i}"] = Image.blend(
            Image.new("RGB", (128, 128), (60, 60, 60)), textured(i), 0.25
        )
        ImageDraw.Draw(images[f"image{i}"]).rectangle((50, 0, 78, 127), fill=(255, 255, 255))
    assert groups_of(tmp_path / "post", images) == []


def test_a_folder_of_images_is_embedded_and_named(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(40):
        textured(i, 224).save(folder / f"{i:02}.png")
    found = read_input(folder, progress=False)
    assert found.features.shape[0] == 40
    assert found.origin.encoder == "k-means of patches of these images"
    assert list(found.keys or ()) == [f"{i:02}.png" for i in range(40)]
    assert found.thumbnails is not None
    (square,) = found.thumbnails.squares([3])
    assert square.shape == (160, 160, 3), "from the original of 224 pixels, not from a smaller copy"
