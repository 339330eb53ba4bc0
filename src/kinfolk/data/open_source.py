"""Opening a data source by its name, its path or its object."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import statistics
from collections.abc import Mapping
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
from kinfolk.data.labels import SPLITS, as_int, split_name
from kinfolk.data.shards import expand, find_shards, open_shards
from kinfolk.data.source import FileSource, Item, Pixels, Refusals, Source, as_utf8
from kinfolk.data.table import find_hugging_face, open_hugging_face, open_table
from kinfolk.errors import KinfolkError, UsageError, short, similar_path

_NUM_PROBED = 16


def open_source(
    spec: object,
    *,
    labels: npt.ArrayLike | None = None,
    labels_from_folders: bool | None = False,
    index_dir: str | Path | None = None,
    **columns: str | None,
) -> Source:
    """`spec`: "digits"; a path (see "Sources" in docs/data.md); an array or tensor of images, or
    (images, labels); or a map-style `Dataset`, or a mapping from split to `Dataset`.
    `labels_from_folders`: the first folder (below `train/` …) of a file is its class; None: if
    `spec` is a folder of images. `index_dir`: a cache folder for the table of shards. `columns`: of
    a table, as in `label_column="class"`."""
    if isinstance(spec, tuple) and len(spec) == 2 and labels is None:
        spec, labels = spec
    if isinstance(spec, torch.Tensor):
        spec = spec.detach().cpu().numpy()
    path = Path(spec).expanduser() if isinstance(spec, str | os.PathLike) else None
    is_npy = path is not None and path.suffix.lower() == ".npy"
    what = type(spec).__name__ if path is None else f"`{short(str(spec))}`"
    if labels is not None and not is_npy and not isinstance(spec, np.ndarray):
        raise UsageError(f"`labels` belong to images as an array, tensor or .npy file, not {what}")
    named = {key.removesuffix("_column"): column for key, column in columns.items()}
    is_folder = path is not None and spec != "digits" and path.is_dir()
    tables = cifar = None
    parts: dict[str, list[Path]] = {}
    if path is not None and (is_folder or path.is_file()):
        tables = find_hugging_face(path, named.get("image") or "image")
        name = path.name.lower()
        if tables is None and (is_folder or name.endswith((".tar.gz", ".tgz", ".tar"))):
            cifar = find_cifar(path)
            parts = find_shards(path) if cifar is None and not name.endswith("gz") else {}
        if is_folder and not (tables or cifar or parts):
            return open_folder(path, labels_from_folders=labels_from_folders is not False)
    if path is not None and spec != "digits" and not path.exists():
        if (shards := expand(str(spec))) and not labels_from_folders:
            return open_shards({"train": shards}, what, index_dir)
        hint = similar_path(path) or "; data sets are not downloaded, so give a path"
        raise UsageError(f"there is no file or folder {what}{hint}")
    if labels_from_folders:
        raise UsageError(f"`labels_from_folders` needs a folder of images, not {what}")
    if isinstance(spec, np.ndarray):
        return ArraySource({"train": (spec, labels)}, name="the array")
    if path is None:
        return DatasetSource(spec if isinstance(spec, Mapping) else {"train": spec})
    if spec == "digits":
        return digits()
    name, suffix = f"`{path}`", path.suffix.lower()
    if tables is not None:
        return open_hugging_face(tables, name, named)
    if cifar is not None:
        return open_cifar(*cifar)
    if parts:
        return open_shards(parts, name, index_dir)
    if suffix in (".npz", ".npy"):
        return open_arrays(path, labels)
    if suffix in (".csv", ".tsv", ".parquet"):
        return open_table(path, named)
    raise UsageError(
        f"{name} must be a folder of images, .npz, .npy, .csv, .tsv, .parquet, an official CIFAR"
        " archive (.tar.gz, Python version) or webdataset shards (.tar); unpack other archives and"
        " give the folder"
    )


def typical_side(source: Source) -> int | None:
    """The median of the shorter sides of up to 16 images; None if none can be read."""
    if source.native_size is not None:
        return min(source.native_size)
    number = len(source.items())
    sides = []
    for index in range(0, number, max(1, number // _NUM_PROBED)):
        with contextlib.suppress(Exception):  # `prepare` will report it
            loaded = source.load(index)
            if isinstance(loaded, bytes):
                sides.append(min(Image.open(io.BytesIO(loaded)).size))
            else:
                sides.append(min(loaded.shape[:2]))
    return round(statistics.median(sides)) if sides else None


def digits() -> ArraySource:
    """1,797 handwritten digits, 8 × 8 (Alpaydin and Kaynak, UCI 1998); every fifth image of each
    class is a test image."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images, labels = np.rint(bunch.images * (255 / 16)).astype(np.uint8), bunch.target
    is_test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        is_test[np.flatnonzero(labels == label)[4::5]] = True
    parts = {"train": ~is_test, "test": is_test}
    splits = {split: (images[chosen], labels[chosen]) for split, chosen in parts.items()}
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
            plain = label.tolist() if hasattr(label, "tolist") else label  # also on a GPU
            numbers = list(map(as_int, np.ravel(plain).tolist()))
            if len(numbers) != 1 or numbers[0] is None:
                raise KinfolkError(
                    f"{self.name} gives the label {label!r}; labels must be whole numbers"
                )
            self._labels[self._items[index].key] = numbers[0]
        return _to_pixels(image, self.name)

    def label(self, index: int) -> int | None:
        label = self._labels.get(self._items[index].key, -1)
        return None if label < 0 else label


