"""The embedding map: choice of points, projection, sprite sheet."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from kinfolk.report.maps import choose, project, sprite_sheet


def test_all_samples_or_a_seeded_draw() -> None:
    assert choose(7, seed=0, limit=10).tolist() == list(range(7))
    drawn = choose(1000, seed=0, limit=50)
    assert len(set(drawn.tolist())) == 50
    assert drawn.tolist() == sorted(drawn.tolist()) == choose(1000, seed=0, limit=50).tolist()
    assert drawn.tolist() != choose(1000, seed=1, limit=50).tolist()


def two_groups(num: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.normal(0, 0.05, (num, 8)) + np.eye(8)[np.arange(num) % 2]).astype(np.float32)


@pytest.mark.parametrize(("num", "method"), [(6, "PCA"), (60, "t-SNE")])
def test_groups_stay_apart_and_the_map_is_reproducible(num: int, method: str) -> None:
    points, name = project(two_groups(num), seed=0)
    assert name == method
    assert points.shape == (num, 2)
    apart = np.linalg.norm(points[::2].mean(0) - points[1::2].mean(0))
    assert apart > 3 * max(points[::2].std(0).mean(), points[1::2].std(0).mean())
    np.testing.assert_array_equal(points, project(two_groups(num), seed=0)[0])


@pytest.mark.parametrize(
    "features", [np.zeros((40, 4)), np.ones((40, 4)), np.ones((1, 3)), np.ones((5, 1))]
)
def test_features_that_span_nothing_still_make_a_map(features: np.ndarray) -> None:
    points, name = project(features.astype(np.float32), seed=0)
    assert name == "PCA"
    assert points.shape == (len(features), 2)
    assert np.abs(points).max() < 1e-5, "all in one place"


def test_features_must_be_finite() -> None:
    with pytest.raises(ValueError, match="not finite"):
        project(np.full((40, 3), np.nan, dtype=np.float32), seed=0)


def test_tiles_stand_where_the_page_looks_for_them() -> None:
    images = [np.full((8, 8, 3), 20 * i, dtype=np.uint8) for i in range(7)]
    sprites = sprite_sheet(images, 16)
    assert sprites is not None
    assert (sprites.columns, sprites.rows) == (3, 3)
    sheet = np.asarray(Image.open(io.BytesIO(base64.b64decode(sprites.uri.partition(",")[2]))))
    assert sheet.shape == (48, 48, 3)
    for i in range(7):
        tile = sheet[i // 3 * 16 :, i % 3 * 16 :][2:14, 2:14]
        assert abs(float(tile.mean()) - 20 * i) < 6
    assert sprite_sheet([], 16) is None


def test_images_that_do_not_compress_are_kept_small(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = list(np.random.default_rng(0).integers(0, 256, (16, 32, 32, 3), dtype=np.uint8))
    usual = sprite_sheet(noise, 32)
    assert usual is not None
    monkeypatch.setattr("kinfolk.report.maps.MAX_SHEET", len(usual.uri) // 2)
    less = sprite_sheet(noise, 32)
    assert less is not None
    assert len(less.uri) <= len(usual.uri) // 2
