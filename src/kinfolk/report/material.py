"""What the report draws of the pictures: the embedding map with its thumbnails, and the grid of views.

Dimension key: N samples on the map, F features, V views, B pictures, C channels, H, W picture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from kinfolk.report.map import EmbeddingMap, choose, project, sprite_sheet
from kinfolk.report.views_grid import NUM_SAMPLES, NUM_VIEWS, Strip, strip

if TYPE_CHECKING:
    from kinfolk.data.images import ImageData
    from kinfolk.data.views import Views

MAX_TILE = 40
"""Side of a thumbnail at most: 5,000 photographs then make a sheet of some three megabytes."""
CHUNK = 256


def draw_map(data: ImageData, ids_N: NDArray[np.int64], features_NF: NDArray[np.float32], seed: int) -> EmbeddingMap:
    """The map of the samples `ids_N`."""
    points, method = project(features_NF, seed)
    samples = data.samples
    labels = None if samples.labels is None else [int(label) for label in samples.labels[ids_N]]
    starts = range(0, len(ids_N), CHUNK)
    pictures = [picture for start in starts for picture in square_pictures(data, ids_N[start : start + CHUNK], MAX_TILE)]
    return EmbeddingMap(
        method=method,
        total=len(samples),
        points=points,
        keys=[samples.keys[i] for i in ids_N],
        labels=labels,
        classes=_class_names(data),
        sprites=sprite_sheet(pictures, min(MAX_TILE, max(data.height, data.width))),
    )


def draw_strips(data: ImageData, views: Views, seed: int) -> list[Strip]:
    """A few training samples, drawn at random, each with some of its views."""
    ids = choose(data.num_train, seed, NUM_SAMPLES)
    chosen = torch.from_numpy(ids)
    generator = torch.Generator().manual_seed(seed)
    made_VBCHW = views.pictures(views(data.pixels(chosen), generator, aspect=data.aspect(chosen), num_views=NUM_VIEWS))
    bytes_VBHWC = (made_VBCHW * 255).round().to(torch.uint8).permute(0, 1, 3, 4, 2).numpy()
    names, samples = _class_names(data), data.samples
    strips = []
    for i, (sample, picture) in enumerate(zip(ids, square_pictures(data, ids, 2 * views.size), strict=True)):
        label = -1 if samples.labels is None else int(samples.labels[sample])
        name = names[label] if 0 <= label < len(names) else ""
        strips.append(strip(samples.keys[sample], name, picture, np.ascontiguousarray(bytes_VBHWC[:, i])))
    return strips


def square_pictures(data: ImageData, ids: NDArray[np.int64], size: int) -> list[NDArray[np.uint8]]:
    """The cached pictures, brought back to the shape of the originals, at most `size` on the long side, on a black square."""
    from PIL import Image

    chosen = torch.from_numpy(ids)
    pixels_BHW3, aspect_B = data.pixels(chosen).numpy(), data.aspect(chosen).tolist()
    side = min(size, max(data.height, data.width))
    squares = []
    for pixels_HW3, aspect in zip(pixels_BHW3, aspect_B, strict=True):
        width, height = (side, max(1, round(side / aspect))) if aspect >= 1 else (max(1, round(side * aspect)), side)
        picture = Image.fromarray(pixels_HW3)
        square = Image.new("RGB", (side, side))
        resized = picture if picture.size == (width, height) else picture.resize((width, height), Image.Resampling.LANCZOS)
        square.paste(resized, ((side - width) // 2, (side - height) // 2))
        squares.append(np.asarray(square))
    return squares


def _class_names(data: ImageData) -> list[str]:
    """A name for each label; the number itself where the source gives none."""
    labels = data.samples.labels
    if labels is None:
        return []
    count = int(labels.max(initial=-1)) + 1
    named = list(data.classes or [])
    return [*named, *(str(label) for label in range(len(named), count))]
