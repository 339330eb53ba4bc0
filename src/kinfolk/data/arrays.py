"""Images as arrays: in memory, `.npz`, memory-mapped `.npy`, and the archives of CIFAR. No file can
run code."""

from __future__ import annotations

import io
import math
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from kinfolk.data.labels import encode_labels
from kinfolk.data.source import Item, Pixels, Source
from kinfolk.errors import KinfolkError
from kinfolk.files import explain_read_errors, first_line

_CHANNELS = (1, 3, 4)


def find_layout(images: Pixels, what: str) -> Pixels:
    shape = images.shape
    first, last = (images.ndim > at and shape[at] in _CHANNELS for at in (1, -1))
    is_good = first != last if images.ndim == 4 else images.ndim == 3 and not last
    if not is_good or 0 in shape[1:]:
        raise KinfolkError(
            f"{what} has the shape {shape}; images must be (N, H, W), (N, H, W, C) or (N, C, H, W)"
            " with 1, 3 or 4 channels, and have pixels"
        )
    return np.moveaxis(images, 1, 3) if images.ndim == 4 and first else images


def find_factor(images: Pixels, what: str) -> int:
    """The factor for uint8: 255 for bool and floats in [0, 1], else 1."""
    if images.dtype.kind not in "biuf":
        raise KinfolkError(
            f"{what} has the type {images.dtype}; images must be numbers, preferably uint8"
        )
    if images.dtype == np.uint8 or len(images) == 0:
        return 1
    low, high = images.min(), images.max()
    limit, factor = (1, 255) if images.dtype.kind in "bf" else (255, 1)
    if not (low >= 0 and high <= limit):
        raise KinfolkError(
            f"{what} has {images.dtype} values in [{low:g}, {high:g}]; they must be in"
            f" [0, {limit}], or uint8"
        )
    return factor


def to_uint8(image: Pixels, factor: int) -> Pixels:
    if factor == 1:
        return image.astype(np.uint8, copy=False)
    return np.rint(image.astype(np.float64) * factor).astype(np.uint8)


@final
class ArraySource(Source):
    """`splits`: (images, labels or None) of each; images are (N, H, W), (N, H, W, C) or, if
    unambiguous, (N, C, H, W)."""

    def __init__(
        self,
        splits: Mapping[str, tuple[Pixels, npt.ArrayLike | None]],
        *,
        name: str,
        classes: list[str] | None = None,
        modified_ns: int = 0,
    ) -> None:
        self._parts: list[tuple[Pixels, int]] = []
        labels: list[Any] = []
        origins: list[tuple[str, int, int]] = []
        for part, (split, (images, given)) in enumerate(splits.items()):
            what = f"`{split}` of {name}" if len(splits) > 1 else name
            images = find_layout(images, what)
            self._parts.append((images, find_factor(images, what)))
            values = np.full(len(images), None) if given is None else np.asarray(given)
            if values.size != len(images):
                raise KinfolkError(
                    f"{name} has {len(images):,} images but labels of the shape {values.shape} in"
                    f" `{split}`; one label for each is needed"
                )
            labels += values.ravel().tolist()
            origins += [(split, part, row) for row in range(len(images))]
        if not origins:
            raise KinfolkError(f"{name} holds no images")
        encoded, classes = encode_labels(labels, name, classes)
        items = [
            Item(f"{split}/{row}", label, split, origin=(part, row))
            for (split, part, row), label in zip(origins, encoded, strict=True)
        ]
        sizes = {images.shape[1:3] for images, _ in self._parts}
        native = next(iter(sizes)) if len(sizes) == 1 else None
        super().__init__(name, items, classes=classes, native_size=native)
        self._modified_ns = modified_ns

    def load(self, index: int) -> Pixels:
        part, row = self._items[index].origin
        images, factor = self._parts[part]
        return to_uint8(images[row], factor)

    def stat(self, index: int) -> tuple[int, int]:
        images, _ = self._parts[self._items[index].origin[0]]
        return math.prod(images.shape[1:]), self._modified_ns


