"""Images as arrays: in memory, in a `.npz`, or in a memory-mapped `.npy`.

The axis of the channels and the range of the values are found out, and all values are converted to
uint8 by one rule per array.
"""

from __future__ import annotations

import math
import zipfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from kinfolk.data.labels import encode_labels
from kinfolk.data.source import Item, Pixels, Source
from kinfolk.errors import KinfolkError
from kinfolk.files import first_line, npy_header

_CHANNELS = (1, 3, 4)
_CHUNK_BYTES = 1 << 26


@dataclass(frozen=True)
class Scale:
    """Converts values to uint8 by `round(value * factor)`; a factor of 1 only casts integers."""

    factor: float

    def __call__(self, image: Pixels) -> Pixels:
        if image.dtype == np.uint8:
            return np.asarray(image)
        if self.factor == 1:
            return image.astype(np.uint8)
        return np.rint(image.astype(np.float64) * self.factor).astype(np.uint8)


def find_layout(images: Pixels, what: str) -> Pixels:
    """A view of the images with shape (N, H, W) or (N, H, W, C)."""
    shape = images.shape
    if images.ndim == 4:
        last, second = shape[3] in _CHANNELS, shape[1] in _CHANNELS
        if second and not last:
            images = np.moveaxis(images, 1, 3)
        elif second == last:
            reason = (
                "channels may be the second or the last axis"
                if last
                else "neither the second nor the last axis has 1, 3 or 4 channels"
            )
            raise KinfolkError(f"{what} has the shape {shape}: {reason}; give (N, H, W, 3)")
    elif images.ndim != 3 or shape[2] in _CHANNELS:
        raise KinfolkError(
            f"{what} has the shape {shape}; images must be (N, H, W), (N, H, W, 3) or (N, 3, H, W)"
        )
    if 0 in images.shape[1:]:
        raise KinfolkError(f"{what} has the shape {shape}: its images have no pixels")
    return images


def find_scale(images: Pixels, what: str) -> Scale:
    """How values are converted to uint8, with one rule for all images, so that no image is
    stretched on its own.

    uint8 stays; bool and floats in [0, 1] are multiplied by 255; integers in 0 … 255 are cast;
    uint16 above 255 is multiplied by 255 / 65535.
    """
    kind = images.dtype.kind
    if images.dtype == np.uint8 or len(images) == 0:
        return Scale(1)
    if kind == "b":
        return Scale(255)
    if kind not in "iuf":
        raise KinfolkError(
            f"{what} has the type {images.dtype}; images must be numbers, best uint8"
        )
    low, high = _value_range(images, what)
    if kind == "f":
        if low < 0 or high > 1:
            raise KinfolkError(
                f"{what} has {images.dtype} values in [{low:g}, {high:g}]; floats must be in [0,"
                " 1], or convert to uint8"
            )
        return Scale(255)
    if low >= 0 and high <= 255:
        return Scale(1)
    if images.dtype == np.uint16:
        return Scale(255 / 65535)
    raise KinfolkError(
        f"{what} has {images.dtype} values in [{low:g}, {high:g}]; integers must be in [0, 255], or"
        " convert to uint8"
    )


