"""What an audit reads: features from arrays and files, from a run, or computed from images.

Files are mapped into memory where their format allows it, and reading them never runs code.
`Features` checks an array once and returns blocks of unit-norm rows; the array itself is never
copied as a whole.

Dimension key: N data set, D embedding, R rows of a block.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kinfolk.errors import KinfolkError, UsageError
from kinfolk.files import check_safetensors, first_line, npy_header

Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]

FEWEST = 3
_BLOCK_ELEMENTS = 1 << 22
"""Number of values in a block while the rows are checked."""
_ORDINARY = (1e-30, 1e30)
"""Range in which one over the norm fits in 32 bits."""


class Features:
    """(N, D) features, checked once; `rows` and `take` return unit-norm float32.

    Args:
        array: (N, D) float16, float32 or float64, possibly memory-mapped; neither copied nor
            changed.
        name: name in error messages.
    """

    def __init__(self, array: NDArray[Any], name: str = "`features`") -> None:
        if array.ndim != 2:
            raise UsageError(
                f"{name} (=shape {array.shape}) must have the shape (samples, features): one row"
                " for each sample"
            )
        if array.dtype.kind != "f" or array.dtype.itemsize not in (2, 4, 8):
            raise UsageError(
                f"{name} (={array.dtype}) must be float16, float32 or float64; convert it"
            )
        if len(array) < FEWEST:
            raise UsageError(
                f"{name} (={len(array)} samples) must be at least {FEWEST}, because an audit"
                " compares each sample with all others"
            )
        if array.shape[1] < 1:
            raise UsageError(
                f"{name} (=shape {array.shape}) must have at least one feature for each sample"
            )
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
        if (
            values.dtype == np.float64
            or not _ORDINARY[0] < inverse.min() <= inverse.max() < _ORDINARY[1]
        ):
            return np.ascontiguousarray(values * inverse[:, None], dtype=np.float32)
        return np.ascontiguousarray(
            values.astype(np.float32, copy=False) * inverse[:, None].astype(np.float32)
        )

    def _checked(self) -> NDArray[np.float64]:
        """(N,) one over the norm of each row; rows that are zero or not finite are refused."""
        inverse, scale = (
            np.empty(len(self.array), dtype=np.float64),
            np.empty(len(self.array), dtype=np.float64),
        )
        rows = max(1, _BLOCK_ELEMENTS // self.dim)
        for start in range(0, len(inverse), rows):
            block = self.array[start : start + rows].astype(np.float64)
            largest = np.abs(block).max(1)
            # the square of 1e300 would overflow
            block /= np.where((largest > 0) & np.isfinite(largest), largest, 1)[:, None]
            with np.errstate(divide="ignore", over="ignore"):
                inverse[start : start + rows] = (
                    1 / np.sqrt(np.einsum("ij,ij->i", block, block)) / largest
                )
            scale[start : start + rows] = largest
        bad = np.flatnonzero(~np.isfinite(scale))
        if len(bad):
            raise KinfolkError(
                f"{self._which(bad)} of {self.name} are NaN or infinite; remove or repair them"
            )
        bad = np.flatnonzero(~np.isfinite(inverse))
        if len(bad):
            raise KinfolkError(
                f"{self._which(bad)} of {self.name} are all zero and have no direction to compare;"
                " remove or repair them"
            )
        return inverse

    def _which(self, bad: Ints) -> str:
        return f"{len(bad):,} of {len(self.array):,} rows (the first is row {bad[0]})"


SUFFIXES = (".npy", ".npz", ".csv", ".tsv", ".parquet", ".safetensors", ".pt", ".pth")
KEYS = ("features", "embeddings", "embedding", "x")
"""Preferred names in a file with several arrays."""
NOT_FEATURES = ("id", "index", "label", "split", "group", "key", "y", "class", "target")
"""Columns of a .csv or .tsv file that describe the samples."""
_SAFETENSORS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}


def open_features(path: str | os.PathLike[str], key: str | None = None) -> NDArray[Any]:
    """The (N, D) array in a file with one of `SUFFIXES`; `key` names it if there are several."""
    path = Path(path)
    if not path.exists():
        raise UsageError(f"there is no file or folder `{path}`; {_instead(path)}")
    if path.is_dir():
        raise UsageError(
            f"`{path}` is a folder without config.yaml, so it is not a run; give a run folder or a"
            f" file that ends in {_kinds()}"
        )
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(f"`{path}` must be a run folder or end in {_kinds()}")
    if path.stat().st_size == 0:
        raise KinfolkError(f"`{path}` is empty; write the features again")
    openers: dict[str, Callable[[Path, str | None], NDArray[Any]]] = {
        ".npy": _npy,
        ".npz": _npz,
        ".csv": _csv,
        ".tsv": _csv,
        ".pt": _torch,
        ".pth": _torch,
        ".parquet": _parquet,
        ".safetensors": _safetensors,
    }
    try:
        return openers[suffix](path, key)
    except KinfolkError:
        raise
    except Exception as error:  # readers raise nearly anything on a broken file
        if any(word in str(error).lower() for word in ("pickle", "object", "weights_only")):
            raise KinfolkError(
                f"`{path}` contains Python objects, not numbers, and is not loaded (it could run"
                " code)"
            ) from error
        raise KinfolkError(
            f"`{path}` is not a readable {suffix} file ({first_line(error)}); write it again"
        ) from error


def _npy(path: Path, key: str | None) -> NDArray[Any]:
    with np.errstate(over="ignore"):  # numpy refuses an impossible shape in the next line
        return np.lib.format.open_memmap(path, mode="r")


def _npz(path: Path, key: str | None) -> NDArray[Any]:
    """Maps a member that is stored without compression; a compressed one is unpacked into a
    temporary file."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        info = archive.getinfo(f"{choose_key(names, key, path)}.npy")
        with archive.open(info) as member:
            shape, fortran, dtype = npy_header(member)
            if dtype.hasobject:
                raise KinfolkError(
                    f"`{path}` contains Python objects, not numbers, and is not loaded (it could"
                    " run code)"
                )
            order = "F" if fortran else "C"
            size = math.prod(shape) * dtype.itemsize
            if any(side < 0 for side in shape) or size != info.file_size - member.tell():
                raise KinfolkError(
                    f"`{path}` has {info.file_size - member.tell():,} bytes for an array of the"
                    f" shape {shape}; write it again"
                )
            if info.compress_type == zipfile.ZIP_STORED:
                file.seek(info.header_offset + 26)
                name_and_extra = int.from_bytes(file.read(2), "little") + int.from_bytes(
                    file.read(2), "little"
                )
                offset = info.header_offset + 30 + name_and_extra + member.tell()
                return np.memmap(  # type: ignore[call-overload, no-any-return]
                    path, dtype=dtype, mode="r", offset=offset, shape=shape, order=order
                )
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
    """One column of lists, or all columns of floats, decoded in batches into a temporary file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path, memory_map=True)
        schema = file.schema_arrow
        lists = [
            field.name
            for field in schema
            if pa.types.is_list(field.type) or pa.types.is_fixed_size_list(field.type)
        ]
        lists = [name for name in lists if pa.types.is_floating(schema.field(name).type.value_type)]
        floats = [field.name for field in schema if pa.types.is_floating(field.type)]
        if not lists and not floats:
            raise UsageError(
                f"`{path}` has no column of floats or lists of floats; its columns are"
                f" {', '.join(schema.names)}"
            )
        names = [choose_key(lists, key, path)] if lists else floats
        dtype = (
            schema.field(names[0]).type.value_type if lists else schema.field(names[0]).type
        ).to_pandas_dtype()
        num_rows, made, start = file.metadata.num_rows, None, 0
        for batch in file.iter_batches(batch_size=4096, columns=names):
            block = _batch(batch, bool(lists), path, start)
            made = _spill((num_rows, block.shape[1]), np.dtype(dtype)) if made is None else made
            if block.shape[1] != made.shape[1]:
                raise KinfolkError(
                    f"the rows of `{path}` have unequal lengths: {made.shape[1]} and"
                    f" {block.shape[1]} around row {start}"
                )
            made[start : start + len(block)] = block
            start += len(block)
    except pa.ArrowException as error:
        raise KinfolkError(
            f"`{path}` is not a readable .parquet file ({' '.join(str(error).split())}); write it"
            " again"
        ) from error
    if made is None:
        raise KinfolkError(f"`{path}` has no rows")
    return made


def _batch(batch: Any, lists: bool, path: Path, start: int) -> NDArray[Any]:
    if any(column.null_count for column in batch.columns):
        raise KinfolkError(
            f"`{path}` has rows without features, between rows {start} and"
            f" {start + batch.num_rows}; remove them"
        )
    if not lists:
        return np.stack([column.to_numpy(zero_copy_only=False) for column in batch.columns], axis=1)
    values = batch.column(0).flatten().to_numpy(zero_copy_only=False)
    if (
        len(values) % batch.num_rows
        or len(set(np.asarray(batch.column(0).value_lengths()).tolist())) > 1
    ):
        raise KinfolkError(
            f"the rows of `{path}` have unequal lengths, between rows {start} and"
            f" {start + batch.num_rows}"
        )
    return np.asarray(values.reshape(batch.num_rows, -1))


def _safetensors(path: Path, key: str | None) -> NDArray[Any]:
    """Maps the file at the offset in its header, which the safetensors library has checked
    before."""
    from safetensors import safe_open

    with safe_open(path, "np") as checked:
        check_safetensors(path, checked.metadata() or {})
        names = sorted(checked.keys())
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    chosen = header[choose_key(names, key, path)]
    if chosen["dtype"] not in _SAFETENSORS:
        raise UsageError(
            f"`{path}` holds {chosen['dtype']}; features must be F16, F32 or F64, so convert them"
        )
    offset, shape = 8 + length + int(chosen["data_offsets"][0]), tuple(chosen["shape"])
    if 0 in shape:
        return np.empty(shape, _SAFETENSORS[chosen["dtype"]])
    return np.memmap(
        path, dtype=_SAFETENSORS[chosen["dtype"]], mode="r", offset=offset, shape=shape
    )


def _csv(path: Path, key: str | None) -> NDArray[Any]:
    """All columns of numbers but those named in `NOT_FEATURES`. The first row is a header unless
    all its cells are numbers."""
    import pyarrow as pa
    import pyarrow.csv as pc

    with path.open(encoding="utf-8-sig") as file:
        first = (
            file.readline()
            .strip()
            .split(delimiter := "\t" if path.suffix.lower() == ".tsv" else ",")
        )
    options = pc.ReadOptions(autogenerate_column_names=all(_is_float(cell) for cell in first))
    table = pc.read_csv(
        path, read_options=options, parse_options=pc.ParseOptions(delimiter=delimiter)
    )
    numbers = [
        field.name
        for field in table.schema
        if pa.types.is_floating(field.type) or pa.types.is_integer(field.type)
    ]
    names = [name for name in numbers if name.lower() not in NOT_FEATURES]
    if not names:
        raise UsageError(
            f"`{path}` has no columns of numbers that could be features; its columns are"
            f" {', '.join(table.column_names[:8])}"
        )
    empty = next((name for name in names if table[name].null_count), None)
    if empty is not None:
        raise KinfolkError(f"`{path}` has empty cells in the column `{empty}`; remove or fill them")
    return np.stack([table[name].to_numpy() for name in names], axis=1).astype(
        np.float64, copy=False
    )


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _torch(path: Path, key: str | None) -> NDArray[Any]:
    """A tensor, or one of a dictionary of tensors; loaded without running code."""
    import torch

    loaded = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(loaded, dict):
        tensors = {
            str(name): value for name, value in loaded.items() if isinstance(value, torch.Tensor)
        }
        loaded = tensors[choose_key(list(tensors), key, path)]
    if not isinstance(loaded, torch.Tensor):
        raise UsageError(
            f"`{path}` (={type(loaded).__name__}) must contain a tensor or a dictionary of tensors"
        )
    array: NDArray[Any] = (
        (loaded.float() if loaded.dtype == torch.bfloat16 else loaded).detach().numpy()
    )
    return array


def choose_key(names: list[str], key: str | None, path: Path) -> str:
    """The name of the features among several arrays."""
    found = f"it contains {', '.join(names) or 'nothing'}"
    if key is not None:
        if key not in names:
            raise UsageError(f"`{path}` contains no {key!r}; {found}")
        return key
    chosen = next((name for name in KEYS if name in names), names[0] if len(names) == 1 else None)
    if chosen is None:
        raise UsageError(f"give the name of the features in `{path}` with --key; {found}")
    return chosen


def _spill(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array in a temporary file, which is removed with the array."""
    if 0 in shape:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, dtype=dtype, mode="w+", shape=shape)


def _instead(path: Path) -> str:
    """What to give instead of a file that does not exist: one with a similar name, or a new one."""
    present = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    similar = difflib.get_close_matches(path.name, present, n=1, cutoff=0.75)
    if similar:
        return f"did you mean `{path.with_name(similar[0])}`?"
    return (
        "give a folder of images, a run folder, or a file of features, such as `kinfolk embed RUN"
        " --out features.npy` writes"
    )


def _kinds() -> str:
    return ", ".join(SUFFIXES)