def open_arrays(path: Path, labels: npt.ArrayLike | None = None) -> ArraySource:
    modified_ns, name = path.stat().st_mtime_ns, f"`{path}`"
    if path.suffix.lower() == ".npy":
        # a shape too large for any memory is refused by numpy a line later
        with explain_read_errors(name), np.errstate(over="ignore"):
            images = np.lib.format.open_memmap(path, mode="r")
        return ArraySource({"train": (images, labels)}, name=name, modified_ns=modified_ns)
    with open(path, "rb") as file:
        with explain_read_errors(name):
            arrays: Any = np.load(file, allow_pickle=False)
        names = set(getattr(arrays, "files", ()))

        def read(array: str) -> Pixels | None:
            if array not in names:
                return None
            with explain_read_errors(f"`{array}` of {name}"):
                _check_size(arrays.zip, array)
                return np.asarray(arrays[array])

        members = {split: (f"x_{split}", f"y_{split}") for split in ("train", "val", "test")}
        members = {"train": ("images", "labels")} if "images" in names else members
        splits = {
            split: (array, read(y))
            for split, (x, y) in members.items()
            if (array := read(x)) is not None
        }
        if not splits:
            needed = "`x_train` (and `y_train`, `x_test`, `y_test`) or `images` (and `labels`)"
            raise KinfolkError(f"{name} must hold {needed}; it holds {sorted(names)}")
        named = read("classes")
    classes = None if named is None else [str(value) for value in named.ravel()]
    return ArraySource(splits, name=name, classes=classes, modified_ns=modified_ns)


def _check_size(archive: zipfile.ZipFile, array: str) -> None:
    """For a false header, numpy would allocate the memory first."""
    info = archive.getinfo(f"{array}.npy" if f"{array}.npy" in archive.namelist() else array)
    with archive.open(info) as member:
        is_first = npy.read_magic(member) == (1, 0)
        read = npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0
        shape, _, dtype = read(member)
        left = info.file_size - member.tell()
    fits = all(side >= 0 for side in shape) and math.prod(shape) * dtype.itemsize == left
    if not fits and not dtype.hasobject:
        raise ValueError(f"it has {left:,} bytes for the shape {shape}")


# CIFAR, whose official archives are pickles

_MAX_BYTES = 1 << 30


class Layout(NamedTuple):
    folder: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels: bytes
    classes: bytes

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, self.test, self.meta)


_BATCHES = tuple(f"data_batch_{n}" for n in range(1, 6))
_CIFAR = (
    Layout(
        "cifar-10-batches-py", _BATCHES, "test_batch", "batches.meta", b"labels", b"label_names"
    ),
    Layout("cifar-100-python", ("train",), "test", "meta", b"fine_labels", b"fine_label_names"),
)


def find_cifar(path: Path) -> tuple[Path, Layout] | None:
    """The archive, the extracted folder or the folder above it. A `.tar` that can't be read to its
    end is none, because shards are read as far as possible."""
    if path.is_dir():
        for kind in _CIFAR:
            for folder in (path, path / kind.folder):
                if all((folder / name).is_file() for name in kind.files):
                    return folder, kind
        return None
    try:
        with tarfile.open(path) as archive:
            names = set(archive.getnames())
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        if path.suffix.lower() == ".tar":
            return None
        why = first_line(error).removesuffix(":")
        raise KinfolkError(
            f"`{path}` is not a readable archive: {why}; download it again"
        ) from error
    for kind in _CIFAR:
        if names >= {f"{kind.folder}/{name}" for name in kind.files}:
            return path, kind
    return None


def open_cifar(path: Path, layout: Layout) -> ArraySource:
    with explain_read_errors(f"`{path}`", "official CIFAR archive"):
        if path.is_dir():
            contents = {name: (path / name).read_bytes() for name in layout.files}
        else:
            with tarfile.open(path) as archive:
                contents = {n: _member(archive, f"{layout.folder}/{n}") for n in layout.files}
        loaded = {
            name: _Unpickler(io.BytesIO(data), encoding="bytes").load()
            for name, data in contents.items()
        }
        classes = [bytes(name).decode() for name in loaded[layout.meta][layout.classes]]
        splits: dict[str, tuple[Pixels, Any]] = {}
        for split, parts in (("train", layout.train), ("test", (layout.test,))):
            images = np.concatenate([loaded[part][b"data"] for part in parts])
            if images.dtype != np.uint8 or images.shape[1:] != (3072,):
                raise ValueError(f"images of type {images.dtype} and shape {images.shape}")
            labels = [int(label) for part in parts for label in loaded[part][layout.labels]]
            splits[split] = images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels
    return ArraySource(splits, name=f"`{path}`", classes=classes)


_RECONSTRUCT: Any = np.empty(0).__reduce__()[0]
_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): lambda text, *_: text.encode("latin1"),
}


class _Unpickler(pickle.Unpickler):
    """Plain values and arrays of bytes; anything else is refused before it is called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise KinfolkError(
                f"the archive asks to run `{module}.{name}`, which no CIFAR archive does; it is"
                " refused, download it again"
            )
        return _ALLOWED[module, name]


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.getmember(name)
    file = archive.extractfile(member)
    if file is None or member.size > _MAX_BYTES:
        raise KinfolkError(
            f"`{name}` in the archive is not a file of a CIFAR archive; download it again"
        )
    return file.read()
