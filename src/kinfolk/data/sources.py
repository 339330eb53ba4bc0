"""Where images come from, behind one interface."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kinfolk.data.braces import expand
from kinfolk.data.captions import Caption
from kinfolk.data.decode import Place
from kinfolk.data.difference import shown
from kinfolk.errors import KinfolkError, UsageError

Pixels = npt.NDArray[Any]


@dataclass(frozen=True)
class Item:
    """One sample as its source announces it.

    Args:
        key: unique within the source and stable.
        label: index of the class; None where there is none or where only `Source.label` can tell.
        caption: or several, as a tuple.
        same_as: index of the earlier item whose image this one shares (several captions of one image).
    """

    key: str
    label: int | None = None
    split: str = "train"
    caption: Caption | None = None
    group: str | None = None
    same_as: int | None = None


class Source(ABC):
    """Images with keys, splits and perhaps labels. Nothing is decoded before `load`.

    Attributes:
        name: what messages call it.
        classes: names of the labels, where known.
        refused: (path, reason) of what was refused without being read: missing, not a regular file.
        native_size: (height, width) where all images have one size, else None.
    """

    name: str
    classes: list[str] | None
    refused: list[tuple[str, str]]
    native_size: tuple[int, int] | None

    @abstractmethod
    def items(self) -> Sequence[Item]:
        """All samples, in a stable order."""

    @abstractmethod
    def load(self, index: int) -> bytes | Pixels:
        """Item `index`: the bytes of an image file, or its pixels (H, W) or (H, W, 1 | 3 | 4), uint8."""

    @abstractmethod
    def label(self, index: int) -> int | None:
        """The label of item `index`; asked after `load(index)`."""

    @abstractmethod
    def path(self, index: int) -> Place | None:
        """The file that holds item `index` and nothing else, or the part of a file, for workers to read; None where there is none."""

    @abstractmethod
    def stat(self, index: int) -> tuple[int, int] | None:
        """(size in bytes, time of modification in ns) of item `index`, without reading it; None where it can't be told."""

    def keep(self, folder: str | Path) -> None:  # noqa: B027
        """Leaves in a cache folder what would spare the next opening some work. Default: nothing."""

    def release(self) -> None:  # noqa: B027
        """Forgets its items: the table of samples has taken their place, and a training lasts. Default: nothing."""


def open_source(
    spec: object,
    *,
    labels: npt.ArrayLike | None = None,
    labels_from_folders: bool = False,
    image_column: str = "image",
    caption_column: str | None = None,
    label_column: str | None = None,
    group_column: str | None = None,
    split_column: str | None = None,
    index_dir: str | Path | None = None,
) -> Source:
    """The source that `spec` names.

    Args:
        spec: "digits"; the path of an image folder, of a `.npz` / `.npy`, of a `.csv` / `.tsv` / `.parquet` table, of the official
            CIFAR-10/100 archive (python version; `.tar.gz` or extracted), of webdataset shards (a `.tar`, a folder of them, or a pattern
            as in `shards/{000..331}.tar`); an array or tensor of images; a map-style `Dataset`, or a mapping from split to `Dataset`.
        labels: of an array or tensor, or of a `.npy`.
        labels_from_folders: take the first folder (below `train/`, `test/` …) of each file as its class.
        image_column, caption_column, label_column, group_column, split_column: of a table. Columns named "caption", "label",
            "group" and "split" are taken where they exist; a column that is named here must exist.
        index_dir: a cache folder in which `Source.keep` may have left an index of shards.
    """
    is_path = isinstance(spec, str | os.PathLike)
    if labels is not None and not isinstance(spec, np.ndarray | torch.Tensor) and not (is_path and str(spec).lower().endswith(".npy")):
        raise UsageError("`labels` belong to an array or a .npy file; other sources bring their own")
    if labels_from_folders and (not is_path or spec == "digits" or Path(str(spec)).is_file()):
        raise UsageError(f"`labels_from_folders` needs a folder of images, not {shown(str(spec)) if is_path else type(spec).__name__}")
    if isinstance(spec, torch.Tensor):
        spec = spec.detach().cpu().numpy()
    if isinstance(spec, np.ndarray):
        from kinfolk.data.arrays import array_source

        return array_source({"train": (spec, labels)}, name="the array")
    if not isinstance(spec, str | os.PathLike):
        from kinfolk.data.dataset import dataset_source

        return dataset_source(spec if isinstance(spec, Mapping) else {"train": spec})
    if spec == "digits":
        from kinfolk.data.builtin import digits

        return digits()
    path = Path(spec)
    if not path.exists() and (shards := expand(str(spec))):
        from kinfolk.data.shards import open_shards

        return open_shards({"train": shards}, f"`{shown(str(spec))}`", index_dir)
    if not path.exists():
        hint = "; give the path of the downloaded archive" if str(spec) in ("cifar10", "cifar100") else ""
        raise UsageError(f"there is no file or folder `{shown(str(spec))}`{hint}")
    kind = "folder" if path.is_dir() else path.name.lower()
    if kind == "folder" or kind.endswith((".tar.gz", ".tgz", ".tar")):
        from kinfolk.data.cifar import find_cifar, open_cifar

        if (found := find_cifar(path)) is not None:
            return open_cifar(*found)
        if kind.endswith((".tar.gz", ".tgz")):
            raise KinfolkError(
                f"`{path}` is not an official CIFAR-10 or CIFAR-100 archive (python version); unpack it and give the folder, or the .tar"
            )
        from kinfolk.data.shards import find_shards, open_shards

        if shards_of := find_shards(path):
            return open_shards(shards_of, f"`{path}`", index_dir)
        from kinfolk.data.folder import open_folder

        return open_folder(path, labels_from_folders=labels_from_folders)
    if kind.endswith((".npz", ".npy")):
        from kinfolk.data.arrays import open_arrays

        return open_arrays(path, labels)
    if kind.endswith((".csv", ".tsv", ".parquet")):
        from kinfolk.data.table import Columns, open_table

        return open_table(path, Columns(image_column, caption_column, label_column, group_column, split_column))
    raise UsageError(f"`{path}` must be a folder, .npz, .npy, .csv, .tsv, .parquet, a CIFAR archive (.tar.gz) or webdataset shards (.tar)")
