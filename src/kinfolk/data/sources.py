"""Opening a data source by its name, its path or its object."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kinfolk.data.braces import expand
from kinfolk.data.source import Source
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.foreign import shown
from kinfolk.data.arrays import array_source
from kinfolk.data.dataset import dataset_source
from kinfolk.data.builtin import digits
from kinfolk.data.shards import open_shards
from kinfolk.data.cifar import find_cifar, open_cifar
from kinfolk.data.shards import find_shards, open_shards
from kinfolk.data.folder import open_folder
from kinfolk.data.arrays import open_arrays
from kinfolk.data.table import Columns, open_table


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
        return array_source({"train": (spec, labels)}, name="the array")
    if not isinstance(spec, str | os.PathLike):
        return dataset_source(spec if isinstance(spec, Mapping) else {"train": spec})
    if spec == "digits":
        return digits()
    path = Path(spec)
    if not path.exists() and (shards := expand(str(spec))):
        return open_shards({"train": shards}, f"`{shown(str(spec))}`", index_dir)
    if not path.exists():
        hint = "; give the path of the downloaded archive" if str(spec) in ("cifar10", "cifar100") else ""
        raise UsageError(f"there is no file or folder `{shown(str(spec))}`{hint}")
    kind = "folder" if path.is_dir() else path.name.lower()
    if kind == "folder" or kind.endswith((".tar.gz", ".tgz", ".tar")):
        if (found := find_cifar(path)) is not None:
            return open_cifar(*found)
        if kind.endswith((".tar.gz", ".tgz")):
            raise KinfolkError(
                f"`{path}` is not an official CIFAR-10 or CIFAR-100 archive (python version); unpack it and give the folder, or the .tar"
            )
        if shards_of := find_shards(path):
            return open_shards(shards_of, f"`{path}`", index_dir)
        return open_folder(path, labels_from_folders=labels_from_folders)
    if kind.endswith((".npz", ".npy")):
        return open_arrays(path, labels)
    if kind.endswith((".csv", ".tsv", ".parquet")):
        return open_table(path, Columns(image_column, caption_column, label_column, group_column, split_column))
    raise UsageError(f"`{path}` must be a folder, .npz, .npy, .csv, .tsv, .parquet, a CIFAR archive (.tar.gz) or webdataset shards (.tar)")
