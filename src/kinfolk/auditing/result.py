"""Tables and other files, written whole or not at all.

Labels of the audited samples, from a file or from Python.

Dimension key: N data set.

What an audit found, and how it is written down.

Dimension key: N data set, P listed pairs.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kinfolk.auditing.alpha import BatchLine, Survey
from kinfolk.auditing.approximate import Check
from kinfolk.auditing.inputs import Floats, Ints, choose_key
from kinfolk.data.labels import encode_labels
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.files import first_line, write_by_name

if TYPE_CHECKING:
    from kinfolk.data.images import ImageData


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


COLUMN = "label"


def encoded(values: Any, num_samples: int, name: str = "`labels`") -> tuple[Ints, list[str] | None]:
    """(N,) class of each sample, −1 where it is unknown, and the classes' names where they have any."""
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    if len(listed) != num_samples:
        raise UsageError(f"{name} (={len(listed):,} labels) must be as many as the samples (={num_samples:,}): one for each row, in order")
    if any(isinstance(value, list) for value in listed):
        raise UsageError(f"{name} must hold one label for each sample, not a list of them")
    labels, classes = encode_labels(listed, name)
    return np.asarray([-1 if label is None else label for label in labels], dtype=np.int64), classes


def read_labels(path: str | os.PathLike[str]) -> list[Any]:
    """The labels in a `.npy`, `.npz` (`labels` or `y`), `.csv` / `.tsv` / `.parquet` (column `label`) or `.txt` (a line each) file."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no file `{path}`; --labels takes .npy, .npz, .csv, .tsv, .parquet or .txt")
    suffix = path.suffix.lower()
    try:
        if suffix == ".npy":
            return list(np.load(path, allow_pickle=False).tolist())
        if suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                names = list(arrays.files)
                return list(
                    arrays[next((name for name in ("labels", "label", "y") if name in names), None) or choose_key(names, None, path)]
                )
        if suffix == ".parquet":
            import pyarrow.parquet as pq

            table = pq.read_table(path, partitioning=None)
            return list(table[_column(table.column_names, path)].to_pylist())
        if suffix in (".csv", ".tsv"):
            with path.open(newline="", encoding="utf-8-sig") as file:
                rows = list(csv.reader(file, delimiter="\t" if suffix == ".tsv" else ","))
            place = (rows[0] if rows else []).index(_column(rows[0] if rows else [], path))
            return [row[place] for row in rows[1:] if row]
        if suffix == ".txt":
            return path.read_text(encoding="utf-8").splitlines()
    except KinfolkError:
        raise
    except Exception as error:  # readers raise nearly anything on a broken file
        raise KinfolkError(f"`{path}` holds no readable labels ({first_line(error)})") from error
    raise UsageError(f"--labels (={path}) must end in .npy, .npz, .csv, .tsv, .parquet or .txt")


def _column(names: list[str], path: Path) -> str:
    if COLUMN in names:
        return COLUMN
    if len(names) == 1:
        return names[0]
    raise UsageError(f"`{path}` has no column {COLUMN!r}; its columns are {', '.join(names) or 'none'}")


PAIR = np.dtype([("anchor", np.int64), ("kin", np.int64), ("similarity", np.float32), ("rank", np.int32)])
WRITTEN = (
    "thresholds.parquet",
    "pairs.parquet",
    "pairs.csv",
    "groups.parquet",
    "groups.csv",
    "hubs.parquet",
    "hubs.csv",
    "curve.csv",
    "summary.json",
    "audit.html",
)
"""What `save` may write into a folder."""


@dataclass(frozen=True)
class Audit:
    """The false negatives of an embedding.

    Args:
        alpha: share of each sample's similarities that is flagged.
        thresholds: (N,) the (1 − alpha) quantile of each sample's N − 1 similarities; what lies above it is flagged.
        pairs: (P,) rows of anchor, kin, similarity and rank (from 1, closest first): the flagged pairs, at most K for each anchor.
        flagged: (N,) how many are flagged for each anchor, listed or not.
        occurrence: (N,) of how many anchors each sample is kin.
        alphas: (N,) each sample's own share, by the shape of its similarities; their mean is near alpha.
        groups: rows of group, sample, kind: duplicates and near-duplicates.
        hubs: rows of sample, occurrence, times_expected.
        suggested_alpha: the share of pairs that stands out.
        best_alpha: the α with the highest F1 on the labels; None without labels.
        kin_share: share of pairs with equal labels; NaN without labels.
        precision, recall, f1: of all flagged pairs against the labels; NaN without labels.
        batches: false negatives to be expected in a batch.
        survey: a few anchors looked at in full; with labels, precision and recall along α.
        check: how well an approximate audit agrees with exact values; None for an exact one.
        labels, classes: (N,) labels, −1 where unknown, and the classes' names, where given.
        names: of the samples, for the page.
    """

    alpha: float
    thresholds: Floats
    pairs: NDArray[Any]
    flagged: Ints
    occurrence: Ints
    alphas: Floats
    groups: NDArray[Any]
    hubs: NDArray[Any]
    suggested_alpha: float
    best_alpha: float | None
    kin_share: float
    precision: float
    recall: float
    f1: float
    batches: tuple[BatchLine, ...]
    survey: Survey = field(repr=False)
    check: Check | None = None
    labels: Ints | None = field(default=None, repr=False)
    classes: list[str] | None = field(default=None, repr=False)
    names: list[str] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.thresholds)

    def __repr__(self) -> str:
        found = f"{len(self.pairs):,} pairs of {len(self):,} samples, alpha={self.alpha:g}"
        judged = "" if math.isnan(self.f1) else f", precision {self.precision:.1%}, recall {self.recall:.1%}, F1 {self.f1:.3f}"
        return f"<Audit: {found}{judged}>"

    def summary(self) -> dict[str, Any]:
        """The figures of summary.json."""
        figures = {
            "samples": len(self),
            "alpha": self.alpha,
            "exact": self.check is None,
            "check": None if self.check is None else asdict(self.check),
            "flagged_pairs": int(self.flagged.sum()),
            "listed_pairs": len(self.pairs),
            "suggested_alpha": self.suggested_alpha,
            "best_alpha": self.best_alpha,
            "kin_share": self.kin_share,
            "precision": self.precision,
            "recall": self.recall,
            "f1": self.f1,
            "surveyed_anchors": len(self.survey.anchors),
            "duplicate_groups": self.num_groups("duplicate"),
            "near_duplicate_groups": self.num_groups("near-duplicate"),
            "hubs": len(self.hubs),
            "batches": [asdict(line) for line in self.batches],
        }
        return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in figures.items()}

    def num_groups(self, kind: str) -> int:
        """How many groups there are of a kind: "duplicate" or "near-duplicate"."""
        return len(np.unique(self.groups["group"][self.groups["kind"] == kind]))

    def save(self, folder: str | os.PathLike[str], images: ImageData | None = None) -> Path:
        """Writes tables, summary and page into `folder`, over those of an earlier audit; `images` gives the page its pictures."""
        from kinfolk.auditing.page import write_page

        out = Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        ids = np.arange(len(self), dtype=np.int64)
        of_samples: dict[str, NDArray[Any]] = {
            "id": ids,
            "threshold": self.thresholds,
            "flagged": self.flagged,
            "occurrence": self.occurrence,
            "alpha": self.alphas,
        }
        write_table(of_samples, out / "thresholds.parquet")
        for name, rows in (("pairs", self.pairs), ("groups", self.groups), ("hubs", self.hubs)):
            write_table({column: rows[column] for column in rows.dtype.names or ()}, out / f"{name}.parquet", out / f"{name}.csv")
        points = [asdict(point) for point in self.survey.curve]
        if points:
            write_table({column: np.asarray([point[column] for point in points]) for column in points[0]}, None, out / "curve.csv")
        else:
            (out / "curve.csv").unlink(missing_ok=True)
        replace(out / "summary.json", lambda path: path.write_text(json.dumps(self.summary(), indent=2) + "\n", encoding="utf-8"))
        replace(out / "audit.html", lambda path: write_page(self, path, images))
        return out
