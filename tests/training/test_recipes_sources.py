"""Recipes: what their headers say is true, and those for ImageNet take folders and array files
alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kinfolk.errors import UsageError
from kinfolk.training.run_folder import open_data
from kinfolk.training.settings import load_recipe, recipe_names, recipe_path

IMAGENET = [name for name in recipe_names() if "imagenet" in name]


@pytest.mark.parametrize("recipe", IMAGENET)
def test_labels_of_folders_and_of_array_files(recipe: str, tmp_path: Path) -> None:
    config = load_recipe(recipe)
    for split, name in (("train", "cat"), ("train", "dog"), ("val", "cat")):
        (tmp_path / "d" / split / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "d" / split / name / "a.png")
    np.savez(
        tmp_path / "a.npz", x_train=np.zeros((3, 8, 8, 3), np.uint8), y_train=np.array([0, 1, 1])
    )
    assert open_data(tmp_path / "d", config).classes == ["cat", "dog"]
    arrays = open_data(tmp_path / "a.npz", config)
    assert [arrays.label(index) for index in range(3)] == [0, 1, 1]


def test_folders_that_the_user_asks_for_must_be_there(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "a.npz", x_train=np.zeros((3, 8, 8, 3), np.uint8), y_train=np.array([0, 1, 1])
    )
    config = load_recipe(IMAGENET[0]).with_settings({"data.labels_from_folders": True})
    with pytest.raises(UsageError, match="needs a folder of images"):
        open_data(tmp_path / "a.npz", config)


@pytest.mark.parametrize("recipe", [name for name in recipe_names() if name.endswith("resnet18")])
def test_headers_of_the_ring_paper_are_true(recipe: str) -> None:
    text = recipe_path(recipe).read_text(encoding="utf-8")
    assert "this library's reads the pooled features" not in text
    assert ("--unpooled" in text) == ("512×7×7" in text)
    if load_recipe(recipe).method.startswith("moco"):
        assert "65,536" in text


def test_cmc_has_every_row_of_table_6() -> None:
    assert {"cmc-cave-resnet18", "cmc-ring-close-resnet18"} <= set(recipe_names())
    assert load_recipe("cmc-ring-close-resnet18").framework["pool_kin"] is True
