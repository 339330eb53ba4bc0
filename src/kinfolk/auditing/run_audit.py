"""`kf.audit`: checks its arguments, runs the audit and collects the result.

Dimension key: N data set, D embedding, K nearest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from kinfolk.auditing.alpha import (
    ALPHAS,
    BATCH_SIZES,
    Survey,
    batch_lines,
    best_alpha,
    kin_pairs,
    kin_share,
    kin_share_range,
    kin_shares,
    take_survey,
)
from kinfolk.auditing.annotations import encode
from kinfolk.auditing.approximate import Check, approximate_kin
from kinfolk.auditing.doubtful_samples import NEIGHBOURS, check_labels, find_outliers
from kinfolk.auditing.duplicates import NEAR, find_groups, find_hubs, verified_groups
from kinfolk.auditing.exact import Kin, exact_kin
from kinfolk.auditing.inputs import Features, Ints, open_features
from kinfolk.auditing.result import PAIR, Audit
from kinfolk.auditing.standing_out import measure_standing_out
from kinfolk.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from kinfolk.data.images import ImageData

EXACT_UP_TO = 200_000
Search = Literal["auto", "exact", "approximate"]


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
    search: Search = "auto",
    near: float = NEAR,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    views: int = 2,
    workers: int | None = None,
    progress: bool = False,
) -> Audit:
    """Finds the false negatives of an embedding: for each sample, the others above the (1 − α)
    quantile of its similarities.

    Args:
        features: (N, D) float16, float32 or float64, as an array, a tensor or a file (`.npy`,
            `.npz`, `.csv`, `.tsv`, `.parquet`, `.safetensors`, `.pt`); or a run folder, whose
            encoder embeds its own training samples. Most files are mapped into memory.
        alpha: share of each sample's N − 1 similarities to flag, in (0, 1).
        labels: (N,) classes or their names; −1, None or "" means unknown. With labels precision,
            recall and F1 are computed.
        pairs: largest number of flagged pairs to list for each anchor, closest first; all of them
            are counted.
        key: name of the array in a file with several arrays.
        keys: (N,) names of the samples, such as file names; they appear in the tables and on the
            page.
        texts: (N,) texts of the samples, for the page.
        images: images of the samples; near-duplicates are then verified by their pixels.
        search: "exact", "approximate" (faiss), or "auto": exact up to 200,000 samples.
        near: largest distance of near-duplicates, relative to the median distance to the nearest
            neighbour.
        batch_sizes: batch sizes for which false negatives are estimated; those larger than the data
            set are left out.
        views: views of each sample among the negatives of a batch; 1 for image and text.
        workers: number of threads; by default as many as torch uses.
        progress: show a progress bar.

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
    if not 0 < near < 1:
        raise UsageError(f"`near` (={near}) must be in (0, 1)")
    if search not in ("auto", "exact", "approximate"):
        raise UsageError(f"`search` (={search!r}) must be auto, exact or approximate")
    if not batch_sizes or min(batch_sizes) < 2:
        raise UsageError(f"`batch_sizes` (={tuple(batch_sizes)}) must be numbers of at least 2")
    if isinstance(features, str | os.PathLike) and (Path(features) / "config.yaml").is_file():
        from kinfolk.auditing.audit_input import open_input

        with open_input(features, progress=progress) as found:
            features, keys, images = (
                found.features,
                found.keys if keys is None else keys,
                found.images if images is None else images,
            )
            labels = found.labels if labels is None else labels
            texts, views = found.texts if texts is None else texts, found.views
    checked = _features(features, key)
    labels_N, classes = (None, None) if labels is None else encode(labels, len(checked))
    for name, given in (("keys", keys), ("texts", texts)):
        if given is not None and len(given) != len(checked):
            raise UsageError(
                f"`{name}` (={len(given):,}) must be as many as the samples (={len(checked):,})"
            )
    survey = take_survey(checked, alpha, labels_N, progress)
    nearest = min(max(pairs, NEIGHBOURS), len(checked) - 1)
    check: Check | None = None
    if search == "exact" or (search == "auto" and len(checked) <= EXACT_UP_TO):
        kin = exact_kin(
            checked, alpha, nearest, survey.level, labels_N, workers=workers, progress=progress
        )
    else:
        kin, check = approximate_kin(
            checked, alpha, nearest, survey.level, workers=workers, progress=progress
        )
    precision, recall, f1 = _judged(kin, survey, alpha, labels_N, check)
    outstanding = measure_standing_out(checked, sorted({*ALPHAS, alpha}))
    nan = float("nan")
    if images is None:
        groups = find_groups(checked, kin.near_NK, kin.near_sim_NK, near)
    else:
        groups = verified_groups(checked, kin.near_NK, images, progress)
    return Audit(
        alpha=alpha,
        thresholds=kin.threshold_N,
        pairs=_listed(kin, pairs),
        flagged=kin.flagged_N,
        occurrence=kin.occurrence_N,
        alphas=kin.alpha_N,
        groups=groups,
        hubs=find_hubs(kin.occurrence_N),
        label_check=check_labels(checked, labels_N, kin.near_NK),
        outliers=find_outliers(kin.near_sim_NK),
        outstanding=outstanding,
        best_alpha=best_alpha(survey),
        kin_share=nan if labels_N is None else kin_share(labels_N),
        kin_share_range=(nan, nan) if labels_N is None else kin_share_range(labels_N),
        precision=precision,
        recall=recall,
        f1=f1,
        batches=batch_lines(
            kin_shares(labels_N, outstanding.share), len(checked), batch_sizes, views
        ),
        views=views,
        survey=survey,
        verified=images is not None,
        check=check,
        labels=labels_N,
        classes=classes,
        keys=keys,
        texts=texts,
    )


def _features(features: Any, key: str | None) -> Features:
    if isinstance(features, str | os.PathLike):
        return Features(open_features(features, key), f"`{features}`")
    if isinstance(features, torch.Tensor):
        features = features.detach().cpu()
        return Features(
            (features.float() if features.dtype == torch.bfloat16 else features).numpy()
        )
    return Features(np.asarray(features))


def _listed(kin: Kin, pairs: int) -> NDArray[Any]:
    """The nearest neighbours above each anchor's threshold, at most `pairs` for each, as rows."""
    flagged_NK = (kin.near_sim_NK > kin.threshold_N[:, None]) & (kin.near_NK >= 0)
    row_P, rank_P = np.nonzero(flagged_NK[:, :pairs])
    rows = np.empty(len(row_P), dtype=PAIR)
    rows["anchor"], rows["kin"], rows["rank"] = row_P, kin.near_NK[row_P, rank_P], rank_P + 1
    rows["similarity"] = kin.near_sim_NK[row_P, rank_P]
    return rows


def _judged(
    kin: Kin, survey: Survey, alpha: float, labels_N: Ints | None, check: Check | None
) -> tuple[float, float, float]:
    """Precision, recall and F1 of all flagged pairs; for an approximate audit, of the surveyed
    anchors."""
    nan = float("nan")
    if labels_N is None:
        return nan, nan, nan
    if check is not None:
        point = next(
            point for point in survey.curve if point.rule == "one α" and point.alpha == alpha
        )
        return point.precision, point.recall, point.f1
    total = kin_pairs(labels_N)
    both = kin.judged + total
    return (
        kin.hits / kin.judged if kin.judged else nan,
        kin.hits / total if total else nan,
        2 * kin.hits / both if both else nan,
    )
