"""Opening a data source by its name, its path or its object."""

from __future__ import annotations

import difflib
import io
import logging
import os
import stat
import statistics
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from kinfolk.data.arrays import (
    ArraySource,
    find_cifar,
    find_factor,
    find_layout,
    open_arrays,
    open_cifar,
    to_uint8,
)
from kinfolk.data.decode import to_rgb
from kinfolk.data.labels import SPLITS, split_name
from kinfolk.data.shards import expand, find_shards, open_shards
from kinfolk.data.source import FileSource, Item, Pixels, Refusals, Source
from kinfolk.data.table import Columns, find_hugging_face, open_hugging_face, open_table
from kinfolk.errors import KinfolkError, UsageError, short

_NUM_PROBED = 16


def open_source(
    spec: object,
    *,
    labels: npt.ArrayLike | None = None,
    labels_from_folders: bool | None = False,
    index_dir: str | Path | None = None,
    **columns: str | None,
) -> Source:
    """Opens a data source by its name, its path or its object.

    Args:
        spec: "digits"; the path of an image folder, a `.npz` / `.npy` file, a `.csv` / `.tsv` /
            `.parquet` table, the official CIFAR-10/100 archive, a folder of Hugging Face
            `datasets`, or webdataset shards (a `.tar`, a folder of them, or a pattern such as
            `shards/{000..331}.tar`); an array or tensor of images, or (images, labels); or a
            map-style `Dataset`, or a mapping from split to `Dataset`.
        labels: of an array, a tensor or a `.npy` file.
        labels_from_folders: use the first folder (below `train/` …) of each file as its class;
            None: only if `spec` is a folder of images.
        index_dir: a cache folder in which `Source.keep` may have written an index of shards.
        columns: names of a table's columns; see `Columns`.
    """
    if isinstance(spec, tuple) and len(spec) == 2 and labels is None:
        spec, labels = spec
        if not isinstance(spec, np.ndarray | torch.Tensor):
            raise UsageError(
                "(images, labels) must be two arrays or tensors; the images are"
                f" {type(spec).__name__}"
            )
    if isinstance(spec, torch.Tensor):
        spec = spec.detach().cpu().numpy()
    path = Path(spec).expanduser() if isinstance(spec, str | os.PathLike) else None
    is_npy = path is not None and path.suffix.lower() == ".npy"
    if labels is not None and not is_npy and not isinstance(spec, np.ndarray):
        raise UsageError(
            "`labels` belong to an array or a .npy file; other sources bring their own"
        )
    if labels_from_folders and (path is None or spec == "digits" or path.is_file()):
        raise UsageError(
            "`labels_from_folders` needs a folder of images, not"
            f" {type(spec).__name__ if path is None else short(str(spec))}"
        )
    if isinstance(spec, np.ndarray):
        return ArraySource({"train": (spec, labels)}, name="the array")
    if path is None:
        return DatasetSource(spec if isinstance(spec, Mapping) else {"train": spec})
    if spec == "digits":
        return digits()
    if not path.exists():
        if shards := expand(str(spec)):
            return open_shards({"train": shards}, f"`{short(str(spec))}`", index_dir)
        raise UsageError(f"there is no file or folder `{short(str(spec))}`{_where_else(path)}")
    return _open_path(path, labels, labels_from_folders, Columns(**columns), index_dir)  # type: ignore[arg-type]


def _open_path(
    path: Path,
    labels: npt.ArrayLike | None,
    labels_from_folders: bool | None,
    columns: Columns,
    index_dir: str | Path | None,
) -> Source:
    name, kind = f"`{path}`", "folder" if path.is_dir() else path.name.lower()
    if (tables := find_hugging_face(path, columns.image_column)) is not None:
        if labels_from_folders:
            raise UsageError(
                f"`labels_from_folders` needs a folder of images; {name} holds tables of images,"
                " whose labels are a column"
            )
        return open_hugging_face(tables, name, columns)
    if kind == "folder" or kind.endswith((".tar.gz", ".tgz", ".tar")):
        if (found := find_cifar(path)) is not None:
            return open_cifar(*found)
        if kind.endswith(("gz", "tgz")):
            raise KinfolkError(
                f"{name} is not an official CIFAR-10 or CIFAR-100 archive (python version);"
                " unpack it and give the folder, or the .tar"
            )
        if shards := find_shards(path):
            return open_shards(shards, name, index_dir)
        return open_folder(path, labels_from_folders=labels_from_folders is not False)
    if kind.endswith((".npz", ".npy")):
        return open_arrays(path, labels)
    if kind.endswith((".csv", ".tsv", ".parquet")):
        return open_table(path, columns)
    if kind.endswith((".zip", ".rar", ".7z", ".gz", ".tar.bz2", ".tar.xz")):
        raise UsageError(f"{name} is an archive; unpack it and give the folder")
    if is_image_name(kind):
        raise UsageError(f"{name} is a single image; give the folder that holds all images")
    raise UsageError(
        f"{name} must be a folder, .npz, .npy, .csv, .tsv, .parquet, a CIFAR archive (.tar.gz) or"
        " webdataset shards (.tar)"
    )