def _value_range(images: Pixels, what: str) -> tuple[float, float]:
    """Lowest and highest value, read in pieces so that a memory-mapped array is never loaded as a
    whole. NaN is refused."""
    step = max(1, _CHUNK_BYTES // max(1, images[0].nbytes))
    low, high = np.inf, -np.inf
    for start in range(0, len(images), step):
        piece = images[start : start + step]
        if piece.dtype.kind == "f" and not np.isfinite(piece).all():
            bad = start + int(np.flatnonzero(~np.isfinite(piece).reshape(len(piece), -1).all(1))[0])
            raise KinfolkError(
                f"{what} holds NaN or infinite values, first in image {bad}; remove them"
            )
        low, high = min(low, float(piece.min())), max(high, float(piece.max()))
    return low, high


_PAIRS = {"x_train": ("train", "y_train"), "x_val": ("val", "y_val"), "x_test": ("test", "y_test")}


@final
class ArraySource(Source):
    """Rows of one array per split, all of one height and width."""

    def __init__(
        self,
        name: str,
        parts: list[tuple[Pixels, Scale]],
        items: list[Item],
        classes: list[str] | None,
        modified_ns: int = 0,
    ) -> None:
        sizes = sorted({images.shape[1:3] for images, _ in parts})
        self.name, self.classes, self.refused = name, classes, []
        self.native_size = (int(sizes[0][0]), int(sizes[0][1])) if len(sizes) == 1 else None
        self._parts, self._items = parts, items
        self._starts = [
            sum(len(images) for images, _ in parts[:part]) for part in range(len(parts))
        ]
        self._stats = [(math.prod(images.shape[1:]), modified_ns) for images, _ in parts]

    def load(self, index: int) -> Pixels:
        part = bisect_right(self._starts, index) - 1
        images, scale = self._parts[part]
        return scale(images[index - self._starts[part]])

    def stat(self, index: int) -> tuple[int, int]:
        return self._stats[bisect_right(self._starts, index) - 1]


def array_source(
    splits: Mapping[str, tuple[Pixels, npt.ArrayLike | None]],
    *,
    name: str,
    classes: list[str] | None = None,
    modified_ns: int = 0,
) -> ArraySource:
    """A source of (images, labels or None) per split.

    Images may be (N, H, W), (N, H, W, C) or, if unambiguous, (N, C, H, W), with C of 1, 3 or 4; of
    type uint8, or of a type that `find_scale` accepts.
    """
    parts: list[tuple[Pixels, Scale]] = []
    for split, (images, _) in splits.items():
        what = f"`{split}` of {name}" if len(splits) > 1 else name
        images = find_layout(images, what)
        parts.append((images, find_scale(images, what)))
    counts = [len(images) for images, _ in parts]
    if sum(counts) == 0:
        raise KinfolkError(f"{name} holds no images")
    given = [None if labels is None else np.asarray(labels) for _, labels in splits.values()]
    for split, labels, count in zip(splits, given, counts, strict=True):
        if labels is not None and labels.size != count:
            raise KinfolkError(
                f"{name} has {count:,} images but labels of the shape {labels.shape} in `{split}`;"
                " one label for each is needed"
            )
    values: list[Any] = []
    for labels, count in zip(given, counts, strict=True):
        values += [None] * count if labels is None else labels.ravel().tolist()
    encoded, classes = encode_labels(values, name, classes)
    keys = [
        (split, f"{split}/{row}")
        for split, count in zip(splits, counts, strict=True)
        for row in range(count)
    ]
    items = [Item(key, label, split) for (split, key), label in zip(keys, encoded, strict=True)]
    return ArraySource(name, parts, items, classes, modified_ns)


def open_arrays(path: Path, labels: npt.ArrayLike | None = None) -> ArraySource:
    """Opens a `.npz` with `x_train`, `y_train`, `x_test`, `y_test` or with `images`, `labels` (and
    perhaps `classes`), or a `.npy`."""
    modified_ns, name, classes = path.stat().st_mtime_ns, f"`{path}`", None
    if path.suffix.lower() == ".npy":
        # a shape too large for any memory is refused by numpy a line later
        with _clear_errors(name), np.errstate(over="ignore"):
            images = np.lib.format.open_memmap(path, mode="r")
        return array_source({"train": (images, labels)}, name=name, modified_ns=modified_ns)
    with ExitStack() as stack:
        with _clear_errors(name):
            arrays: Any = np.load(stack.enter_context(open(path, "rb")), allow_pickle=False)
        names = set(getattr(arrays, "files", ()))

        def read(array: str) -> Pixels:
            with _clear_errors(f"`{array}` of {name}"):
                _check_size(arrays.zip, array)
                return np.asarray(arrays[array])

        wanted = {"train": ("images", "labels")} if "images" in names else {}
        wanted = wanted or {
            split: (images, labels_)
            for images, (split, labels_) in _PAIRS.items()
            if images in names
        }
        if not wanted:
            needed = "`x_train` (and `y_train`, `x_test`, `y_test`) or `images` (and `labels`)"
            raise KinfolkError(f"{name} must hold {needed}; it holds {sorted(names)}")
        splits = {
            split: (read(images), read(labels_) if labels_ in names else None)
            for split, (images, labels_) in wanted.items()
        }
        if "classes" in names:
            classes = [str(value) for value in read("classes").ravel()]
    return array_source(splits, name=name, classes=classes, modified_ns=modified_ns)


def _check_size(archive: zipfile.ZipFile, array: str) -> None:
    """Refuses an array whose header does not fit the bytes in the archive: numpy would allocate the
    memory first."""
    info = archive.getinfo(f"{array}.npy" if f"{array}.npy" in archive.namelist() else array)
    with archive.open(info) as member:
        shape, _, dtype = npy_header(member)
        left = info.file_size - member.tell()
    if not dtype.hasobject and (
        any(side < 0 for side in shape) or math.prod(shape) * dtype.itemsize != left
    ):
        raise ValueError(f"it has {left:,} bytes for the shape {shape}")


@contextmanager
def _clear_errors(what: str) -> Iterator[None]:
    """Turns errors of numpy into sentences. Pickled objects are never loaded, because they could
    run code."""
    try:
        yield
    except KinfolkError:
        raise
    except Exception as error:  # readers raise nearly anything on a broken file
        if "object" in str(error).lower() or "pickle" in str(error).lower():
            hint = "save it as one array of numbers"
            raise KinfolkError(
                f"{what} holds Python objects, not numbers, and is not loaded, because it could run"
                f" code; {hint}"
            ) from error
        raise KinfolkError(f"{what} is not a readable array: {first_line(error)}") from error
