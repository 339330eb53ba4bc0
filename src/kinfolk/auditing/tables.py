"""Tables and other files, written whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from kinfolk.files import write_by_name


def write_table(columns: dict[str, NDArray[Any]], parquet: Path | None, csv: Path | None = None) -> None:
    """Columns of one length as Parquet, as CSV, or as both."""
    import pyarrow as pa
    import pyarrow.csv as pc
    import pyarrow.parquet as pq

    table = pa.table({name: pa.array(values.tolist() if values.dtype.kind == "U" else values) for name, values in columns.items()})
    if not len(table):
        table = table.cast(pa.schema([(f.name, pa.string() if pa.types.is_null(f.type) else f.type) for f in table.schema]))
    if parquet is not None:
        replace(parquet, lambda path: pq.write_table(table, path))
    if csv is not None:
        replace(csv, lambda path: pc.write_csv(table, path))


def replace(path: Path, write: Callable[[Path], Any]) -> None:
    """A file written whole or not at all."""
    write_by_name(path, write)
