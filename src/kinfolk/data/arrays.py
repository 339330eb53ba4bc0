"""Images as arrays: in memory, in a `.npz`, in a memory-mapped `.npy`, and in the official files of
CIFAR and MNIST. All values are converted to uint8 by one rule per array. No file can run code."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
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
    """How values become uint8, with one rule for all images: uint8 stays; bool and floats in [0, 1]
    are multiplied by 255; integers in 0 … 255 are cast; larger uint16 is multiplied by 255 /
    65535."""
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
    """Lowest and highest value, read in pieces: the array may be memory-mapped."""
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
    """Rows of one array per split; `parts` are the images of each and how their values are
    converted."""

    def __init__(
        self,
        name: str,
        parts: list[tuple[Pixels, Scale]],
        items: list[Item],
        classes: list[str] | None,
        modified_ns: int = 0,
    ) -> None:
        sizes = {images.shape[1:3] for images, _ in parts}
        native = next(iter(sizes)) if len(sizes) == 1 else None
        super().__init__(name, items, classes=classes, native_size=native)
        self._parts, self._modified_ns = parts, modified_ns

    def load(self, index: int) -> Pixels:
        part, row = self._items[index].origin
        images, scale = self._parts[part]
        pixels: Pixels = scale(images[row])
        return pixels

    def stat(self, index: int) -> tuple[int, int]:
        images, _ = self._parts[self._items[index].origin[0]]
        return math.prod(images.shape[1:]), self._modified_ns


def array_source(
    splits: Mapping[str, tuple[Pixels, npt.ArrayLike | None]],
    *,
    name: str,
    classes: list[str] | None = None,
    modified_ns: int = 0,
) -> ArraySource:
    """A source of (images, labels or None) per split; images are (N, H, W), (N, H, W, C) or, if
    unambiguous, (N, C, H, W)."""
    parts: list[tuple[Pixels, Scale]] = []
    for split, (images, _) in splits.items():
        what = f"`{split}` of {name}" if len(splits) > 1 else name
        images = find_layout(images, what)
        parts.append((images, find_scale(images, what)))
    if not any(len(images) for images, _ in parts):
        raise KinfolkError(f"{name} holds no images")
    values: list[Any] = []
    origins: list[tuple[str, int, int]] = []
    for part, (split, (images, given)) in enumerate(splits.items()):
        count = len(images)
        labels = np.full(count, None) if given is None else np.asarray(given)
        if labels.size != count:
            raise KinfolkError(
                f"{name} has {count:,} images but labels of the shape {labels.shape} in `{split}`;"
                " one label for each is needed"
            )
        values += labels.ravel().tolist()
        origins += [(split, part, row) for row in range(count)]
    encoded, classes = encode_labels(values, name, classes)
    items = [
        Item(f"{split}/{row}", label, split, origin=(part, row))
        for (split, part, row), label in zip(origins, encoded, strict=True)
    ]
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

        members = {"train": ("images", "labels")} if "images" in names else {}
        members = members or {
            split: (images, labels_)
            for images, (split, labels_) in _PAIRS.items()
            if images in names
        }
        if not members:
            needed = "`x_train` (and `y_train`, `x_test`, `y_test`) or `images` (and `labels`)"
            raise KinfolkError(f"{name} must hold {needed}; it holds {sorted(names)}")
        splits = {
            split: (read(images), read(labels_) if labels_ in names else None)
            for split, (images, labels_) in members.items()
        }
        if "classes" in names:
            classes = [str(value) for value in read("classes").ravel()]
    return array_source(splits, name=name, classes=classes, modified_ns=modified_ns)


def _check_size(archive: zipfile.ZipFile, array: str) -> None:
    """Refuses an array whose header does not fit its bytes: numpy would allocate the memory
    first."""
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
    """Turns errors of numpy into sentences. Pickled objects are never loaded."""
    try:
        yield
    except KinfolkError:
        raise
    except Exception as error:  # readers raise nearly anything on a broken file
        if "object" in str(error).lower() or "pickle" in str(error).lower():
            raise KinfolkError(
                f"{what} holds Python objects, not numbers, and is not loaded, because it could run"
                " code; save it as one array of numbers"
            ) from error
        raise KinfolkError(f"{what} is not a readable array: {first_line(error)}") from error


# The official files of CIFAR-10 and CIFAR-100
#
# CIFAR (Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009) comes as pickles,
# and a pickle is a program. Here it can only call the stand-ins below, which record the bytes of an
# array.

_MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Layout:
    """Where the parts of an archive are."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    labels: bytes
    classes: bytes

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, *self.test, self.meta)


_CIFAR = (
    Layout(
        "cifar-10-batches-py",
        tuple(f"data_batch_{n}" for n in range(1, 6)),
        ("test_batch",),
        "batches.meta",
        b"labels",
        b"label_names",
    ),
    Layout("cifar-100-python", ("train",), ("test",), "meta", b"fine_labels", b"fine_label_names"),
)