def _to_pixels(image: Any, name: str) -> Pixels:
    if isinstance(image, Image.Image):
        return np.asarray(to_rgb(image))
    if isinstance(image, torch.Tensor):
        image = image.detach().cpu().numpy()
    if not isinstance(image, np.ndarray) or image.ndim not in (2, 3):
        kind = getattr(image, "shape", type(image).__name__)
        raise KinfolkError(
            f"{name} gives {kind}; an item must be an image (PIL, or an array or tensor of (H, W),"
            " (H, W, 3) or (3, H, W)) or (image, label)"
        )
    images = find_layout(image[None], "the image")
    return to_uint8(images[0], find_factor(images, "the image"))


# A folder of image files, with splits and classes from its sub-folders

LOG = logging.getLogger("kinfolk.data")
# also formats that can't be decoded: better refused by name than left out silently
_IMAGE = frozenset(
    """.jpg .jpeg .jpe .jfif .png .apng .webp .gif .bmp .dib .tif .tiff .ppm .pgm .pbm .pnm .jp2
    .j2k .jpx .avif .tga .ico .heic .heif .svg .psd .eps .dng .cr2 .nef .arw""".split()  # noqa: SIM905
)


def open_folder(root: Path, *, labels_from_folders: bool = False) -> FileSource:
    """All images below `root`, sorted by relative path. `train/` at the top, alone or with `test/`
    or `val/`, makes splits; otherwise everything is "train"."""
    found: list[tuple[str, str, str, str | None]] = []
    refused: Refusals = []
    splits: dict[str, str] = {}
    others = 0
    # the folders to read, and where those above each one really are
    todo: list[tuple[str, list[str], frozenset[str]]] = [(str(root), [], frozenset())]
    while todo:
        folder, parts, above = todo.pop()
        try:
            with os.scandir(folder) as listing:
                entries = [(each, _kind(each)) for each in listing if not _is_hidden(each.name)]
        except OSError as error:
            reason = f"can't be read: {error.strerror}"
            if not parts:
                raise KinfolkError(f"the folder `{short(folder)}` {reason}") from error
            refused.append((f"{'/'.join(parts)}/", f"the folder {reason}"))
            continue
        if not parts:
            names = [entry.name for entry, kind in entries if kind == "folder"]
            splits = {name: SPLITS[name.lower()] for name in names if name.lower() in SPLITS}
            if "train" not in splits.values() or (len(splits) == 1 and len(names) > 1):
                splits = {}
        here = os.path.realpath(folder)
        split = splits.get(parts[0] if parts else "") if splits else "train"
        first = next(iter(parts[1:] if splits else parts), None)
        for entry, kind in entries:
            path, inner = entry.path, [*parts, as_utf8(entry.name)]
            if kind == "folder":
                target = os.path.realpath(path)
                # not a link back
                if target not in above and not f"{here}{os.sep}".startswith(f"{target}{os.sep}"):
                    todo.append((path, inner, above | {here}))
                continue
            if not is_image_name(entry.name):
                others += 1
                continue
            why = None if kind == "file" else "not a readable file"
            if why is None and split is None:
                why = f"outside the split folders {', '.join(f'{x}/' for x in sorted(splits))}"
            if why is None:
                found.append(("/".join(inner), path, str(split), first))
            else:
                refused.append(("/".join(inner), why))
    if not found and not refused:
        only = f", only {others:,} other files" if others else ""
        raise KinfolkError(f"`{root}` contains no images{only}")
    found.sort()
    classes = sorted({kind for *_, kind in found if kind is not None})
    if labels_from_folders and not classes:
        raise UsageError(
            f"`labels_from_folders` needs a folder per class below `{root}`; all images are at its"
            " top level"
        )
    if not labels_from_folders:
        if len(classes) > 1 and all(kind is not None for *_, kind in found):
            some = ", ".join(map(short, classes[:3])) + (", …" if len(classes) > 3 else "")
            LOG.info(
                "%s",
                f"`{short(str(root))}` has {len(classes):,} folders ({some}); if they are classes,"
                " --labels-from-folders makes them labels",
            )
        classes = []
    label_of: dict[str | None, int] = {name: label for label, name in enumerate(classes)}
    items = [Item(key, label_of.get(kind), split, origin=path) for key, path, split, kind in found]
    return FileSource(f"`{root}`", items, classes=classes or None, refused=sorted(refused))


def is_image_name(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in _IMAGE


def _kind(entry: os.DirEntry[str]) -> str:
    """Only the status of a link is asked for."""
    path = entry.path if entry.is_symlink() else None
    if entry.is_dir() if path is None else os.path.isdir(path):
        return "folder"
    return "file" if (entry.is_file() if path is None else os.path.isfile(path)) else "other"


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"
