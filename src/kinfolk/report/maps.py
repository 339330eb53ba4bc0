"""Images of the report: the embedding map with its thumbnails, and the grid of augmented views.

Dimension key: N samples on the map, F features, V views, B images, C channels, H, W image."""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from kinfolk.errors import short
from kinfolk.report.html import rounded
from kinfolk.seeding import draw_ids, generator

if TYPE_CHECKING:
    from PIL import Image

    from kinfolk.data.images import ImageData
    from kinfolk.data.views import Views

NUM_SAMPLES = NUM_VIEWS = 6
GAP = 0.12
"""Distance between the images of a strip, as a share of their width."""
MAX_TILE = 40
"""Largest side of a thumbnail; a sheet of 5,000 photographs then takes about three megabytes."""
CHUNK = 256
MAX_POINTS, MIN_POINTS_TSNE = 5000, 30
MAX_SHEET, QUALITIES = 7_000_000, (72, 45, 20, 5)
"""Largest length of a sprite sheet's data URI, and the WebP qualities to try until it fits."""


# ---- the map


@dataclass(frozen=True)
class Sprites:
    """All thumbnails in one image, row by row."""

    uri: str
    size: int
    columns: int
    rows: int

    @property
    def layout(self) -> dict[str, int]:
        return {"size": self.size, "columns": self.columns, "rows": self.rows}


@dataclass(frozen=True)
class EmbeddingMap:
    method: str
    total: int
    points_N2: NDArray[np.float32]
    keys: list[str]
    labels: list[int] | None
    classes: list[str]
    sprites: Sprites | None

    def as_json(self) -> dict[str, Any]:
        x, y = (rounded(axis, 3) for axis in self.points_N2.T)
        tile = None if self.sprites is None else self.sprites.layout
        described = {"keys": self.keys, "labels": self.labels, "classes": self.classes}
        return {"x": x, "y": y, **described, "tile": tile}


def choose(total: int, seed: int, limit: int = MAX_POINTS) -> NDArray[np.int64]:
    """Ids of all samples, or of `limit` at random, ascending."""
    ids: NDArray[np.int64] = draw_ids(total, limit, seed, "map").numpy()
    return ids


def draw_map(
    data: ImageData, ids_N: NDArray[np.int64], features_NF: NDArray[np.float32], seed: int
) -> EmbeddingMap:
    """Text pairs have their anchors instead of keys and images."""
    points_N2, method = project(features_NF, seed)
    samples = data.samples
    labels = None if samples.labels is None else samples.labels[ids_N].tolist()
    keys, thumbnails = [samples.keys[i] for i in ids_N], []
    if data.texts is None:
        for start in range(0, len(ids_N), CHUNK):
            thumbnails += square_images(data, ids_N[start : start + CHUNK], MAX_TILE)
    else:
        keys = [short(texts[0]) for texts in data.texts.of(torch.from_numpy(ids_N))]
    sprites = sprite_sheet(thumbnails, min(MAX_TILE, max(data.height, data.width)))
    total = len(samples)
    return EmbeddingMap(method, total, points_N2, keys, labels, _class_names(data), sprites)


def _class_names(data: ImageData) -> list[str]:
    """A number where the source gives no name."""
    labels = data.samples.labels
    if labels is None:
        return []
    named = list(data.classes or [])
    return [*named, *map(str, range(len(named), int(labels.max(initial=-1)) + 1))]


