from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kinfolk.data.images import ImageData
from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare
from kinfolk.errors import KinfolkError, UsageError
from tests.data.images import noise, save


def images(count: int = 5, height: int = 6, width: int = 7, channels: int = 3) -> Any:
    return np.random.default_rng(1).integers(
        0, 256, (count, height, width, channels), dtype=np.uint8
    )


def prepared(spec: object, size: int = 8, **options: Any) -> ImageData:
    return prepare(open_source(spec, **options), image_size=size)


def all_pixels(data: ImageData) -> Any:
    return data.pixels(torch.arange(len(data))).numpy()


def test_every_layout_gives_the_same_pixels() -> None:
    x = images()
    assert np.array_equal(all_pixels(prepared(x)), x)
    assert np.array_equal(all_pixels(prepared(x.transpose(0, 3, 1, 2))), x)
    assert np.array_equal(all_pixels(prepared(torch.from_numpy(x))), x)
    grey = x[..., :1]
    for form in (grey, grey[..., 0], grey.transpose(0, 3, 1, 2)):
        assert np.array_equal(all_pixels(prepared(form)), grey.repeat(3, -1))


def test_alpha_channel_is_laid_on_white() -> None:
    x = images(channels=4)
    x[..., 3] = 0
    assert (all_pixels(prepared(x)) == 255).all()


def test_every_type_gives_the_same_pixels() -> None:
    x = images()
    for form in (
        x / 255,
        (x / 255).astype(np.float32),
        x.astype(np.int64),
        x.astype(np.uint16),
        x.astype(">i4"),
    ):
        assert np.array_equal(all_pixels(prepared(form)), x), form.dtype
    assert np.array_equal(all_pixels(prepared(x > 99)), (x > 99) * np.uint8(255))


NO_IMAGES: list[tuple[Any, str]] = [
    (images() / 100, r"float64 values in \[0, 2.5.*; they must be in \[0, 1\]"),
    (images() / 255 - 0.5, r"they must be in \[0, 1\]"),
    (np.full((3, 6, 5, 3), np.nan), r"values in \[nan, nan\]; they must be in \[0, 1\]"),
    (
        np.where(np.arange(3)[:, None, None] == 2, np.inf, 0.5) * np.ones((3, 6, 5)),
        r"values in \[0.5, inf\]; they must be in \[0, 1\]",
    ),
    (images().astype(np.int32) * 300, r"int32 values in .*; they must be in \[0, 255\]"),
    (images().astype(np.int16) - 200, "they must be in"),
    (images().astype(complex), "has the type complex128"),
    (np.array([["a", "b"]] * 3)[:, :, None].repeat(5, 2), "images must be numbers"),
    (np.zeros((3, 3, 9, 3), np.uint8), "with 1, 3 or 4 channels"),
    (np.zeros((3, 9, 9, 2), np.uint8), "with 1, 3 or 4 channels"),
    (np.zeros((9, 9, 3), np.uint8), r"has the shape \(9, 9, 3\)"),
    (np.zeros((9, 9), np.uint8), r"has the shape \(9, 9\)"),
    (np.zeros((3, 0, 9, 3), np.uint8), "and have pixels"),
    (np.zeros((0, 9, 9, 3), np.uint8), "holds no images"),
]


def test_arrays_that_are_no_images_are_refused_in_one_sentence() -> None:
    for array, match in NO_IMAGES:
        with pytest.raises(KinfolkError, match=match) as caught:
            open_source(array)
        assert "\n" not in str(caught.value)


def test_small_arrays_keep_their_size_and_large_ones_do_not() -> None:
    assert all_pixels(prepared(images(2, 32, 48), size=224)).shape == (2, 32, 48, 3)
    assert all_pixels(prepared(images(2, 64, 64), size=8)).shape == (2, 64, 64, 3)
    assert all_pixels(prepared(images(2, 65, 64), size=8)).shape == (2, 8, 8, 3)


