"""Features of a data set, read in blocks of rows as unit vectors; the array itself is never copied whole.

Dimension key: N data set, D embedding, R rows of a block.

Features from a file, by its kind: mapped into memory where the file allows it. Reading never runs code.

The features of a run: its own encoder on its own training samples.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kinfolk.errors import KinfolkError, UsageError
from kinfolk.files import check_safetensors, first_line

if TYPE_CHECKING:
    from kinfolk.data.images import ImageData


Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]

FEWEST = 3
_BLOCK_ELEMENTS = 1 << 22
"""Numbers that are looked at together while the rows are checked."""
_ORDINARY = (1e-30, 1e30)
"""Between these one over the norm can be taken in 32 bits."""


class Features:
    """(N, D) numbers, checked once; `rows` gives unit-norm float32.

    Args:
        array: (N, D) float16, float32 or float64, perhaps memory-mapped; neither copied nor changed.
        name: what messages call it.
    """

    def __init__(self, array: NDArray[Any], name: str = "`features`") -> None:
        if array.ndim != 2:
            raise UsageError(f"{name} (=shape {array.shape}) must have the shape (samples, features): one row for each sample")
        if array.dtype.kind != "f" or array.dtype.itemsize not in (2, 4, 8):
            raise UsageError(f"{name} (={array.dtype}) must be float16, float32 or float64; convert it")
        if len(array) < FEWEST:
            raise UsageError(f"{name} (={len(array)} samples) must hold at least {FEWEST}: an audit compares each sample with all others")
        if array.shape[1] < 1:
            raise UsageError(f"{name} (=shape {array.shape}) must have at least one feature for each sample")
        self.array, self.name = array, name
        self._inverse_N = self._checked()

    def __len__(self) -> int:
        return len(self.array)

    @property
    def dim(self) -> int:
        return int(self.array.shape[1])

    def rows(self, start: int, stop: int) -> Floats:
        """(R, D) unit-norm rows from `start` to `stop`."""
        return self._unit(self.array[start:stop], self._inverse_N[start:stop])

    def take(self, ids: Ints) -> Floats:
        """(R, D) unit-norm rows of `ids`."""
        return self._unit(self.array[ids], self._inverse_N[ids])

    def _unit(self, values: NDArray[Any], inverse: NDArray[np.float64]) -> Floats:
        if values.dtype == np.float64 or not _ORDINARY[0] < inverse.min() <= inverse.max() < _ORDINARY[1]:
            return np.ascontiguousarray(values * inverse[:, None], dtype=np.float32)
        return np.ascontiguousarray(values.astype(np.float32, copy=False) * inverse[:, None].astype(np.float32))

    def _checked(self) -> NDArray[np.float64]:
        """(N,) one over the norm of each row; rows without a direction are refused."""
        inverse, scale = np.empty(len(self.array), dtype=np.float64), np.empty(len(self.array), dtype=np.float64)
        rows = max(1, _BLOCK_ELEMENTS // self.dim)
        for start in range(0, len(inverse), rows):
            block = self.array[start : start + rows].astype(np.float64)
            largest = np.abs(block).max(1)
            block /= np.where((largest > 0) & np.isfinite(largest), largest, 1)[:, None]  # squares of 1e300 are no numbers any more
            with np.errstate(divide="ignore", over="ignore"):
                inverse[start : start + rows] = 1 / np.sqrt(np.einsum("ij,ij->i", block, block)) / largest
            scale[start : start + rows] = largest
        bad = np.flatnonzero(~np.isfinite(scale))
        if len(bad):
            raise KinfolkError(f"{self._which(bad)} of {self.name} hold NaN or infinite values; remove or repair them")
        bad = np.flatnonzero(~np.isfinite(inverse))
        if len(bad):
            raise KinfolkError(f"{self._which(bad)} of {self.name} are all zero and have no direction to compare; remove or repair them")
        return inverse

    def _which(self, bad: Ints) -> str:
        return f"{len(bad):,} of {len(self.array):,} rows (the first is row {bad[0]})"


SUFFIXES = (".npy", ".npz", ".parquet", ".safetensors")
KEYS = ("features", "embeddings", "embedding", "x")
"""Names that are looked for first in a file that holds several arrays."""
_SAFETENSORS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}


def open_features(path: str | os.PathLike[str], key: str | None = None) -> NDArray[Any]:
    """The (N, D) array in a `.npy`, `.npz`, `.parquet` or `.safetensors` file; `key` names it where there are several."""
    path = Path(path)
    if not path.exists():
        raise UsageError(f"there is no file or folder `{path}`; give an array file or a run folder")
    if path.is_dir():
        raise UsageError(f"`{path}` is a folder without config.yaml, so it is no run; give a run folder or a file that ends in {_kinds()}")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(f"`{path}` must be a run folder or end in {_kinds()}")
    if path.stat().st_size == 0:
        raise KinfolkError(f"`{path}` is empty; write the features again")
    openers: dict[str, Callable[[Path, str | None], NDArray[Any]]] = {
        ".npy": _npy,
        ".npz": _npz,
        ".parquet": _parquet,
        ".safetensors": _safetensors,
    }
    try:
        return openers[suffix](path, key)
    except KinfolkError:
        raise
    except Exception as error:  # readers raise nearly anything on a broken file
        if "pickle" in str(error).lower() or "object" in str(error).lower():
            raise KinfolkError(f"`{path}` holds Python objects, not numbers, and is not loaded (it could run code)") from error
        raise KinfolkError(f"`{path}` is not a readable {suffix} file ({first_line(error)}); write it again") from error


def _npy(path: Path, key: str | None) -> NDArray[Any]:
    with np.errstate(over="ignore"):  # of a shape that no memory holds; numpy refuses it a line later
        return np.lib.format.open_memmap(path, mode="r")


def _npz(path: Path, key: str | None) -> NDArray[Any]:
    """A member that is stored as it is can be mapped; a compressed one is unpacked into a temporary file."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        info = archive.getinfo(f"{choose_key(names, key, path)}.npy")
        with archive.open(info) as member:
            version = np.lib.format.read_magic(member)
            read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read_header(member)
            if dtype.hasobject:
                raise KinfolkError(f"`{path}` holds Python objects, not numbers, and is not loaded (it could run code)")
            order = "F" if fortran else "C"
            size = math.prod(shape) * dtype.itemsize
            if any(side < 0 for side in shape) or size != info.file_size - member.tell():
                raise KinfolkError(
                    f"`{path}` has {info.file_size - member.tell():,} bytes for an array of the shape {shape}; write it again"
                )
            if info.compress_type == zipfile.ZIP_STORED:
                file.seek(info.header_offset + 26)
                name_and_extra = int.from_bytes(file.read(2), "little") + int.from_bytes(file.read(2), "little")
                offset = info.header_offset + 30 + name_and_extra + member.tell()
                return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape, order=order)  # type: ignore[call-overload,no-any-return]
            spilled = _spill(shape[::-1] if fortran else shape, dtype)
            flat = spilled.reshape(-1).view(np.uint8)
            done = 0
            while done < len(flat) and (piece := member.read(1 << 24)):
                flat[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
                done += len(piece)
            if done < len(flat):
                raise KinfolkError(f"`{path}` ends before its array does; write it again")
    return spilled.T if fortran else spilled


def _parquet(path: Path, key: str | None) -> NDArray[Any]:
    """One column of lists, or all columns of floats; decoded in batches into a temporary file, since it can't be mapped."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path, memory_map=True)
        schema = file.schema_arrow
        lists = [field.name for field in schema if pa.types.is_list(field.type) or pa.types.is_fixed_size_list(field.type)]
        lists = [name for name in lists if pa.types.is_floating(schema.field(name).type.value_type)]
        floats = [field.name for field in schema if pa.types.is_floating(field.type)]
        if not lists and not floats:
            raise UsageError(f"`{path}` has no column of floats or lists of floats; its columns are {', '.join(schema.names)}")
        names = [choose_key(lists, key, path)] if lists else floats
        dtype = (schema.field(names[0]).type.value_type if lists else schema.field(names[0]).type).to_pandas_dtype()
        num_rows, made, start = file.metadata.num_rows, None, 0
        for batch in file.iter_batches(batch_size=4096, columns=names):
            block = _batch(batch, bool(lists), path, start)
            made = _spill((num_rows, block.shape[1]), np.dtype(dtype)) if made is None else made
            if block.shape[1] != made.shape[1]:
                raise KinfolkError(f"the rows of `{path}` have unequal lengths: {made.shape[1]} and {block.shape[1]} around row {start}")
            made[start : start + len(block)] = block
            start += len(block)
    except pa.ArrowException as error:
        raise KinfolkError(f"`{path}` is not a readable .parquet file ({' '.join(str(error).split())}); write it again") from error
    if made is None:
        raise KinfolkError(f"`{path}` has no rows")
    return made


def _batch(batch: Any, lists: bool, path: Path, start: int) -> NDArray[Any]:
    if any(column.null_count for column in batch.columns):
        raise KinfolkError(f"`{path}` has rows without features, between rows {start} and {start + batch.num_rows}; remove them")
    if not lists:
        return np.stack([column.to_numpy(zero_copy_only=False) for column in batch.columns], axis=1)
    values = batch.column(0).flatten().to_numpy(zero_copy_only=False)
    if len(values) % batch.num_rows or len(set(np.asarray(batch.column(0).value_lengths()).tolist())) > 1:
        raise KinfolkError(f"the rows of `{path}` have unequal lengths, between rows {start} and {start + batch.num_rows}")
    return np.asarray(values.reshape(batch.num_rows, -1))


def _safetensors(path: Path, key: str | None) -> NDArray[Any]:
    """Mapped at the place that the header gives, which the safetensors library has checked before."""
    from safetensors import safe_open

    with safe_open(path, "np") as checked:
        check_safetensors(path, checked.metadata() or {})
        names = sorted(checked.keys())
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    chosen = header[choose_key(names, key, path)]
    if chosen["dtype"] not in _SAFETENSORS:
        raise UsageError(f"`{path}` holds {chosen['dtype']}; features must be F16, F32 or F64, so convert them")
    offset, shape = 8 + length + int(chosen["data_offsets"][0]), tuple(chosen["shape"])
    if 0 in shape:
        return np.empty(shape, _SAFETENSORS[chosen["dtype"]])
    return np.memmap(path, dtype=_SAFETENSORS[chosen["dtype"]], mode="r", offset=offset, shape=shape)


def choose_key(names: list[str], key: str | None, path: Path) -> str:
    found = f"it holds {', '.join(names) or 'nothing'}"
    if key is not None:
        if key not in names:
            raise UsageError(f"`{path}` holds no {key!r}; {found}")
        return key
    chosen = next((name for name in KEYS if name in names), names[0] if len(names) == 1 else None)
    if chosen is None:
        raise UsageError(f"say with --key which part of `{path}` holds the features; {found}")
    return chosen


def _spill(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array on disk that goes when nobody holds it any more."""
    if 0 in shape:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, dtype=dtype, mode="w+", shape=shape)


def _kinds() -> str:
    return ", ".join(SUFFIXES)


def embedded(run: Path, labels: Any | None, progress: bool) -> tuple[NDArray[np.float32], Any | None, Sequence[str]]:
    """Features, labels (the run's own unless others are given) and names of the training samples."""
    features, own, names, _ = run_material(run, progress)
    return features, own if labels is None else labels, names


def run_material(run: Path, progress: bool) -> tuple[NDArray[np.float32], list[Any] | None, list[str], ImageData]:
    """The same with the pictures."""
    from kinfolk.training.load_run import open_run

    opened = open_run(run)
    opened.encoder()  # a run without a model is refused before any picture is read
    images = opened.data(progress=progress)
    ids = np.arange(images.num_train)
    samples = images.samples
    return opened.features(images, ids, progress=progress), class_names(images, len(ids)), list(samples.keys[: len(ids)]), images


def class_names(images: ImageData, number: int) -> list[Any] | None:
    """Labels of the first samples, by name where they have names; None without labels."""
    labels, classes = images.samples.labels, images.samples.classes
    if labels is None or not (labels[:number] >= 0).any():
        return None
    return [None if label < 0 else classes[label] if classes else int(label) for label in labels[:number]]
