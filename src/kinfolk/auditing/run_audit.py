"""The audit, put together: `kf.audit`.

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
    BATCH_SIZES,
    Survey,
    batch_lines,
    best_alpha,
    kin_pairs,
    kin_share,
    kin_shares,
    suggested_alpha,
    take_survey,
)
from kinfolk.auditing.approximate import Check, approximate_kin
from kinfolk.auditing.exact import Kin, exact_kin
from kinfolk.auditing.groups import NEAR, find_groups, find_hubs
from kinfolk.auditing.inputs import Features, Ints, open_features
from kinfolk.auditing.result import PAIR, Audit, encoded
from kinfolk.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


EXACT_UP_TO = 200_000
Search = Literal["auto", "exact", "approximate"]


def audit(
    features: str | os.PathLike[str] | NDArray[Any] | torch.Tensor,
    alpha: float = 0.01,
    labels: ArrayLike | Sequence[Any] | None = None,
    *,
    pairs: int = 10,
    key: str | None = None,
    names: Sequence[str] | None = None,
    search: Search = "auto",
    near: float = NEAR,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    workers: int | None = None,
    progress: bool = False,
) -> Audit:
    """Finds the false negatives of an embedding: for each sample, who lies above the (1 − α) quantile of its similarities.

    Args:
        features: (N, D) float16, float32 or float64, as an array, a tensor or a file (`.npy`, `.npz`, `.parquet`, `.safetensors`), or a
            run folder, whose encoder then embeds its own training samples. Files are mapped into memory, not copied.
        alpha: share of each sample's N − 1 similarities to flag, in (0, 1).
        labels: (N,) classes or their names; −1, None or "": unknown. With them precision, recall and F1 are counted.
        pairs: how many of an anchor's flagged pairs are listed, closest first; all are counted.
        key: name of the array, where the file holds several.
        names: of the samples, for the page.
        search: "exact", "approximate" (faiss), or by the number of samples: exact up to 200,000.
        near: near-duplicates are this many times closer than neighbours usually are.
        batch_sizes: for which to expect false negatives; larger ones than the data are left out.
        workers: threads; by default as many as torch uses.
        progress: shows a bar.

    Example:
        >>> import numpy as np, kinfolk as kf
        >>> found = kf.audit(np.random.default_rng(0).normal(size=(50, 8)), alpha=0.1)
        >>> found.thresholds.shape, found.pairs.dtype.names
        ((50,), ('anchor', 'kin', 'similarity', 'rank'))
    """
    if not 0 < alpha < 1:
        raise UsageError(f"`alpha` (={alpha}) must be in (0, 1): the share of a sample's similarities to flag")
    if pairs < 1:
        raise UsageError(f"`pairs` (={pairs}) must be at least 1")
    if not 0 < near < 1:
        raise UsageError(f"`near` (={near}) must be in (0, 1)")
    if search not in ("auto", "exact", "approximate"):
        raise UsageError(f"`search` (={search!r}) must be auto, exact or approximate")
    if not batch_sizes or min(batch_sizes) < 2:
        raise UsageError(f"`batch_sizes` (={tuple(batch_sizes)}) must be numbers of at least 2")
    if isinstance(features, str | os.PathLike) and (Path(features) / "config.yaml").is_file():
        from kinfolk.auditing.inputs import embedded

        features, labels, names = embedded(Path(features), labels, progress)
    checked = _features(features, key)
    labels_N, classes = (None, None) if labels is None else encoded(labels, len(checked))
    if names is not None and len(names) != len(checked):
        raise UsageError(f"`names` (={len(names):,}) must be as many as the samples (={len(checked):,})")
    survey = take_survey(checked, alpha, labels_N, progress)
    nearest = min(pairs, len(checked) - 1)
    check: Check | None = None
    if search == "exact" or (search == "auto" and len(checked) <= EXACT_UP_TO):
        kin = exact_kin(checked, alpha, nearest, survey.level, labels_N, workers=workers, progress=progress)
    else:
        kin, check = approximate_kin(checked, alpha, nearest, survey.level, workers=workers, progress=progress)
    precision, recall, f1 = _judged(kin, survey, alpha, labels_N, check)
    suggested = suggested_alpha(survey, len(checked))
    share = float("nan") if labels_N is None else kin_share(labels_N)
    return Audit(
        alpha=alpha,
        thresholds=kin.threshold_N,
        pairs=_listed(kin),
        flagged=kin.flagged_N,
        occurrence=kin.occurrence_N,
        alphas=kin.alpha_N,
        groups=find_groups(checked, kin.near_NK, kin.near_sim_NK, near),
        hubs=find_hubs(kin.occurrence_N),
        suggested_alpha=suggested,
        best_alpha=best_alpha(survey),
        kin_share=share,
        precision=precision,
        recall=recall,
        f1=f1,
        batches=batch_lines(kin_shares(labels_N, suggested), len(checked), batch_sizes),
        survey=survey,
        check=check,
        labels=labels_N,
        classes=classes,
        names=None if names is None else list(names),
    )


def _features(features: Any, key: str | None) -> Features:
    if isinstance(features, str | os.PathLike):
        return Features(open_features(features, key), f"`{features}`")
    if isinstance(features, torch.Tensor):
        features = features.detach().cpu()
        return Features((features.float() if features.dtype == torch.bfloat16 else features).numpy())
    return Features(np.asarray(features))


def _listed(kin: Kin) -> NDArray[Any]:
    """The nearest above each anchor's threshold, as rows."""
    row_P, rank_P = np.nonzero((kin.near_sim_NK > kin.threshold_N[:, None]) & (kin.near_NK >= 0))
    rows = np.empty(len(row_P), dtype=PAIR)
    rows["anchor"], rows["kin"], rows["rank"] = row_P, kin.near_NK[row_P, rank_P], rank_P + 1
    rows["similarity"] = kin.near_sim_NK[row_P, rank_P]
    return rows


def _judged(kin: Kin, survey: Survey, alpha: float, labels_N: Ints | None, check: Check | None) -> tuple[float, float, float]:
    """Precision, recall and F1 over all flagged pairs; of an approximate audit, those of the surveyed anchors."""
    nan = float("nan")
    if labels_N is None:
        return nan, nan, nan
    if check is not None:
        point = next(point for point in survey.curve if point.rule == "one α" and point.alpha == alpha)
        return point.precision, point.recall, point.f1
    total = kin_pairs(labels_N)
    both = kin.judged + total
    return kin.hits / kin.judged if kin.judged else nan, kin.hits / total if total else nan, 2 * kin.hits / both if both else nan
