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

from kinfolk.auditing.inputs import encode, open_input
from kinfolk.auditing.page import write_page
from kinfolk.auditing.search import Kin, exact_kin
from kinfolk.auditing.survey import (
    ALPHAS,
    NAN,
    BatchLine,
    Outstanding,
    Survey,
    batch_lines,
    best_alpha,
    kin_pairs,
    kin_share,
    kin_share_range,
    kin_shares,
    measure_standing_out,
    score,
    take_survey,
)
from kinfolk.auditing.suspects import (
    NEIGHBOURS,
    LabelCheck,
    check_labels,
    find_groups,
    find_hubs,
    find_outliers,
)
from kinfolk.auditing.verdict import UNKNOWN, Provenance, verdict
from kinfolk.errors import UsageError, escape_cell, utf8_key
from kinfolk.features import Features, Floats, Ints, open_features
from kinfolk.files import write_by_name

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

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
    workers: int | None = None,
    progress: bool = False,
) -> Audit:
    """Finds the false negatives of an embedding: for each sample, the others above the (1 − α)
    quantile of its similarities.

    Args:
        features: (N, D) floats, as an array, a tensor or a file (`.npy`, `.npz`, `.csv`, `.tsv`,
            `.parquet`, `.safetensors`, `.pt`); or a run folder, whose encoder embeds its training
            samples. `.npy` files are mapped into memory.
        alpha: share of each sample's N − 1 similarities to flag, in (0, 1).
        labels: (N,) classes or their names; −1, None or "" means unknown. With labels precision,
            recall and F1 are computed.
        pairs: largest number of flagged pairs to list for each anchor, closest first.
        key: name of the array in a file with several arrays.
        keys, texts: (N,) names and texts of the samples, for the tables and the page.
        images: images of the samples; near-duplicates are then verified by their pixels.
        views: views of each sample among the negatives of a batch; 1 for image and text.
        workers: number of threads; by default as many as torch uses.

    Example:
        >>> import numpy as np, kinfolk as kf
        >>> found = kf.audit(np.random.default_rng(0).normal(size=(50, 8)), alpha=0.1)
        >>> found.thresholds.shape, found.pairs.dtype.names
        ((50,), ('anchor', 'kin', 'similarity', 'rank'))
    """
    if not 0 < alpha < 1:
        raise UsageError(
            f"`alpha` (={alpha}) must be in (0, 1): the share of a sample's similarities to flag"
        )
    if pairs < 1:
        raise UsageError(f"`pairs` (={pairs}) must be at least 1")
    if isinstance(features, str | os.PathLike) and (Path(features) / "config.yaml").is_file():
        with open_input(features, progress=progress) as run:
            features, views = run.features, run.views
            labels = run.labels if labels is None else labels
            keys = run.keys if keys is None else keys
            texts = run.texts if texts is None else texts
            images = run.images if images is None else images
    checked = _check_features(features, key)
    num = len(checked)
    labels_N, classes = (None, None) if labels is None else encode(labels, num)
    for name, given in (("keys", keys), ("texts", texts)):
        if given is not None and len(given) != num:
            raise UsageError(
                f"`{name}` (={len(given):,}) must be as many as the samples (={num:,})"
            )
    survey = take_survey(checked, alpha, labels_N, progress)
    nearest = max(pairs, NEIGHBOURS)
    kin = exact_kin(checked, alpha, nearest, labels_N, workers=workers, progress=progress)
    copies_M2 = None
    if images is not None:
        from kinfolk.auditing.pixel_copies import find_copies

        copies_M2 = find_copies(images, kin.near_NK, progress)
    precision, recall, f1 = NAN, NAN, NAN
    if labels_N is not None:
        precision, recall, f1 = score(kin.hits, kin.num_known, kin_pairs(labels_N))
    outstanding = measure_standing_out(checked, sorted({*ALPHAS, alpha}))
    return Audit(
        alpha=alpha,
        thresholds=kin.threshold_N,
        pairs=_list_pairs(kin, pairs),
        flagged=kin.flagged_N,
        occurrence=kin.occurrence_N,
        groups=find_groups(checked, kin.near_NK, kin.near_sim_NK, copies_M2),
        hubs=find_hubs(kin.occurrence_N),
        label_check=check_labels(checked, labels_N, kin.near_NK),
        outliers=find_outliers(kin.near_sim_NK),
        outstanding=outstanding,
        best_alpha=best_alpha(survey),
        kin_share=NAN if labels_N is None else kin_share(labels_N),
        kin_share_range=(NAN, NAN) if labels_N is None else kin_share_range(labels_N),
        precision=precision,
        recall=recall,
        f1=f1,
        batches=batch_lines(kin_shares(labels_N, outstanding.share), num, views),
        views=views,
        survey=survey,
        verified=images is not None,
        labels=labels_N,
        classes=classes,
        keys=keys,
        texts=texts,
    )


