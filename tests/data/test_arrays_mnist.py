"""MNIST's idx files: plain and compressed, in folders as they are downloaded, and files that are
not what they say."""

from __future__ import annotations

import gzip
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare
from kinfolk.errors import KinfolkError

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 5, 7), dtype=np.uint8)
LABELS = np.array([3, 1, 4, 1, 5, 9], dtype=np.uint8)


def idx(
    values: np.ndarray[Any, Any], code: int = 0x08, shape: tuple[int, ...] | None = None
) -> bytes:
    sides = values.shape if shape is None else shape
    return struct.pack(f">HBB{len(sides)}I", 0, code, len(sides), *sides) + values.tobytes()


def mnist(folder: Path, suffix: str = "", name: str = "{}-{}-idx{}-ubyte") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pack = gzip.compress if suffix else bytes
    for split, part in (("train", slice(0, 4)), ("t10k", slice(4, 6))):
        (folder / (name.format(split, "images", 3) + suffix)).write_bytes(pack(idx(IMAGES[part])))
        (folder / (name.format(split, "labels", 1) + suffix)).write_bytes(pack(idx(LABELS[part])))
    return folder


@pytest.mark.parametrize(
    ("below", "suffix", "name"),
    [
        ("", "", "{}-{}-idx{}-ubyte"),
        ("", ".gz", "{}-{}-idx{}-ubyte"),
        ("", "", "{}-{}.idx{}-ubyte"),
        ("FashionMNIST/raw", "", "{}-{}-idx{}-ubyte"),
        ("raw", ".gz", "{}-{}-idx{}-ubyte"),
    ],
)
def test_reads_images_labels_and_splits(tmp_path: Path, below: str, suffix: str, name: str) -> None:
    mnist(tmp_path / below, suffix, name)
    data = prepare(open_source(tmp_path), image_size=8)
    assert (len(data), data.num_train, data.height, data.width) == (6, 4, 5, 7)
    assert data.labels is not None
    assert data.labels.tolist() == LABELS.tolist()
    assert list(data.samples.keys) == [
        "train/0",
        "train/1",
        "train/2",
        "train/3",
        "test/0",
        "test/1",
    ]
    pixels = data.pixels(data.labels.new_tensor(range(6))).numpy()
    assert (pixels == IMAGES[..., None]).all()


def test_of_a_file_and_its_compressed_copy_one_is_read(tmp_path: Path) -> None:
    mnist(mnist(tmp_path), ".gz")
    assert len(open_source(tmp_path).items()) == 6


def test_images_without_labels_are_unlabelled(tmp_path: Path) -> None:
    mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    labels = [item.label for item in open_source(tmp_path).items()]
    assert labels == [*LABELS[:4].tolist(), None, None]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "train-images-idx3-ubyte",
            idx(IMAGES)[:-1],
            "do not fit the shape (6, 5, 7) of its header",
        ),
        (
            "train-images-idx3-ubyte",
            idx(IMAGES, shape=(1 << 31, 1 << 31, 1 << 31)),
            "do not fit the shape",
        ),
        (
            "train-images-idx3-ubyte.gz",
            gzip.compress(idx(IMAGES)[:-1]),
            "do not fit the shape",
        ),
        (
            "train-images-idx3-ubyte.gz",
            gzip.compress(idx(IMAGES) + b"x"),
            "do not fit the shape",
        ),
        (
            "train-images-idx3-ubyte.gz",
            gzip.compress(idx(IMAGES, shape=(1 << 31, 1 << 31, 1 << 31))),
            "do not fit the shape",
        ),
        (
            "train-images-idx3-ubyte.gz",
            gzip.compress(idx(IMAGES))[:-9],
            "is not a readable idx file",
        ),
        ("train-images-idx3-ubyte.gz", b"no gzip", "is not a readable idx file"),
        ("train-images-idx3-ubyte", b"", "is not a readable idx file"),
        ("train-images-idx3-ubyte", b"<html>not found</html>", "does not begin with the header"),
        (
            "train-images-idx3-ubyte",
            idx(IMAGES.astype(">i4"), 0x0C),
            "does not begin with the header of bytes",
        ),
        ("train-images-idx3-ubyte", idx(LABELS), "images must be (N, H, W)"),
    ],
)
def test_refuses_files_that_are_not_what_they_say(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(KinfolkError, match=re.escape(message)):
        open_source(tmp_path)


def test_refuses_labels_that_do_not_fit_and_a_single_file(tmp_path: Path) -> None:
    mnist(tmp_path)
    with pytest.raises(KinfolkError, match="give the folder of all of them"):
        open_source(tmp_path / "train-images-idx3-ubyte")
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(LABELS))
    with pytest.raises(KinfolkError, match="has 4 images but labels of the shape"):
        open_source(tmp_path)
