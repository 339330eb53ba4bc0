"""The embedding map: features laid out in the plane, and the pictures of its points in one sprite sheet.

Dimension key: N samples on the map, F features, H, W picture.
"""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 5000
MIN_POINTS_TSNE = 30
MAX_SHEET, QUALITIES = 7_000_000, (72, 45, 20, 5)
"""Characters of a sprite sheet, and qualities that are tried until it is no longer: thumbnails of noise still make a page of 15 MB."""


@dataclass(frozen=True)
class Sprites:
    """All thumbnails in one picture; tile i stands at column `i % columns`, row `i // columns`."""

    uri: str
    size: int
    columns: int
    rows: int

    @property
    def layout(self) -> dict[str, int]:
        """What the page's script goes by."""
        return {"size": self.size, "columns": self.columns, "rows": self.rows}


@dataclass(frozen=True)
class EmbeddingMap:
    """The points of the map with what the tooltip says of each."""

    method: str
    total: int
    points: NDArray[np.float32]
    keys: list[str]
    labels: list[int] | None
    classes: list[str]
    sprites: Sprites | None

    def as_json(self) -> dict[str, Any]:
        """What the page's script draws. Label −1 is a sample without one."""
        sprites = self.sprites
        return {
            "x": [round(float(x), 3) for x in self.points[:, 0]],
            "y": [round(float(y), 3) for y in self.points[:, 1]],
            "keys": self.keys,
            "labels": self.labels,
            "classes": self.classes,
            "tile": None if sprites is None else sprites.layout,
        }


def choose(total: int, seed: int, limit: int = MAX_POINTS, include: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Ids of the samples on the map, ascending: all, or `limit` drawn without replacement, those to `include` among them."""
    if total <= limit:
        return np.arange(total, dtype=np.int64)
    kept = np.empty(0, dtype=np.int64) if include is None else include[:limit]
    others = np.setdiff1d(np.arange(total), kept)
    drawn = np.random.default_rng((seed, 0x6D6170)).choice(others, limit - len(kept), replace=False)
    return np.sort(np.concatenate((kept, drawn))).astype(np.int64)


def project(features_NF: NDArray[np.float32], seed: int, start_N2: NDArray[np.float32] | None = None) -> tuple[NDArray[np.float32], str]:
    """(N, 2) and the name of the method: t-SNE on unit-norm features, from `start_N2` or the principal directions on; PCA where there are
    too few points for it."""
    features_NF = np.asarray(features_NF, dtype=np.float32)
    if not np.isfinite(features_NF).all():
        raise ValueError("the features are not finite")
    unit_NF = features_NF / np.maximum(np.linalg.norm(features_NF, axis=1, keepdims=True), 1e-12)
    pca_N2 = _principal(unit_NF, 50)
    if len(unit_NF) < MIN_POINTS_TSNE or float(pca_N2.std()) < 1e-6:
        return _pad(pca_N2[:, :2]), "PCA"
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    start_N2 = _pad(pca_N2[:, :2]) if start_N2 is None else start_N2
    start_N2 = start_N2 * (1e-4 / max(float(start_N2[:, 0].std()), 1e-12))
    perplexity = min(30.0, (len(unit_NF) - 1) / 3)
    # One thread: the map is then the same everywhere, and on a busy machine waiting threads cost more than they bring.
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")
        tsne = TSNE(perplexity=perplexity, init=start_N2, learning_rate="auto", max_iter=500, random_state=seed)
        return np.asarray(tsne.fit_transform(pca_N2), dtype=np.float32), "t-SNE"


def _principal(x_NF: NDArray[np.float32], components: int) -> NDArray[np.float32]:
    """Principal coordinates with a fixed sign: the largest entry of each direction is positive."""
    centred_NF = x_NF - x_NF.mean(0)
    _, vectors_FF = np.linalg.eigh((centred_NF.T @ centred_NF).astype(np.float64))
    directions = vectors_FF[:, ::-1][:, :components]
    directions = directions * np.sign(directions[np.abs(directions).argmax(0), np.arange(directions.shape[1])])
    return np.asarray(centred_NF @ directions, dtype=np.float32)


def _pad(points: NDArray[np.float32]) -> NDArray[np.float32]:
    """Features of one dimension still make a map: a line."""
    return np.pad(points, ((0, 0), (0, 2 - points.shape[1])))


def sprite_sheet(pictures: Sequence[NDArray[np.uint8]], size: int) -> Sprites | None:
    """Packs (H, W, 3) pictures into one WebP of `size` × `size` tiles."""
    if not pictures:
        return None
    from PIL import Image

    columns = math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    sheet = Image.new("RGB", (columns * size, rows * size))
    for i, picture in enumerate(pictures):
        tile = Image.fromarray(picture)
        if tile.size != (size, size):
            tile = tile.resize((size, size), Image.Resampling.LANCZOS if tile.width > size else Image.Resampling.NEAREST)
        sheet.paste(tile, ((i % columns) * size, (i // columns) * size))
    for quality in QUALITIES:
        uri = data_uri(sheet, quality)
        if len(uri) <= MAX_SHEET:
            break
    return Sprites(uri, size, columns, rows)


def data_uri(picture: Any, quality: int) -> str:
    """A PIL picture as a WebP data URI."""
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", quality=quality, method=4)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