def project(features_NF: NDArray[np.float32], seed: int) -> tuple[NDArray[np.float32], str]:
    """(N, 2) coordinates and the method: t-SNE of unit-norm features, or the first two principal
    components of too few points for t-SNE."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    features_NF = np.asarray(features_NF, dtype=np.float32)
    if not np.isfinite(features_NF).all():
        raise ValueError("the features are not finite")
    unit_NF = features_NF / np.maximum(np.linalg.norm(features_NF, axis=1, keepdims=True), 1e-12)
    components, perplexity = min(50, *unit_NF.shape), min(30.0, (len(unit_NF) - 1) / 3)
    with warnings.catch_warnings(), threadpool_limits(1):  # the same map on every machine
        warnings.simplefilter("ignore")
        pca_NF = PCA(components, random_state=seed).fit_transform(unit_NF)
        if len(unit_NF) < MIN_POINTS_TSNE or components < 2 or float(pca_NF.std()) < 1e-6:
            points_N2, method = np.pad(pca_NF[:, :2], ((0, 0), (0, max(0, 2 - components)))), "PCA"
        else:
            tsne = TSNE(perplexity=perplexity, init="pca", max_iter=500, random_state=seed)
            points_N2, method = tsne.fit_transform(pca_NF), "t-SNE"
    return np.asarray(points_N2, dtype=np.float32), method


# ---- images


def draw_strips(data: ImageData, views: Views, seed: int) -> list[dict[str, Any]]:
    from PIL import Image

    ids, samples, size = choose(data.num_train, seed, NUM_SAMPLES), data.samples, views.size
    chosen, random = torch.from_numpy(ids), generator(seed, "strips")
    rgb = type(views)(**{**views.config(), "space": "rgb", "mean": (0, 0, 0), "std": (1, 1, 1)})
    made = rgb(data.pixels(chosen), random, aspect=data.aspect(chosen), num_views=NUM_VIEWS)
    rgb_VBCHW = (made.clamp(0, 1) * 255).round().to(torch.uint8)
    views_BVHW3 = np.ascontiguousarray(rgb_VBCHW.permute(1, 0, 3, 4, 2).numpy())
    names, gap, strips = _class_names(data), max(1, round(size * GAP)), []
    originals = square_images(data, ids, 2 * size)
    for sample, original, views_VHW3 in zip(ids, originals, views_BVHW3, strict=True):
        sheet = Image.new("RGBA", ((size + gap) * (NUM_VIEWS + 1), size), (0, 0, 0, 0))
        first = Image.fromarray(original).resize((size, size), Image.Resampling.BICUBIC)
        sheet.paste(first, (0, 0))
        for place, view in enumerate(views_VHW3):
            sheet.paste(Image.fromarray(view), (size + 2 * gap + place * (size + gap), 0))
        label = -1 if samples.labels is None else samples.labels[sample]
        name, uri = names[label] if label >= 0 else "", data_uri(sheet, quality=88)
        strip = {"key": samples.keys[sample], "label": name, "uri": uri, "pixelated": size <= 64}
        strips.append({**strip, "width": sheet.width, "height": sheet.height})
    return strips


def square_images(data: ImageData, ids: NDArray[np.int64], size: int) -> list[NDArray[np.uint8]]:
    """The cached images with the aspect ratio of the originals, at most `size` on the long side, on
    a black square."""
    from PIL import Image, ImageOps

    chosen = torch.from_numpy(ids)
    pixels_BHW3, aspect_B = data.pixels(chosen).numpy(), data.aspect(chosen).tolist()
    side, squares = min(size, max(data.height, data.width)), []
    for pixels_HW3, aspect in zip(pixels_BHW3, aspect_B, strict=True):
        width, height = (max(1, round(side * min(1, ratio))) for ratio in (aspect, 1 / aspect))
        image = Image.fromarray(pixels_HW3).resize((width, height), Image.Resampling.LANCZOS)
        squares.append(np.asarray(ImageOps.pad(image, (side, side))))
    return squares


def sprite_sheet(images: Sequence[NDArray[np.uint8]], size: int) -> Sprites | None:
    if not images:
        return None
    from PIL import Image

    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    sheet = Image.new("RGB", (columns * size, rows * size))
    for i, image in enumerate(images):
        row, column = divmod(i, columns)
        sheet.paste(Image.fromarray(image).resize((size, size)), (column * size, row * size))
    for quality in QUALITIES:
        uri = data_uri(sheet, quality)
        if len(uri) <= MAX_SHEET:
            break
    return Sprites(uri, size, columns, rows)


def data_uri(image: Image.Image, quality: int) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=quality, method=4)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
