from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare
from kinfolk.errors import KinfolkError, UsageError
from tests.data.images import noise


class Items(Dataset[Any]):
    """A map-style data set over a list; an exception in it is raised."""

    def __init__(self, items: list[Any], classes: list[str] | None = None) -> None:
        self.items, self.classes = items, classes

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.items[index], Exception):
            raise self.items[index]
        return self.items[index]


def test_images_of_every_kind_agree() -> None:
    x = noise(8, 8)
    chw = torch.from_numpy(x).permute(2, 0, 1)
    forms = [
        Image.fromarray(x),
        x,
        chw,
        chw.float() / 255,
        x / 255,
        chw.numpy(),
        (x, 3),
        (Image.fromarray(x), torch.tensor(1)),
        [x, np.int64(2)],
    ]
    data = prepare(open_source(Items(forms, ["a", "b", "c", "d"])), image_size=8)
    assert data.quarantine == []
    assert (data.pixels(torch.arange(len(forms))).numpy() == x).all()
    assert data.labels is not None
    assert data.labels.tolist() == [-1] * 6 + [3, 1, 2]
    assert data.classes == ["a", "b", "c", "d"]
    assert data.samples.keys[:2] == ["train/0", "train/1"]


def test_a_tensor_dataset_needs_no_labels() -> None:
    x = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)
    data = prepare(open_source(TensorDataset(x)), image_size=8)
    assert data.labels is None
    assert torch.equal(data.pixels(torch.arange(5)), x.permute(0, 2, 3, 1))


def test_a_mapping_of_datasets_has_its_keys_as_splits() -> None:
    splits = {
        "test": Items([(noise(8, 8, 9), 0)]),
        "train": Items([(noise(8, 8, n), 1) for n in range(3)]),
    }
    data = prepare(open_source(splits), image_size=8)
    assert data.samples.keys == ["train/0", "train/1", "train/2", "test/0"]
    assert data.labels is not None
    assert data.labels.tolist() == [1, 1, 1, 0]


def test_bad_items_are_refused_with_the_reason() -> None:
    x = noise(8, 8)
    items = [
        x,
        OSError("image file is truncated"),
        "text",
        x[None],
        x * np.nan,
        (x, "dog"),
        (x, 1.5),
    ]
    data = prepare(open_source(Items(items)), image_size=8)
    assert data.samples.keys == ["train/0"]
    reasons = [reason for _, reason in data.quarantine]
    for reason, part in zip(
        reasons,
        [
            "OSError: image file is truncated",
            "str",
            "(1, 8, 8, 3)",
            "values in [nan, nan]",
            "'dog'",
            "1.5",
        ],
        strict=True,
    ):
        assert part in reason


def test_a_dataset_without_a_good_image_is_refused() -> None:
    with pytest.raises(
        KinfolkError,
        match="all 2 images of the Items were refused; the first is train/0: KeyError: 'x'",
    ):
        prepare(open_source(Items([KeyError("x"), KeyError("y")])), image_size=8)


def test_what_is_no_map_style_dataset_is_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(UsageError, match="map-style Dataset"):
        open_source(7)
    with pytest.raises(UsageError, match=r"Stream.*map-style Dataset"):
        open_source(Stream())
    with pytest.raises(KinfolkError, match="is empty"):
        open_source(Items([]))