def _check_features(features: Any, key: str | None) -> Features:
    if isinstance(features, str | os.PathLike):
        return Features(open_features(features, key), f"`{features}`")
    if isinstance(features, torch.Tensor):
        features = features.detach().cpu()
        features = features.float() if features.dtype == torch.bfloat16 else features
    return Features(np.asarray(features))


def _list_pairs(kin: Kin, pairs: int) -> NDArray[Any]:
    flagged_NK = (kin.near_sim_NK > kin.threshold_N[:, None]) & (kin.near_NK >= 0)
    row_P, rank_P = np.nonzero(flagged_NK[:, :pairs])
    rows = np.empty(len(row_P), dtype=PAIR)
    rows["anchor"], rows["kin"], rows["rank"] = row_P, kin.near_NK[row_P, rank_P], rank_P + 1
    rows["similarity"] = kin.near_sim_NK[row_P, rank_P]
    return rows


@dataclass(frozen=True)
class Audit:
    """The false negatives of an embedding; see docs/audit.md.

    Args:
        thresholds: (N,) the (1 − alpha) quantile of each sample's N − 1 similarities; similarities
            above it are flagged.
        pairs: (P,) rows of anchor, kin, similarity and rank (from 1, closest first).
        flagged: (N,) number of flagged pairs of each anchor, listed or not.
        occurrence: (N,) number of anchors that flag each sample.
        groups, hubs, outliers: rows of group, sample, kind; of sample, occurrence, times_expected;
            of sample, similarity, median.
        label_check: likely label errors, and how well the features can tell them.
        outstanding: for several α the share of the flagged pairs that stands out.
        best_alpha: the α with the highest F1 among those at which at least half of the flagged
            pairs are right by the labels; None without labels or if there is none.
        kin_share, kin_share_range: share of pairs with equal labels, and its 95 % confidence
            interval if a random part of the samples is labelled; NaN without labels.
        precision, recall, f1: of all flagged pairs against the labels; NaN without labels.
        batches: expected false negatives in a batch; without labels, negatives that stand out.
        survey: statistics of some anchors; with labels, precision and recall along α.
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
        text = f"{len(self.pairs):,} pairs of {len(self):,} samples, alpha={self.alpha:g}"
        if not math.isnan(self.f1):
            text += f", precision {self.precision:.1%}, recall {self.recall:.1%}, F1 {self.f1:.3f}"
        return f"<Audit: {text}>"

    def summary(self, origin: Provenance = UNKNOWN) -> dict[str, Any]:
        """The contents of summary.json; see `save`."""
        same = ("alpha", "suggested_alpha", "best_alpha", "kin_share", "precision", "recall", "f1")
        figures = {
            "samples": len(self),
            **{name: getattr(self, name) for name in same},
            "flagged_pairs": int(self.flagged.sum()),
            "listed_pairs": len(self.pairs),
            "outstanding_share": self.outstanding.share,
            "flagged_that_stand_out": self.outstanding.at(self.alpha),
            "kin_share_range": None if math.isnan(self.kin_share) else list(self.kin_share_range),
            "surveyed_anchors": len(self.survey.anchors),
            "duplicate_groups": self.num_groups("duplicate"),
            "near_duplicate_groups": self.num_groups("near-duplicate"),
            "near_duplicates_verified": self.verified,
            **{name: len(getattr(self, name)) for name in ("hubs", "mislabels", "outliers")},
            "label_accuracy": self.label_check.accuracy,
            "label_noise": self.label_check.noise,
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
            images: images of the samples for the page.
            origin: where samples and features come from, for the words and commands of the verdict.
        """
        out = Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        for name in WRITTEN:
            if name.endswith(".csv") or name.startswith("mislabels"):
                (out / name).unlink(missing_ok=True)  # this audit may not have it
        ids = np.arange(len(self), dtype=np.int64)
        thresholds = {
            "id": ids,
            "threshold": self.thresholds,
            "flagged": self.flagged,
            "occurrence": self.occurrence,
        }
        self._write(out / "thresholds.parquet", thresholds | self._describe("", ids))
        for name in TABLES if self.labels is not None else set(TABLES) - {"mislabels"}:
            self._write(out / f"{name}.parquet", self._columns(name), out / f"{name}.csv")
        if points := [asdict(point) for point in self.survey.curve]:
            curve = {name: np.asarray([point[name] for point in points]) for name in points[0]}
            self._write(None, curve, out / "curve.csv")
        text = json.dumps(self.summary(origin), indent=2) + "\n"
        write_by_name(
            out / "summary.json", lambda unfinished: unfinished.write_text(text, encoding="utf-8")
        )
        write_by_name(
            out / "audit.html", lambda unfinished: write_page(self, unfinished, images, origin)
        )
        return out

    def _columns(self, name: str) -> dict[str, Any]:
        """The columns of a table, with the keys and texts of its samples."""
        rows: NDArray[Any] = getattr(self, name)
        columns: dict[str, Any] = {column: rows[column] for column in rows.dtype.names or ()}
        if name == "pairs":
            ends = self._describe("anchor_", rows["anchor"]) | self._describe("kin_", rows["kin"])
            # keys first, then texts
            return columns | {end: ends[end] for end in sorted(ends, key=lambda end: end[-4:])}
        if name == "mislabels":
            for each in ("label", "suggested"):
                columns[each] = [utf8_key(self.class_name(int(label))) for label in rows[each]]
        return columns | self._describe("", rows["sample"])

    def _describe(self, prefix: str, ids: NDArray[np.int64]) -> dict[str, Any]:
        """The keys and texts of samples as columns, if the samples have any."""
        import pyarrow as pa

        columns = {}
        for name, values in (("key", self.keys), ("text", self.texts)):
            if values is not None:  # each value is made once
                column = pa.array([utf8_key(value) for value in values], pa.string())
                columns[prefix + name] = column.take(pa.array(ids))
        return columns

    def _write(
        self, parquet: Path | None, columns: dict[str, Any], csv: Path | None = None
    ) -> None:
        import pyarrow as pa
        import pyarrow.csv as pc
        import pyarrow.parquet as pq

        def as_column(values: Any) -> Any:
            texts = isinstance(values, list) or getattr(values, "dtype", np.dtype("O")).kind == "U"
            return pa.array(list(values), pa.string()) if texts else values

        table = pa.table({name: as_column(values) for name, values in columns.items()})
        if parquet is not None:
            named = table.replace_schema_metadata({SAMPLES: str(len(self))})
            write_by_name(parquet, lambda unfinished: pq.write_table(named, unfinished))
        if csv is not None:
            safe = pa.table({name: _escape(table[name]) for name in table.column_names})
            write_by_name(csv, lambda unfinished: pc.write_csv(safe, unfinished))


def _escape(column: Any) -> Any:
    """Texts for a CSV file, so that no key is taken for a formula; each distinct text once."""
    import pyarrow as pa

    if not pa.types.is_string(column.type):
        return column
    coded = column.combine_chunks().dictionary_encode()
    texts = [None if text is None else escape_cell(text) for text in coded.dictionary.to_pylist()]
    return pa.array(texts, pa.string()).take(coded.indices)
