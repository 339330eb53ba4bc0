"""Which samples train a classifier and which test it.

Dimension key: N training samples, M test samples, F features, K labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from kinfolk.data.splits import TEST_SPLITS
from kinfolk.errors import UsageError
from kinfolk.evaluation.linear import held_out_part

if TYPE_CHECKING:
    from kinfolk.data.images import ImageData

HELD_OUT = 0.2
"""Share of the samples a classifier is tested on where the data has no test split."""


@dataclass(frozen=True)
class Parts:
    """Labelled features, for training a classifier and for testing it; without a test split the latter is None.

    Labels are classes (N,), or for samples with several of them (N, K).
    """

    train_ids: NDArray[np.int64]
    train_x: NDArray[np.float32]
    train_y: NDArray[np.int64]
    test_ids: NDArray[np.int64] | None
    test_x: NDArray[np.float32] | None
    test_y: NDArray[np.int64] | None
    test_split: str


@dataclass(frozen=True)
class Divided:
    """The same with a test part in any case, and what to call it."""

    train_ids: NDArray[np.int64]
    train_x: NDArray[np.float32]
    train_y: NDArray[np.int64]
    test_ids: NDArray[np.int64]
    test_x: NDArray[np.float32]
    test_y: NDArray[np.int64]
    measured_on: str


def take_parts(images: ImageData, features_NF: NDArray[np.float32], label_sets: NDArray[np.int64] | None = None) -> Parts:
    """Divides the features by split; an image that several samples of a part share counts once, as the first of them.

    Args:
        label_sets: (N, K), instead of the classes; see `read_label_sets`.
    """
    samples = images.samples
    labels = samples.labels if label_sets is None else label_sets
    labels = require_labels(labels)
    splits = np.asarray(samples.splits)
    known = np.asarray(labels >= 0 if labels.ndim == 1 else (labels >= 0).any(1))
    present = [split for split in TEST_SPLITS if (known & (splits == split)).any()]
    train = known & (splits == "train")
    if not present or not train.any():
        ids = _once(images, known)
        return Parts(ids, features_NF[ids], labels[ids], None, None, None, "")
    ids, test_ids = _once(images, train), _once(images, known & (splits == present[0]))
    return Parts(ids, features_NF[ids], labels[ids], test_ids, features_NF[test_ids], labels[test_ids], present[0])


def _once(images: ImageData, chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    ids: NDArray[np.int64] = images.once(torch.from_numpy(np.flatnonzero(chosen))).numpy()
    return ids


def require_labels(labels: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """The labels, where there are any."""
    if labels is None or not (labels >= 0).any():
        raise UsageError(
            "the data has no labels to measure with; give labelled data, or --labels-from-folders if its folders are the classes"
        )
    return labels


def divide(parts: Parts, seed: int, what: str) -> Divided:
    """The parts as they are, or with a fifth of each class held out where there is no test split. `what` needs it, for the message."""
    if parts.test_ids is not None and parts.test_x is not None and parts.test_y is not None:
        train = parts.train_ids, parts.train_x, parts.train_y
        return Divided(*train, parts.test_ids, parts.test_x, parts.test_y, f"{parts.test_split} split")
    strata = parts.train_y if parts.train_y.ndim == 1 else np.zeros(len(parts.train_y), dtype=np.int64)
    held = held_out_part(strata, HELD_OUT, seed)
    if not held.any():
        raise UsageError(f"{what} needs at least two samples of a class, or a test split")
    kept, tested = ((parts.train_ids[part], parts.train_x[part], parts.train_y[part]) for part in (~held, held))
    return Divided(*kept, *tested, f"{HELD_OUT:.0%} of {'each class' if parts.train_y.ndim == 1 else 'the samples'}, held out")