def _where_else(path: Path) -> str:
    if str(path).lower() in ("cifar10", "cifar100", "mnist"):
        return "; download it and give the path of its files"
    try:
        close = difflib.get_close_matches(path.name, os.listdir(path.parent), n=1)
    except OSError:
        return f"; the folder `{short(str(path.parent))}` does not exist either"
    return f"; did you mean `{short(str(path.parent / close[0]))}`?" if close else ""


def typical_side(source: Source) -> int | None:
    """The median of the shorter sides of up to 16 images; None if none can be read."""
    if source.native_size is not None:
        return min(source.native_size)
    number = len(source.items())
    probed = range(0, number, max(1, number // _NUM_PROBED))
    sides = [side for index in probed if (side := _shorter_side(source, index)) is not None]
    return round(statistics.median(sides)) if sides else None


def _shorter_side(source: Source, index: int) -> int | None:
    try:
        loaded = source.load(index)
        if not isinstance(loaded, bytes):
            return int(min(loaded.shape[:2]))
        with Image.open(io.BytesIO(loaded)) as image:
            return int(min(image.size))
    except Exception:  # `prepare` will report it
        return None


def digits() -> ArraySource:
    """1,797 handwritten digits, 8 × 8 (Alpaydin and Kaynak, UCI 1998; the copy in scikit-learn);
    every fifth image of each class is a test image."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    labels = bunch.target.astype(np.int64)
    is_test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        is_test[np.flatnonzero(labels == label)[4::5]] = True
    splits = {
        "train": (images[~is_test], labels[~is_test]),
        "test": (images[is_test], labels[is_test]),
    }
    return ArraySource(splits, name="digits", classes=[str(label) for label in range(10)])


@final
class DatasetSource(Source):
    """One map-style data set per split. An item is an image (PIL, array or tensor) or (image,
    label, …), and must be the same each time."""

    def __init__(self, splits: Mapping[str, Any]) -> None:
        for data in splits.values():
            if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
                raise UsageError(
                    f"`data` ({type(data).__name__}) must be a path, an array or a map-style"
                    " Dataset with __len__ and __getitem__"
                )
        items = [
            Item(f"{split}/{row}", None, split_name(split), origin=(data, row))
            for split, data in splits.items()
            for row in range(len(data))
        ]
        if not items:
            raise KinfolkError("the Dataset is empty")
        first = next(iter(splits.values()))
        names = getattr(first, "classes", None)
        classes = list(map(str, names)) if isinstance(names, list | tuple) else None
        super().__init__(f"the {type(first).__name__}", items, classes=classes)
        self._labels: dict[str, int] = {}

    def load(self, index: int) -> Pixels:
        data, row = self._items[index].origin
        image, label = data[row], None
        if isinstance(image, tuple | list):
            image, label = image[0], image[1] if len(image) > 1 else None
        if label is not None:
            self._labels[self._items[index].key] = _whole_number(label, self.name)
        return _to_pixels(image, self.name)

    def label(self, index: int) -> int | None:
        label = self._labels.get(self._items[index].key, -1)
        if label < 0:
            return None
        return label if self.class_of_label is None else self.class_of_label[label]


def _to_pixels(image: Any, name: str) -> Pixels:
    if isinstance(image, Image.Image):
        return np.asarray(to_rgb(image))
    if isinstance(image, torch.Tensor):
        image = image.detach().cpu().numpy()
    if not isinstance(image, np.ndarray):
        raise KinfolkError(
            f"{name} gives a {type(image).__name__}; an item must be an image (PIL, array, tensor)"
            " or (image, label)"
        )
    if image.ndim not in (2, 3):
        raise KinfolkError(
            f"an image has the shape {image.shape}; it must be (H, W), (H, W, 3) or (3, H, W)"
        )
    images = find_layout(image[None], "the image")
    return to_uint8(images[0], find_factor(images, "the image"))


def _whole_number(label: Any, name: str) -> int:
    is_single = isinstance(label, torch.Tensor | np.ndarray | np.generic) and np.size(label) == 1
    value = label.item() if is_single else label
    try:
        if int(value) == value:
            return int(value)
    except (TypeError, ValueError):
        pass
    raise KinfolkError(f"{name} gives the label {value!r}; labels must be whole numbers")


# A folder of image files, with splits and classes from its sub-folders

LOG = logging.getLogger("kinfolk.data")
# also formats that can't be decoded: better refused by name than left out silently
_IMAGE = frozenset(
    """.jpg .jpeg .jpe .jfif .png .apng .webp .gif .bmp .dib .tif .tiff .ppm .pgm .pbm .pnm .jp2
    .j2k .jpx .avif .tga .ico .heic .heif .svg .psd .eps .dng .cr2 .nef .arw""".split()  # noqa: SIM905
)


def open_folder(root: Path, *, labels_from_folders: bool = False) -> FileSource:
    """All images below `root`, sorted by their relative path. `train/` at the top, alone or with
    `test/` or `val/`, makes splits; otherwise everything is "train"."""
    try:
        entries = list(os.scandir(root))
    except OSError as error:
        raise KinfolkError(
            f"the folder `{short(str(root))}` can't be read: {error.strerror}"
        ) from error
    tops = sorted(each.name for each in entries if _is_folder(each) and not _is_hidden(each.name))
    splits = {name: SPLITS[name.lower()] for name in tops if name.lower() in SPLITS}
    if "train" not in splits.values() or (len(splits) == 1 and len(tops) > 1):
        splits = {}
    outside = f"outside the split folders {', '.join(f'{name}/' for name in splits)}"
    found: list[tuple[str, str, str, str | None]] = []
    refused: Refusals = []
    others = 0
    for parts, path, is_regular in _walk(str(root), (), (), refused):
        key = _to_text("/".join(parts))
        kind = _inspect(path, is_regular)
        if kind == "other":
            others += 1
        elif kind != "image":
            refused.append((key, kind))
        elif splits and (len(parts) == 1 or parts[0] not in splits):
            refused.append((key, outside))
        else:
            within = parts[1:] if splits else parts
            split = splits[parts[0]] if splits else "train"
            found.append((key, path, split, _to_text(within[0]) if len(within) > 1 else None))
    if not found and not refused:
        raise KinfolkError(
            f"`{root}` contains no images" + (f", only {others:,} other files" if others else "")
        )
    found.sort()
    for (first, *_), (second, *_) in pairwise(found):
        if first == second:
            raise KinfolkError(
                f"two files have the same name once written as text, `{short(first)}`; rename one"
                " of them"
            )
    classes = sorted({name for *_, name in found if name is not None})
    if labels_from_folders and not classes:
        raise UsageError(
            f"`labels_from_folders` needs a folder per class below `{root}`; all images are at its"
            " top level"
        )
    if not labels_from_folders:
        if len(classes) > 1 and all(name is not None for *_, name in found):
            some = ", ".join(map(short, classes[:3])) + (", …" if len(classes) > 3 else "")
            LOG.info(
                "%s",
                f"`{short(str(root))}` has {len(classes):,} folders ({some}); if they are classes,"
                " --labels-from-folders makes them labels",
            )
        classes = []
    label_of: dict[str | None, int] = {name: label for label, name in enumerate(classes)}
    items = [Item(key, label_of.get(name), split, origin=path) for key, path, split, name in found]
    return FileSource(f"`{root}`", items, classes=classes or None, refused=sorted(refused))


def is_image_name(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in _IMAGE


def _walk(
    folder: str, parts: tuple[str, ...], above: tuple[tuple[int, int], ...], refused: Refusals
) -> Iterator[tuple[tuple[str, ...], str, bool]]:
    """Yields (path parts, path, whether it is certainly a regular file) of every file that is not
    hidden. Links to folders are followed unless they lead back."""
    try:
        here = os.stat(folder)
        if (here.st_dev, here.st_ino) in above:
            return
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        path = "/".join(map(_to_text, parts)) + "/"
        refused.append((path, f"the folder can't be read: {error.strerror}"))
        return
    above = (*above, (here.st_dev, here.st_ino))
    for entry in entries:
        if _is_hidden(entry.name):
            continue
        if _is_folder(entry):
            yield from _walk(entry.path, (*parts, entry.name), above, refused)
        else:
            yield (*parts, entry.name), entry.path, entry.is_file(follow_symlinks=False)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _inspect(path: str, is_regular: bool) -> str:
    """Returns "image", "other", or the reason why an image file is refused unread."""
    if not is_image_name(path):
        return "other"
    try:
        if is_regular or stat.S_ISREG(os.stat(path).st_mode):
            return "image"
    except OSError as error:
        is_link = os.path.islink(path)
        return (
            "a link to a file that does not exist"
            if is_link
            else f"can't be read: {error.strerror}"
        )
    return "not a regular file"


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _to_text(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "backslashreplace")
