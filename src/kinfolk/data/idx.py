"""MNIST's idx files (`train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and so on), also compressed with gzip.

The format is described on Yann LeCun's MNIST page: two zero bytes, a type code, the number of dimensions, each dimension as a big-endian
32-bit number, then the values. Fashion-MNIST, KMNIST, QMNIST's images and EMNIST use the same files.
"""

from __future__ import annotations

import gzip
import math
import os
import re
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from kinfolk.data.arrays import ArraySource, array_source
from kinfolk.data.source import Pixels
from kinfolk.errors import KinfolkError, shown
from kinfolk.files import first_line

_NAME = re.compile(r"(?:(?P<set>.+)-)?(?P<split>train|t10k|test)-(?P<kind>images|labels)[-.]idx[0-9]-ubyte(?:\.gz)?", re.IGNORECASE)
_FOLDERS = (".", "raw", "MNIST/raw", "FashionMNIST/raw", "KMNIST/raw", "EMNIST/raw")
_TYPES: dict[int, np.dtype[Any]] = {0x08: np.dtype("u1"), 0x09: np.dtype("i1"), 0x0B: np.dtype(">i2"), 0x0C: np.dtype(">i4")}
_MOST_COMPRESSED = 1100  # gzip can't compress more than that


class IdxFile(NamedTuple):
    """A file, with the split it belongs to and the set that its name begins with (EMNIST has several in one folder)."""

    path: Path
    set_name: str
    split: str
    kind: str


def find_idx(path: Path) -> dict[str, tuple[Path, Path | None]] | None:
    """(images, labels or None) of each split, in a folder, in the `raw` folder that torchvision makes, or of one file of images.

    None where there are no idx files.
    """
    if path.is_file():
        own = _parse(path)
        if own is None:
            return None
        if own.kind == "labels":
            raise KinfolkError(f"`{path}` holds the labels; give the file of images, or the folder of both")
        return {"train": (path, _labels_of(own, _files(path.parent)))}
    for name in _FOLDERS:
        folder = path / name
        files = _files(folder)
        images = [file for file in files if file.kind == "images"]
        if not images:
            continue
        sets = sorted({file.set_name for file in images})
        if len(sets) > 1:
            raise KinfolkError(f"`{folder}` holds several data sets ({', '.join(sets)}); move the files of one to a folder of their own")
        images = list({file.split: file for file in reversed(images)}.values())[::-1]  # of a file and its .gz, the file
        return {file.split: (file.path, _labels_of(file, files)) for file in images}
    return None


def open_idx(splits: dict[str, tuple[Path, Path | None]], name: str) -> ArraySource:
    """The source for what `find_idx` found."""
    arrays: dict[str, tuple[Pixels, Pixels | None]] = {}
    for split, (images, labels) in splits.items():
        pixels = read_idx(images)
        if pixels.ndim not in (3, 4) or pixels.dtype != np.uint8:
            raise KinfolkError(f"`{images}` holds {pixels.dtype} of shape {pixels.shape}; images must be bytes of shape (N, H, W)")
        arrays[split] = pixels, None if labels is None else read_idx(labels)
    modified_ns = max(file.stat().st_mtime_ns for pair in splits.values() for file in pair if file is not None)
    return array_source(arrays, name=name, modified_ns=modified_ns)


def read_idx(path: Path) -> Pixels:
    """The array of an idx file; the values of a file that is not compressed are memory-mapped."""
    try:
        if path.suffix.lower() == ".gz":
            with gzip.open(path, "rb") as file:
                shape, dtype, start = _header(file)
                size = math.prod(shape) * dtype.itemsize
                if size > _MOST_COMPRESSED * path.stat().st_size:
                    raise ValueError(f"its header gives the shape {shape}, for which it is too small")
                data = file.read(size + 1)
            if len(data) != size:
                raise ValueError(f"it has {'more' if len(data) > size else 'fewer'} bytes than the shape {shape} of its header")
            return np.frombuffer(data, dtype).reshape(shape)
        with open(path, "rb") as file:
            shape, dtype, start = _header(file)
        if path.stat().st_size != start + math.prod(shape) * dtype.itemsize:
            raise ValueError(f"it has {path.stat().st_size:,} bytes, which do not fit the shape {shape} of its header")
        return np.memmap(path, dtype, "r", start, shape) if math.prod(shape) else np.zeros(shape, dtype)
    except Exception as error:  # readers raise nearly anything on a broken file
        raise KinfolkError(f"`{path}` is not a readable idx file: {first_line(error)}; download it again") from error


def _header(file: BinaryIO | gzip.GzipFile) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, type, and where the values begin."""
    zero, code, dimensions = struct.unpack(">HBB", file.read(4))
    if zero or code not in _TYPES or not 1 <= dimensions <= 4:
        raise ValueError("it does not begin with the header of whole numbers in 1 to 4 dimensions")
    return struct.unpack(f">{dimensions}I", file.read(4 * dimensions)), _TYPES[code], 4 + 4 * dimensions


def _files(folder: Path) -> list[IdxFile]:
    """The idx files of a folder, by name."""
    try:
        names = sorted(filter(_NAME.fullmatch, os.listdir(folder)))
    except OSError:  # not a folder, or one that the reader of image folders will report
        return []
    return [file for file in (_parse(folder / name) for name in names) if file is not None]


def _parse(path: Path) -> IdxFile | None:
    found = _NAME.fullmatch(path.name)
    if found is None or not path.is_file():
        return None
    split = "train" if found["split"].lower() == "train" else "test"
    return IdxFile(path, shown(found["set"] or ""), split, found["kind"].lower())


def _labels_of(images: IdxFile, files: list[IdxFile]) -> Path | None:
    found = [file.path for file in files if file.kind == "labels" and (file.set_name, file.split) == (images.set_name, images.split)]
    return found[0] if found else None
