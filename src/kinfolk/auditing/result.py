"""The result of an audit, and the files it is written to.

Dimension key: N data set, P listed pairs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kinfolk.auditing.alpha import BatchLine, Survey
from kinfolk.auditing.approximate import Check
from kinfolk.auditing.doubtful_samples import LabelCheck
from kinfolk.auditing.inputs import Floats, Ints
from kinfolk.auditing.standing_out import Outstanding
from kinfolk.auditing.verdict import UNKNOWN, Provenance, verdict
from kinfolk.errors import escaped, utf8_key
from kinfolk.files import write_by_name

if TYPE_CHECKING:
    from kinfolk.auditing.page import Thumbnails
    from kinfolk.data.images import ImageData

PAIR = np.dtype(
    [("anchor", np.int64), ("kin", np.int64), ("similarity", np.float32), ("rank", np.int32)]
)
TABLES = ("pairs", "groups", "hubs", "mislabels", "outliers")
WRITTEN = (
    "thresholds.parquet",
    *(f"{name}.{kind}" for name in TABLES for kind in ("parquet", "csv")),
    "curve.csv",
    "summary.json",
    "audit.html",
)
"""Files that `save` may write into a folder."""
SAMPLES = "kinfolk.samples"
"""Key of the number of audited samples in the metadata of the Parquet files."""


@dataclass(frozen=True)
class Audit:
    """The false negatives of an embedding.

    Args:
        alpha: share of each sample's similarities that is flagged.
        thresholds: (N,) the (1 − alpha) quantile of each sample's N − 1 similarities; similarities
            above it are flagged.
        pairs: (P,) rows of anchor, kin, similarity and rank (from 1, closest first): the flagged
            pairs, at most K for each anchor.
        flagged: (N,) number of flagged pairs of each anchor, listed or not.
        occurrence: (N,) number of anchors that flag each sample.
        alphas: (N,) each sample's own share, from the distribution of its similarities; their mean
            is near alpha.
        groups: rows of group, sample, kind: duplicates and near-duplicates.
        hubs: rows of sample, occurrence, times_expected.
        label_check: likely label errors, and how well the features can tell them.
        outliers: rows of sample, similarity, usual: samples that are unusually far from their
            nearest neighbours.
        outstanding: for several α the share of the flagged pairs that stands out.
        best_alpha: the α with the highest F1 on the labels; None without labels.
        kin_share: share of pairs with equal labels; NaN without labels.
        kin_share_range: its 95 % confidence interval, if a random part of the samples is labelled.
        precision, recall, f1: of all flagged pairs against the labels; NaN without labels.
        batches: expected false negatives in a batch; without labels, negatives that stand out.
        views: views of each sample among the negatives of a batch.
        survey: statistics of some anchors; with labels, precision and recall along α.
        verified: whether near-duplicates were verified by their pixels.
        check: agreement of an approximate audit with exact values; None for an exact one.
        labels, classes: (N,) labels, −1 where unknown, and the names of the classes, if given.
        keys: (N,) names of the samples, such as file names, if given.
        texts: (N,) texts of the samples, if given.
    """

    alpha: float
    thresholds: Floats
    pairs: NDArray[Any]
    flagged: Ints
    occurrence: Ints
    alphas: Floats
    groups: NDArray[Any]
    hubs: NDArray[Any]
    label_check: LabelCheck
    outliers: NDArray[Any]
    outstanding: Outstanding
    best_alpha: float | None
    kin_share: float
    kin_share_range: tuple[float, float]
    precision: float
    recall: float
    f1: float
    batches: tuple[BatchLine, ...]
    views: int
    survey: Survey = field(repr=False)
    verified: bool = False
    check: Check | None = None
    labels: Ints | None = field(default=None, repr=False)
    classes: list[str] | None = field(default=None, repr=False)
    keys: Sequence[str] | None = field(default=None, repr=False)
    texts: Sequence[str] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.thresholds)

    @property
    def mislabels(self) -> NDArray[Any]:
        """Rows of sample, label, suggested and probability: likely label errors."""
        return self.label_check.found

    @property
    def suggested_alpha(self) -> float | None:
        """The share of all pairs that stands out; None if it is less than one pair for each
        anchor."""
        share = self.outstanding.share
        return share if share * (len(self) - 1) >= 1 else None

    @property
    def labelled(self) -> int:
        """Number of samples with a known label."""
        return 0 if self.labels is None else int((self.labels >= 0).sum())

    def __repr__(self) -> str:
        found = f"{len(self.pairs):,} pairs of {len(self):,} samples, alpha={self.alpha:g}"
        judged = (
            ""
            if math.isnan(self.f1)
            else f", precision {self.precision:.1%}, recall {self.recall:.1%}, F1 {self.f1:.3f}"
        )
        return f"<Audit: {found}{judged}>"

    def summary(self, origin: Provenance = UNKNOWN) -> dict[str, Any]:
        """The contents of summary.json; see `save`."""
        figures = {
            "samples": len(self),
            "alpha": self.alpha,
            "exact": self.check is None,
            "check": None if self.check is None else asdict(self.check),
            "flagged_pairs": int(self.flagged.sum()),
            "listed_pairs": len(self.pairs),
            "suggested_alpha": self.suggested_alpha,
            "outstanding_share": self.outstanding.share,
            "flagged_that_stand_out": self.outstanding.at(self.alpha),
            "best_alpha": self.best_alpha,
            "kin_share": self.kin_share,
            "kin_share_range": None if math.isnan(self.kin_share) else list(self.kin_share_range),
            "precision": self.precision,
            "recall": self.recall,
            "f1": self.f1,
            "surveyed_anchors": len(self.survey.anchors),
            "duplicate_groups": self.num_groups("duplicate"),
            "near_duplicate_groups": self.num_groups("near-duplicate"),
            "near_duplicates_verified": self.verified,
            "hubs": len(self.hubs),
            "mislabels": len(self.mislabels),
            "label_accuracy": self.label_check.accuracy,
            "label_noise": self.label_check.noise,
            "outliers": len(self.outliers),
            "batches": [asdict(line) for line in self.batches],
            "verdict": verdict(self, origin).sentences,
        }
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in figures.items()
        }

    def num_groups(self, kind: str) -> int:
        """Number of groups of a kind: "duplicate" or "near-duplicate"."""
        return len(np.unique(self.groups["group"][self.groups["kind"] == kind]))

    def class_name(self, label: int) -> str:
        """The name of a class, or its number as text; empty for an unknown label."""
        return "" if label < 0 else self.classes[label] if self.classes else str(label)

    def save(
        self,
        folder: str | os.PathLike[str],
        images: ImageData | Thumbnails | None = None,
        origin: Provenance = UNKNOWN,
    ) -> Path:
        """Writes tables, summary and page into `folder`, replacing those of an earlier audit.

        Args:
            folder: is created if it is missing.
            images: images of the samples for the page.
            origin: where samples and features come from, for the words and commands of the verdict.
        """
        from kinfolk.auditing.page import write_page

        out = Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        ids = np.arange(len(self), dtype=np.int64)
        of_samples: dict[str, Any] = {
            "id": ids,
            "threshold": self.thresholds,
            "flagged": self.flagged,
            "occurrence": self.occurrence,
            "alpha": self.alphas,
        }
        self._write(of_samples | self._keys("key", ids), out / "thresholds.parquet")
        for name in TABLES:
            columns = self._columns(name)
            if columns is None:
                for kind in ("parquet", "csv"):
                    (out / f"{name}.{kind}").unlink(missing_ok=True)
            else:
                self._write(columns, out / f"{name}.parquet", out / f"{name}.csv")
        points = [asdict(point) for point in self.survey.curve]
        if points:
            self._write(
                {column: np.asarray([point[column] for point in points]) for column in points[0]},
                None,
                out / "curve.csv",
            )
        else:
            (out / "curve.csv").unlink(missing_ok=True)
        write_by_name(
            out / "summary.json",
            lambda path: path.write_text(
                json.dumps(self.summary(origin), indent=2) + "\n", encoding="utf-8"
            ),
        )
        write_by_name(out / "audit.html", lambda path: write_page(self, path, images, origin))
        return out

    def _columns(self, name: str) -> dict[str, Any] | None:
        """The columns of a table, with the keys of its samples; None for a table that this audit
        does not have."""
        rows: NDArray[Any] = getattr(self, name)
        columns: dict[str, Any] = {column: rows[column] for column in rows.dtype.names or ()}
        if name == "pairs":
            return (
                columns
                | self._keys("anchor_key", rows["anchor"])
                | self._keys("kin_key", rows["kin"])
                | self._texts("anchor_text", rows["anchor"])
                | self._texts("kin_text", rows["kin"])
            )
        if name == "mislabels":
            if self.labels is None:
                return None
            names = ("label", "suggested")
            columns |= {
                each: [utf8_key(self.class_name(int(label))) for label in rows[each]]
                for each in names
            }
        return columns | self._keys("key", rows["sample"]) | self._texts("text", rows["sample"])

    def _keys(self, column: str, ids: NDArray[np.int64]) -> dict[str, Any]:
        """The keys of samples as a column; empty if the samples have no keys."""
        return {} if self.keys is None else {column: _taken(self.keys, ids)}

    def _texts(self, column: str, ids: NDArray[np.int64]) -> dict[str, Any]:
        """The texts of samples as a column; empty if the samples have no texts."""
        return {} if self.texts is None else {column: _taken(self.texts, ids)}

    def _write(
        self, columns: dict[str, Any], parquet: Path | None, csv: Path | None = None
    ) -> None:
        """Writes columns of one length as Parquet, as CSV, or as both."""
        import pyarrow as pa
        import pyarrow.csv as pc
        import pyarrow.parquet as pq

        arrays = {
            name: values if isinstance(values, pa.Array) else _as_array(values)
            for name, values in columns.items()
        }
        table = pa.table(arrays)
        if parquet is not None:
            noted = table.replace_schema_metadata({SAMPLES: str(len(self))})
            write_by_name(parquet, lambda path: pq.write_table(noted, path))
        if csv is not None:
            safe = pa.table({name: _escaped(array) for name, array in arrays.items()})
            write_by_name(csv, lambda path: pc.write_csv(safe, path))


def _taken(values: Sequence[str], ids: NDArray[np.int64]) -> Any:
    """An Arrow array of the values at `ids`, each made once."""
    import pyarrow as pa

    return pa.array([utf8_key(value) for value in values], pa.string()).take(pa.array(ids))


def _as_array(values: NDArray[Any] | list[str]) -> Any:
    """An Arrow array; texts also where there are no rows."""
    import pyarrow as pa

    if isinstance(values, list) or values.dtype.kind == "U":
        return pa.array(list(values), pa.string())
    return pa.array(values)


def _escaped(array: Any) -> Any:
    """Texts for a CSV file, so that no key is taken for a formula; each distinct text is escaped
    once."""
    import pyarrow as pa

    if not pa.types.is_string(array.type):
        return array
    coded = array.dictionary_encode()
    texts = pa.array(
        [None if text is None else escaped(text) for text in coded.dictionary.to_pylist()],
        pa.string(),
    )
    return texts.take(coded.indices)
