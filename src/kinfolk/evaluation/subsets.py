"""Few labels: subsets of the training labels with as many of each class.

Dimension key: N samples.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kinfolk.data.seeding import generator
from kinfolk.errors import KinfolkError

FRACTIONS = (1.0, 0.1, 0.01, 0.001)
"""Of the labels, as in Table 1 of the GloFND paper."""


def label_subset(labels: NDArray[np.int64], fraction: float, seed: int) -> NDArray[np.bool_]:
    """(N,) True for the samples whose labels are used: as many of each class, together `fraction` of the labelled, at least one of each.

    A class that has fewer gives all it has; a fraction of 1 is all labels, however many of each class. Of one seed the smaller subset is
    part of the larger. Unlabelled samples (below 0) are never used.

    Example:
        >>> labels = np.repeat([0, 1, -1], [80, 20, 100])
        >>> [int(label_subset(labels, fraction, seed=0).sum()) for fraction in (1, 0.1, 0.001)]
        [100, 10, 2]
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"`fraction` (={fraction}) must be in (0, 1]")
    known_N = labels >= 0
    if not known_N.any():
        raise KinfolkError("There are no labelled samples to take a part of.")
    if fraction == 1:
        return known_N
    classes = np.unique(labels[known_N])
    each = max(1, round(fraction * int(known_N.sum()) / len(classes)))
    order = torch.randperm(len(labels), generator=generator(seed, "label-subset")).numpy()
    used_N = np.zeros(len(labels), dtype=np.bool_)
    for label in classes:
        used_N[order[labels[order] == label][:each]] = True
    return used_N