def test_npz_with_splits_keeps_them(tmp_path: Path) -> None:
    x, y = images(6), np.array([[2], [0], [1], [1], [0], [2]])
    np.savez(
        tmp_path / "a.npz",
        x_test=x[4:],
        y_test=y[4:],
        x_train=x[:4],
        y_train=y[:4],
        classes=np.array(["a", "b", "c"]),
        extra=np.arange(3),
    )
    data = prepared(tmp_path / "a.npz")
    assert np.array_equal(all_pixels(data), x)
    assert data.samples.keys == ["train/0", "train/1", "train/2", "train/3", "test/0", "test/1"]
    assert data.num_train == 4
    assert data.labels is not None
    assert data.labels.tolist() == y.ravel().tolist()
    assert data.labels.dtype == torch.int64
    assert data.classes == ["a", "b", "c"]


def test_npz_with_images_and_names(tmp_path: Path) -> None:
    np.savez_compressed(
        tmp_path / "a.npz", images=images(4), labels=np.array(["dog", "cat", "", "dog"])
    )
    data = prepared(tmp_path / "a.npz")
    assert data.classes == ["cat", "dog"]
    assert data.labels is not None
    assert data.labels.tolist() == [1, 0, -1, 1]


def test_npy_is_memory_mapped(tmp_path: Path) -> None:
    x = images(4)
    np.save(tmp_path / "a.npy", x)
    source = open_source(tmp_path / "a.npy", labels=[3, 1, -1, 0])
    row = source.load(1)
    base: Any = row
    while base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    data = prepare(source, image_size=8)
    assert np.array_equal(all_pixels(data), x)
    assert data.labels is not None
    assert data.labels.tolist() == [3, 1, -1, 0]


class Bomb:
    """Marks that it was unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("name", ["a.npz", "a.npy"])
def test_objects_are_refused_without_running_them(tmp_path: Path, name: str) -> None:
    array = np.array([Bomb(tmp_path / "ran")], dtype=object)
    if name.endswith("z"):
        np.savez(tmp_path / name, x_train=array)
    else:
        np.save(tmp_path / name, array)
    with pytest.raises(KinfolkError, match="holds Python objects"):
        open_source(tmp_path / name)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["a.npz", "a.npy"])
def test_broken_files_of_arrays_are_refused(tmp_path: Path, name: str) -> None:
    for content in [b"", b"not an array", b"PK\x03\x04 cut short"]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            KinfolkError, match=f"{name}` (is not a readable array|holds Python objects)"
        ):
            open_source(tmp_path / name)


def test_a_truncated_npz_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=images())
    data = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(data[: len(data) // 2])
    with pytest.raises(KinfolkError, match="not a readable array"):
        open_source(tmp_path / "a.npz")


def test_an_npz_without_images_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", foo=images())
    with pytest.raises(KinfolkError, match=r"must hold `x_train`.*it holds \['foo'\]"):
        open_source(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("labels", "match"),
    [
        ([1, 2], r"5 images but labels of the shape \(2,\)"),
        (np.eye(5), r"labels of the shape \(5, 5\)"),
        ([0, 1, 2, 3, -2], "label -2; labels must be 0 … 2147483647, or -1"),
    ],
)
def test_labels_of_another_length_or_kind_are_refused(labels: Any, match: str) -> None:
    with pytest.raises(KinfolkError, match=match):
        open_source(images(5), labels=labels)


def test_label_beyond_the_classes(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=images(2), labels=[0, 2], classes=["a", "b"])
    with pytest.raises(KinfolkError, match="label 2; labels must be 0 … 1"):
        open_source(tmp_path / "a.npz")


def test_labels_belong_to_arrays(tmp_path: Path) -> None:
    save(tmp_path / "a.png", noise(4, 4))
    with pytest.raises(UsageError, match="`labels` belong"):
        open_source(tmp_path, labels=[1])


def test_array_and_folder_agree(tmp_path: Path) -> None:
    x = images(10, 16, 16)
    for row, image in enumerate(x):
        save(tmp_path / f"{row}.png", image)
    assert np.array_equal(all_pixels(prepared(tmp_path, size=16)), all_pixels(prepared(x, size=16)))
