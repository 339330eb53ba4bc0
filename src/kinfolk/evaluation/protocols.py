"""The protocols as `kinfolk eval` runs them: which samples train, which test.

Dimension key: N training samples, M test samples, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kinfolk.errors import UsageError
from kinfolk.evaluation.clusters import SEEDS

if TYPE_CHECKING:
    from kinfolk.data.images import ImageData

TEST_SPLITS = ("test", "val", "valid", "validation")
HELD_OUT = 0.2
"""Share of the samples the linear probe is tested on where the data has no test split."""


@dataclass(frozen=True)
class Parts:
    """Labelled features, for training a classifier and for testing it; without a test split the latter is None."""

    train_x: NDArray[np.float32]
    train_y: NDArray[np.int64]
    test_x: NDArray[np.float32] | None
    test_y: NDArray[np.int64] | None
    test_split: str


def take_parts(images: ImageData, features_NF: NDArray[np.float32]) -> Parts:
    """Divides the features by split."""
    samples = images.samples
    if samples.labels is None or not (samples.labels >= 0).any():
        raise UsageError(
            "the data has no labels to measure with; give labelled data, or --labels-from-folders if its folders are the classes"
        )
    splits = np.asarray(samples.splits)
    labelled = samples.labels >= 0
    present = [split for split in TEST_SPLITS if (labelled & (splits == split)).any()]
    train = labelled & (splits == "train")
    if not present or not train.any():
        return Parts(features_NF[labelled], samples.labels[labelled], None, None, "")
    test = labelled & (splits == present[0])
    return Parts(features_NF[train], samples.labels[train], features_NF[test], samples.labels[test], present[0])


def run_knn(parts: Parts, k: int, temperature: float) -> dict[str, Any]:
    """Weighted nearest neighbours, on the test split or leaving one out."""
    from kinfolk.evaluation.knn import knn_accuracy

    accuracy = knn_accuracy(parts.train_x, parts.train_y, parts.test_x, parts.test_y, k=k, temperature=temperature)
    where = "each sample by all others" if parts.test_y is None else f"{parts.test_split} split"
    tested = len(parts.train_y if parts.test_y is None else parts.test_y)
    return {"accuracy": accuracy, "k": k, "temperature": temperature, "train": len(parts.train_y), "test": tested, "measured_on": where}


def run_linear(parts: Parts, seed: int) -> dict[str, Any]:
    """Linear probe, on the test split or on a held-out fifth of each class."""
    from kinfolk.evaluation.linear import held_out_part, linear_probe

    train_x, train_y, test_x, test_y = parts.train_x, parts.train_y, parts.test_x, parts.test_y
    where = f"{parts.test_split} split"
    if test_x is None or test_y is None:
        held = held_out_part(train_y, HELD_OUT, seed)
        if not held.any():
            raise UsageError("the linear probe needs at least two samples of a class, or a test split")
        train_x, train_y, test_x, test_y = train_x[~held], train_y[~held], train_x[held], train_y[held]
        where = f"{HELD_OUT:.0%} of each class, held out"
    result = linear_probe(train_x, train_y, test_x, test_y, seed=seed)
    return {
        "accuracy": result.accuracy,
        "strength": result.strength,
        "converged": result.converged,
        "train": len(train_y),
        "test": len(test_y),
        "seed": seed,
        "measured_on": where,
    }


def run_clusters(parts: Parts, num_clusters: int | None = None, seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """Normalised mutual information of the labels and k-means clusters of the features of the training split, over several k-means."""
    from kinfolk.evaluation.clusters import nmi

    k = len(np.unique(parts.train_y)) if num_clusters is None else num_clusters
    found = nmi(parts.train_x, parts.train_y, k, seeds)
    where = "train split" if parts.test_split else "all samples"
    return {
        "nmi": found.mean,
        "deviation": found.deviation,
        "num_clusters": k,
        "seeds": list(seeds),
        "samples": len(parts.train_y),
        "measured_on": where,
    }
