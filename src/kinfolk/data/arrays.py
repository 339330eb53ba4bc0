"""Images as arrays: in memory, in a `.npz`, or in a memory-mapped `.npy`."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from kinfolk.data.labels import encode_labels
from kinfolk.data.pixels import Scale, find_layout, find_scale
from kinfolk.data.sources import Item, Pixels, Source
from kinfolk.errors import KinfolkError

_PAIRS = {"x_train": ("train", "y_train"), "x_val": ("val", "y_val"), "x_test": ("test", "y_test")}


@final
class ArraySource(Source):
    """Rows of one array per split, all of one height and width."""

    def __init__(
        self, name: str, parts: list[tuple[Pixels, Scale]], items: list[Item], classes: list[str] | None, modified_ns: int = 0
    ) -> None:
        sizes = sorted({images.shape[1:3] for images, _ in parts})
        self.name, self.classes, self.refused = name, classes, []
        self.native_size = (int(sizes[0][0]), int(sizes[0][1])) if len(sizes) == 1 else None
        self._parts, self._items, self._modified_ns = parts, items, modified_ns
        self._starts = np.cumsum([0, *(len(images) for images, _ in parts)])

    def items(self) -> list[Item]:
        return self._items

    def load(self, index: int) -> Pixels:
        images, scale, row = self._find(index)
        return scale(images[row])

    def label(self, index: int) -> int | None:
        return self._items[index].label

    def path(self, index: int) -> None:
        return None

    def stat(self, index: int) -> tuple[int, int]:
        images, _, _ = self._find(index)
        return int(np.prod(images.shape[1:])), self._modified_ns

    def _find(self, index: int) -> tuple[Pixels, Scale, int]:
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        images, scale = self._parts[part]
        return images, scale, index - int(self._starts[part])


def array_source(
    splits: Mapping[str, tuple[Pixels, npt.ArrayLike | None]], *, name: str, classes: list[str] | None = None, modified_ns: int = 0
) -> ArraySource:
    """A source of (images, labels or None) per split.

    Images may be (N, H, W), (N, H, W, C) or, where it is unambiguous, (N, C, H, W), with C of 1, 3 or 4; uint8, or what
    `find_scale` takes to uint8.
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
                f"{name} has {count:,} images but labels of the shape {labels.shape} in `{split}`; one label for each is needed"
            )
    values: list[Any] = []
    for labels, count in zip(given, counts, strict=True):
        values += [None] * count if labels is None else labels.ravel().tolist()
    encoded, classes = encode_labels(values, name, classes)
    keys = [(split, f"{split}/{row}") for split, count in zip(splits, counts, strict=True) for row in range(count)]
    items = [Item(key, label, split) for (split, key), label in zip(keys, encoded, strict=True)]
    return ArraySource(name, parts, items, classes, modified_ns)


def open_arrays(path: Path, labels: npt.ArrayLike | None = None) -> ArraySource:
    """A `.npz` with `x_train` / `y_train` / `x_test` / `y_test` or `images` / `labels` (and perhaps `classes`), or a `.npy`."""
    modified_ns = path.stat().st_mtime_ns
    if path.suffix.lower() == ".npy":
        return array_source({"train": (_read(path, None), labels)}, name=f"`{path}`", modified_ns=modified_ns)
    arrays = _read(path, None)
    try:
        names = set(arrays.files)
        classes = [str(value) for value in _read(path, "classes", arrays).ravel()] if "classes" in names else None
        if "images" in names:
            wanted = {"train": ("images", "labels")}
        else:
            wanted = {split: (images, labels_) for images, (split, labels_) in _PAIRS.items() if images in names}
        if not wanted:
            raise KinfolkError(
                f"`{path}` must hold `x_train` (and `y_train`, `x_test`, `y_test`) or `images` (and `labels`); it holds {sorted(names)}"
            )
        splits = {
            split: (_read(path, images, arrays), _read(path, labels_, arrays) if labels_ in names else None)
            for split, (images, labels_) in wanted.items()
        }
    finally:
        arrays.close()
    return array_source(splits, name=f"`{path}`", classes=classes, modified_ns=modified_ns)


def _read(path: Path, name: str | None, arrays: Any = None) -> Any:
    """The file (`name` None) or one array of it. Pickled objects are never loaded: they could run code."""
    try:
        if name is not None:
            return arrays[name]
        return np.load(path, allow_pickle=False, mmap_mode="r" if path.suffix.lower() == ".npy" else None)
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        what = f"`{name}` of `{path}`" if name is not None else f"`{path}`"
        if "object" in str(error).lower() or "pickle" in str(error).lower():
            raise KinfolkError(
                f"{what} holds Python objects, not numbers, and is not loaded (it could run code); save it as one uint8 array"
            ) from error
        raise KinfolkError(f"{what} is not a readable array: {error}") from error
