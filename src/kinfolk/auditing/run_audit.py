"""`kf.audit`, its result, and the files that it is written to.

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
import torch
from numpy.typing import NDArray

from kinfolk.auditing.inputs import encode, read_input
from kinfolk.auditing.page import write_audit_page
from kinfolk.auditing.similarities import (
    ALPHAS,
    BATCH_SIZES,
    NAN,
    AlphaCurve,
    BatchLine,
    Outstanding,
    batch_line,
    compare_all,
    kin_share,
    kin_share_range,
    kin_shares,
    measure_curve,
    measure_standing_out,
)
from kinfolk.auditing.suspects import (
    NEIGHBOURS,
    LabelCheck,
    check_labels,
    find_copies,
    find_groups,
    find_hubs,
)
from kinfolk.auditing.verdict import UNKNOWN, Provenance, verdict
from kinfolk.errors import csv_text, require, utf8_key
from kinfolk.features import Features, Floats, Ints, from_tensor, open_features
from kinfolk.files import to_json, write_by_name, write_text

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from kinfolk.auditing.page import Thumbnails
    from kinfolk.data.images import ImageData

PAIR = np.dtype(
    [("anchor", np.int64), ("kin", np.int64), ("similarity", np.float32), ("rank", np.int32)]
)
TABLES = ("pairs.csv", "groups.csv", "hubs.csv", "mislabels.csv")
WRITTEN = ("thresholds.parquet", "pairs.parquet", *TABLES, "summary.json", "audit.html")
SAMPLES = "kinfolk.samples"
"""Key of the number of audited samples in the metadata of the Parquet files."""


def audit(
    features: str | os.PathLike[str] | NDArray[Any] | torch.Tensor,
    alpha: float = 0.01,
    labels: ArrayLike | Sequence[Any] | None = None,
    *,
    pairs: int = 10,
    key: str | None = None,
    keys: Sequence[str] | None = None,
    texts: Sequence[str] | None = None,
    images: ImageData | None = None,
    views: int = 2,
    progress: bool = False,
) -> Audit:
    """Finds the false negatives of an embedding: for each sample, the others above the (1 − α)
    quantile of its similarities.

    Args:
        features: (N, D) floats, as an array, a tensor or a file (`.npy`, `.npz`, `.parquet`,
            `.safetensors`, `.pt`); or a run folder, whose encoder embeds its training samples.
            `.npy` files are mapped into memory.
        alpha: share of each sample's N − 1 similarities to flag, in (0, 1).
        labels: (N,) classes or their names; −1, None or "" means unknown.
        pairs: largest number of flagged pairs to list for each anchor, closest first.
        key: name of the array in a file with several arrays.
        keys, texts: (N,) names and texts of the samples, for the tables and the page.
        images: images of the samples; near-duplicates are then verified by their pixels.
        views: views of each sample among the negatives of a batch; 1 for image and text.

    Example:
        >>> import numpy as np, kinfolk as kf
        >>> found = kf.audit(np.random.default_rng(0).normal(size=(50, 8)), alpha=0.1)
        >>> found.thresholds.shape, found.pairs.dtype.names
        ((50,), ('anchor', 'kin', 'similarity', 'rank'))
    """
    require(0 < alpha < 1, "alpha", alpha, "in (0, 1)")
    require(pairs >= 1, "pairs", pairs, "at least 1")
    if isinstance(features, str | os.PathLike) and (Path(features) / "config.yaml").is_file():
        run = read_input(features, progress=progress)
        features, views = run.features, run.views
        labels = run.labels if labels is None else labels
        keys = run.keys if keys is None else keys
        texts = run.texts if texts is None else texts
        images = run.images if images is None else images
    checked = _check_features(features, key)
    num = len(checked)
    labels_N, classes = (None, None) if labels is None else encode(labels, num)
    for name, given in (("keys", keys), ("texts", texts)):
        number = num if given is None else len(given)
        require(number == num, name, number, f"as many as the samples (={num:,})")
    found = compare_all(checked, alpha, max(pairs, NEIGHBOURS), progress)
    copies_M2 = None if images is None else find_copies(images, found.near_NK, progress)
    outstanding = measure_standing_out(checked, sorted({*ALPHAS, alpha}))
    row_P, rank_P = np.nonzero((found.near_sim_NK > found.threshold_N[:, None])[:, :pairs])
    near_P, sim_P = found.near_NK[row_P, rank_P], found.near_sim_NK[row_P, rank_P]
    shares_A, sizes = kin_shares(labels_N, outstanding.share), [n for n in BATCH_SIZES if n <= num]
    return Audit(
        alpha=alpha,
        thresholds=found.threshold_N,
        pairs=np.rec.fromarrays((row_P, near_P, sim_P, rank_P + 1), dtype=PAIR),
        flagged=found.flagged_N,
        occurrence=found.occurrence_N,
        groups=find_groups(checked, found.near_NK, found.near_sim_NK, copies_M2),
        hubs=find_hubs(found.occurrence_N),
        label_check=check_labels(checked, labels_N, found.near_NK),
        outstanding=outstanding,
        kin_share=kin_share(labels_N),
        kin_share_range=(NAN, NAN) if labels_N is None else kin_share_range(labels_N),
        batches=tuple(batch_line(shares_A, size, views) for size in sizes or [num]),
        views=views,
        curve=AlphaCurve()
        if labels_N is None
        else measure_curve(checked, alpha, labels_N, progress),
        verified=images is not None,
        labels=labels_N,
        classes=classes,
        keys=keys,
        texts=texts,
    )


def _check_features(features: Any, key: str | None) -> Features:
    if isinstance(features, str | os.PathLike):
        return Features(open_features(features, key), f"`{features}`")
    is_tensor = isinstance(features, torch.Tensor)
    return Features(from_tensor(features) if is_tensor else np.asarray(features))


@dataclass(frozen=True)
class Audit:
    """The false negatives of an embedding; figures by the labels are NaN without labels.

    Args:
        thresholds: (N,) the (1 − alpha) quantile of each sample's N − 1 similarities; similarities
            above it are flagged.
        pairs: (P,) rows of anchor, kin, similarity and rank (from 1, closest first).
        flagged: (N,) number of flagged pairs of each anchor, listed or not.
        occurrence: (N,) number of anchors that flag each sample.
        groups, hubs: rows of group, sample, kind; of sample, occurrence, times_expected.
        label_check: likely label errors, and how well the features can tell them.
        outstanding: for several α the share of the flagged pairs that stands out.
        kin_share, kin_share_range: share of pairs with equal labels, and its 95 % confidence
            interval if a random part of the samples is labelled.
        batches: expected false negatives in a batch; without labels, negatives that stand out.
        curve: with labels, precision and recall along α, of all anchors or a random part of them.
        verified: whether near-duplicates were verified by their pixels.
        labels, classes: (N,) labels, −1 where unknown, and the names of the classes.
    """

    alpha: float
    thresholds: Floats
    pairs: NDArray[Any]
    flagged: Ints
    occurrence: Ints
    groups: NDArray[Any]
    hubs: NDArray[Any]
    label_check: LabelCheck
    outstanding: Outstanding
    kin_share: float
    kin_share_range: tuple[float, float]
    batches: tuple[BatchLine, ...]
    views: int
    curve: AlphaCurve = field(repr=False)
    verified: bool = False
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
    def precision(self) -> float:
        """Of the flagged pairs with two known labels; so are `recall` and `f1`."""
        return self.curve.at(self.alpha).precision

    @property
    def recall(self) -> float:
        return self.curve.at(self.alpha).recall

    @property
    def f1(self) -> float:
        return self.curve.at(self.alpha).f1

    @property
    def best_alpha(self) -> float | None:
        """The α with the highest F1 among those at which at least half of the flagged pairs are
        right by the labels, if any."""
        return self.curve.best_alpha()

    @property
    def suggested_alpha(self) -> float | None:
        """The share of all pairs that stands out, if it is at least one pair for each anchor."""
        share = self.outstanding.share
        return share if share * (len(self) - 1) >= 1 else None

    def __repr__(self) -> str:
        text = f"{len(self.pairs):,} pairs of {len(self):,} samples, alpha={self.alpha:g}"
        if not math.isnan(self.f1):
            text += f", precision {self.precision:.1%}, recall {self.recall:.1%}, F1 {self.f1:.3f}"
        return f"<Audit: {text}>"

    def summary(self, origin: Provenance = UNKNOWN) -> dict[str, Any]:
        """The contents of summary.json."""
        same = ("alpha", "suggested_alpha", "best_alpha", "kin_share", "precision", "recall", "f1")
        figures = {
            "samples": len(self),
            **{name: getattr(self, name) for name in same},
            "flagged_pairs": int(self.flagged.sum()),
            "listed_pairs": len(self.pairs),
            "outstanding_share": self.outstanding.share,
            "flagged_that_stand_out": self.outstanding.at(self.alpha),
            "kin_share_range": None if math.isnan(self.kin_share) else list(self.kin_share_range),
            "duplicate_groups": self.num_groups("duplicate"),
            "near_duplicate_groups": self.num_groups("near-duplicate"),
            "near_duplicates_verified": self.verified,
            "hubs": len(self.hubs),
            "mislabels": len(self.mislabels),
            "label_accuracy": self.label_check.accuracy,
            "label_noise": self.label_check.noise,
            "curve": [asdict(point) for point in self.curve.points],
            "batches": [asdict(line) for line in self.batches],
            "verdict": verdict(self, origin).sentences,
        }
        summary: dict[str, Any] = to_json(figures)
        return summary

    def num_groups(self, kind: str) -> int:
        """`kind`: "duplicate" or "near-duplicate"."""
        return len(np.unique(self.groups["group"][self.groups["kind"] == kind]))

    def class_name(self, label: int) -> str:
        return "" if label < 0 else self.classes[label] if self.classes else str(label)

    def save(
        self,
        folder: str | os.PathLike[str],
        images: ImageData | Thumbnails | None = None,
        origin: Provenance = UNKNOWN,
    ) -> Path:
        """Writes tables, summary and page into `folder`, replacing those of an earlier audit.

        Args:
            images: images of the samples for the page.
            origin: where samples and features come from.
        """
        out, ids = Path(folder), np.arange(len(self))
        out.mkdir(parents=True, exist_ok=True)
        (out / "mislabels.csv").unlink(missing_ok=True)  # of an earlier audit with labels
        thresholds = {"id": ids, "threshold": self.thresholds, "flagged": self.flagged}
        thresholds |= {"occurrence": self.occurrence, **self._describe({"": ids})}
        self._write_parquet(out / "thresholds.parquet", thresholds)
        self._write_parquet(out / "pairs.parquet", self._columns("pairs"))
        for file in TABLES if self.labels is not None else TABLES[:-1]:
            columns = self._columns(file.removesuffix(".csv"))
            write_text(out / file, csv_text(list(columns), zip(*columns.values(), strict=True)))
        write_text(out / "summary.json", json.dumps(self.summary(origin), indent=2) + "\n")
        write_audit_page(self, out / "audit.html", images, origin)
        return out

    def _columns(self, name: str) -> dict[str, Any]:
        rows: NDArray[Any] = getattr(self, name)
        columns: dict[str, Any] = {column: rows[column] for column in rows.dtype.names or ()}
        if name == "pairs":
            return columns | self._describe({"anchor_": rows["anchor"], "kin_": rows["kin"]})
        for each in {"label", "suggested"} & set(columns):
            columns[each] = [utf8_key(self.class_name(int(label))) for label in rows[each]]
        return columns | self._describe({"": rows["sample"]})

    def _describe(self, samples: dict[str, NDArray[np.int64]]) -> dict[str, list[str]]:
        """Keys and texts of samples by the prefix of the columns' names."""
        return {
            prefix + name: [utf8_key(values[sample]) for sample in ids]
            for name, values in (("key", self.keys), ("text", self.texts))
            if values is not None
            for prefix, ids in samples.items()
        }

    def _write_parquet(self, path: Path, columns: dict[str, Any]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table(columns).replace_schema_metadata({SAMPLES: str(len(self))})
        write_by_name(path, lambda file: pq.write_table(table, file))
