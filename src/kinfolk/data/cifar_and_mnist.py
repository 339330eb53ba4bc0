"""The official files of CIFAR-10 and CIFAR-100, with CIFAR-100's superclasses, and of MNIST.

CIFAR (Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009) comes as pickles,
and a pickle is a program. Here it can only call the stand-ins below, which record the bytes of an
array.

MNIST comes as idx files (`train-images-idx3-ubyte` and so on), possibly compressed with gzip: two
zero bytes, a type code, the number of dimensions, each dimension as a big-endian 32-bit number,
then the values. Fashion-MNIST and KMNIST use the same format.
"""

from __future__ import annotations

import gzip
import io
import math
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kinfolk.data.arrays import ArraySource, array_source
from kinfolk.data.source import Pixels
from kinfolk.errors import KinfolkError
from kinfolk.files import first_line

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


CIFAR10 = Layout(
    "cifar-10-batches-py",
    tuple(f"data_batch_{n}" for n in range(1, 6)),
    ("test_batch",),
    "batches.meta",
    b"labels",
    b"label_names",
)
CIFAR100 = Layout(
    "cifar-100-python", ("train",), ("test",), "meta", b"fine_labels", b"fine_label_names"
)


def find_cifar(path: Path) -> tuple[Path, Layout] | None:
    """Finds the archive, the extracted folder or the folder above it. None if `path` is none of
    these.

    Also None for a `.tar` that can't be read to its end, because shards are read as far as
    possible.
    """
    if path.is_dir():
        for layout in (CIFAR10, CIFAR100):
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
    return next(
        (
            (path, layout)
            for layout in (CIFAR10, CIFAR100)
            if names >= {f"{layout.folder}/{name}" for name in layout.files}
        ),
        None,
    )


def open_cifar(path: Path, layout: Layout) -> ArraySource:
    """The source for what `find_cifar` found. CIFAR-100 gets its fine labels."""
    if path.is_dir():
        contents = {name: (path / name).read_bytes() for name in layout.files}
    else:
        with tarfile.open(path) as archive:
            contents = {name: _member(archive, f"{layout.folder}/{name}") for name in layout.files}
    loaded = {name: safe_load(data, f"`{name}` of `{path}`") for name, data in contents.items()}
    try:
        classes = [bytes(name).decode() for name in loaded[layout.meta][layout.classes]]
        splits: dict[str, tuple[Pixels, Any]] = {}
        for split, parts in (("train", layout.train), ("test", layout.test)):
            images = np.concatenate([_images(loaded[part][b"data"]) for part in parts])
            splits[split] = (
                images,
                [int(label) for part in parts for label in loaded[part][layout.labels]],
            )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise KinfolkError(
            f"`{path}` is not an official CIFAR archive: {type(error).__name__}: {error}; download"
            " it again"
        ) from error
    return array_source(splits, name=f"`{path}`", classes=classes)


def safe_load(data: bytes, what: str) -> Any:
    """Unpickles plain values and arrays of bytes; anything else is refused before it is called."""
    try:
        return _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except KinfolkError:
        raise
    except Exception as error:  # a broken pickle raises nearly anything
        raise KinfolkError(
            f"{what} is not a readable pickle: {type(error).__name__}: {error}; download it again"
        ) from error


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


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _encode(text: str, _: object = None) -> bytes:
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DataType,
    ("_codecs", "encode"): _encode,
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


SUPERCLASSES: dict[str, tuple[str, ...]] = {
    "aquatic_mammals": ("beaver", "dolphin", "otter", "seal", "whale"),
    "fish": ("aquarium_fish", "flatfish", "ray", "shark", "trout"),
    "flowers": ("orchid", "poppy", "rose", "sunflower", "tulip"),
    "food_containers": ("bottle", "bowl", "can", "cup", "plate"),
    "fruit_and_vegetables": ("apple", "mushroom", "orange", "pear", "sweet_pepper"),
    "household_electrical_devices": ("clock", "keyboard", "lamp", "telephone", "television"),
    "household_furniture": ("bed", "chair", "couch", "table", "wardrobe"),
    "insects": ("bee", "beetle", "butterfly", "caterpillar", "cockroach"),
    "large_carnivores": ("bear", "leopard", "lion", "tiger", "wolf"),
    "large_man-made_outdoor_things": ("bridge", "castle", "house", "road", "skyscraper"),
    "large_natural_outdoor_scenes": ("cloud", "forest", "mountain", "plain", "sea"),
    "large_omnivores_and_herbivores": ("camel", "cattle", "chimpanzee", "elephant", "kangaroo"),
    "medium_mammals": ("fox", "porcupine", "possum", "raccoon", "skunk"),
    "non-insect_invertebrates": ("crab", "lobster", "snail", "spider", "worm"),
    "people": ("baby", "boy", "girl", "man", "woman"),
    "reptiles": ("crocodile", "dinosaur", "lizard", "snake", "turtle"),
    "small_mammals": ("hamster", "mouse", "rabbit", "shrew", "squirrel"),
    "trees": ("maple_tree", "oak_tree", "palm_tree", "pine_tree", "willow_tree"),
    "vehicles_1": ("bicycle", "bus", "motorcycle", "pickup_truck", "train"),
    "vehicles_2": ("lawn_mower", "rocket", "streetcar", "tank", "tractor"),
}
_TRAIN_AND_TEST = {"train": ("train",), "test": ("t10k", "test")}


def find_idx(path: Path) -> Path | None:
    """The folder of MNIST's files: `path`, or the `raw` folder that torchvision makes in it. None
    if there are no such files."""
    if path.is_file() and path.name.removesuffix(".gz").endswith("-ubyte"):
        raise KinfolkError(f"`{path}` is one of MNIST's idx files; give the folder of all of them")
    folders = (path, path / "raw", *sorted(path.glob("*MNIST/raw")))
    return next((folder for folder in folders if _idx_file(folder, "train", "images")), None)


def open_idx(folder: Path, name: str) -> ArraySource:
    """The source for what `find_idx` found."""
    arrays: dict[str, tuple[Pixels, Pixels | None]] = {}
    newest = 0
    for split in _TRAIN_AND_TEST:
        images, labels = (_idx_file(folder, split, kind) for kind in ("images", "labels"))
        if images is not None:
            arrays[split] = read_idx(images), None if labels is None else read_idx(labels)
            newest = max(newest, *(file.stat().st_mtime_ns for file in (images, labels or images)))
    return array_source(arrays, name=name, modified_ns=newest)


def _idx_file(folder: Path, split: str, kind: str) -> Path | None:
    """The file of images or labels of a split; of a file and its .gz, the file."""
    for start in _TRAIN_AND_TEST[split]:
        found = sorted(folder.glob(f"{start}-{kind}[-.]idx[13]-ubyte*"))
        if found:
            return found[0]
    return None


def read_idx(path: Path) -> Pixels:
    """The array of bytes of an idx file."""
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