def find_cifar(path: Path) -> tuple[Path, Layout] | None:
    """The archive, the extracted folder or the folder above it; None if `path` is none of these, or
    a `.tar` that can't be read to its end, because shards are read as far as possible."""
    if path.is_dir():
        for layout in _CIFAR:
            for folder in (path, path / layout.folder):
                if all((folder / name).is_file() for name in layout.files):
                    return folder, layout
        return None
    try:
        with tarfile.open(path) as archive:
            names = set(archive.getnames())
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        if path.suffix.lower() == ".tar":
            return None
        raise KinfolkError(
            f"`{path}` is not a readable archive: {error}; download it again"
        ) from error
    for layout in _CIFAR:
        if names >= {f"{layout.folder}/{name}" for name in layout.files}:
            return path, layout
    return None


def open_cifar(path: Path, layout: Layout) -> ArraySource:
    """The source for what `find_cifar` found. CIFAR-100 gets its fine labels."""
    if path.is_dir():
        contents = {name: (path / name).read_bytes() for name in layout.files}
    else:
        with tarfile.open(path) as archive:
            contents = {name: _member(archive, f"{layout.folder}/{name}") for name in layout.files}
    try:
        loaded = {name: _unpickle(data) for name, data in contents.items()}
        classes = [bytes(name).decode() for name in loaded[layout.meta][layout.classes]]
        splits: dict[str, tuple[Pixels, Any]] = {}
        for split, parts in (("train", layout.train), ("test", layout.test)):
            images = np.concatenate([_images(loaded[part][b"data"]) for part in parts])
            labels = [int(label) for part in parts for label in loaded[part][layout.labels]]
            splits[split] = images, labels
    except KinfolkError:
        raise
    except Exception as error:  # a broken pickle raises nearly anything
        raise KinfolkError(
            f"`{path}` is not an official CIFAR archive: {type(error).__name__}: {error}; download"
            " it again"
        ) from error
    return array_source(splits, name=f"`{path}`", classes=classes)


def _unpickle(data: bytes) -> Any:
    return _Unpickler(io.BytesIO(data), encoding="bytes").load()


class _Array:
    """Stand-in for an array: records its pickled state."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


class _DataType:
    """Stand-in for a data type: records its code, such as "u1"."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        self.code = code if isinstance(code, str) else code.decode()

    def __setstate__(self, state: object) -> None:
        pass


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DataType,
    ("_codecs", "encode"): lambda text, *_: text.encode("latin1"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise KinfolkError(
                f"the archive asks to run `{module}.{name}`, which no CIFAR archive does; it is"
                " refused, download it again"
            )
        return _ALLOWED[module, name]


def _images(array: Any) -> Pixels:
    _, shape, kind, column_major, raw = array.state
    if kind.code != "u1" or len(shape) != 2 or shape[1] != 3072:
        raise ValueError(f"images of type {kind.code} and shape {shape}")
    rows = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if column_major else "C")
    images: Pixels = rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.getmember(name)
    file = archive.extractfile(member)
    if file is None or member.size > _MAX_BYTES:
        raise KinfolkError(
            f"`{name}` in the archive is not a file of a CIFAR archive; download it again"
        )
    return file.read()


# MNIST's idx files
#
# `train-images-idx3-ubyte` and so on, possibly compressed with gzip: two zero bytes, a type code,
# the number of dimensions, each dimension as a big-endian 32-bit number, then the values.
# Fashion-MNIST and KMNIST use the same format.

_TRAIN_AND_TEST = {"train": ("train",), "test": ("t10k", "test")}


def find_idx(path: Path) -> Path | None:
    """The folder of MNIST's files: `path`, or the `raw` folder that torchvision makes in it, or
    None."""
    if path.is_file() and path.name.removesuffix(".gz").endswith("-ubyte"):
        raise KinfolkError(f"`{path}` is one of MNIST's idx files; give the folder of all of them")
    folders = (path, path / "raw", *sorted(path.glob("*MNIST/raw")))
    return next((folder for folder in folders if _idx_file(folder, "train", "images")), None)


def open_idx(folder: Path, name: str) -> ArraySource:
    arrays: dict[str, tuple[Pixels, Pixels | None]] = {}
    newest = 0
    for split in _TRAIN_AND_TEST:
        images, labels = (_idx_file(folder, split, kind) for kind in ("images", "labels"))
        if images is not None:
            arrays[split] = read_idx(images), None if labels is None else read_idx(labels)
            newest = max(newest, *(file.stat().st_mtime_ns for file in (images, labels or images)))
    return array_source(arrays, name=name, modified_ns=newest)


def _idx_file(folder: Path, split: str, kind: str) -> Path | None:
    for start in _TRAIN_AND_TEST[split]:
        found = sorted(folder.glob(f"{start}-{kind}[-.]idx[13]-ubyte*"))
        if found:
            return found[0]
    return None


def read_idx(path: Path) -> Pixels:
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else open(path, "rb") as file:
            zero, code, dimensions = struct.unpack(">HBB", file.read(4))
            if zero or code != 0x08 or not 1 <= dimensions <= 3:
                raise ValueError("it does not begin with the header of bytes in 1 to 3 dimensions")
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            data = file.read(min(math.prod(shape), _MAX_BYTES) + 1)
        if len(data) != math.prod(shape):
            raise ValueError(f"its bytes do not fit the shape {shape} of its header")
        return np.frombuffer(data, np.uint8).reshape(shape)
    except Exception as error:  # readers raise nearly anything on a broken file
        raise KinfolkError(
            f"`{path}` is not a readable idx file: {first_line(error)}; download it again"
        ) from error
