"""Few labels: subsets of the training labels with as many of each class, or those that a file lists.

Dimension key: N samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray

from kinfolk.data.seeding import generator
from kinfolk.errors import KinfolkError, UsageError

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


@dataclass(frozen=True)
class ListedSubset:
    """The samples that a file lists.

    Args:
        name: of the file, without its ending: "1percent".
        used: (N,) True for those among the samples at hand.
        listed: how many the file lists, here or not.
    """

    name: str
    used: NDArray[np.bool_]
    listed: int


def read_subset(path: str | Path, keys: Sequence[str]) -> ListedSubset:
    """Reads a list of file names, one a line, as SimCLR publishes them for 1 and 10 % of ImageNet.

    A line is a sample's key, or the end of one: `n01440764_10026.JPEG` stands for `train/n01440764/n01440764_10026.JPEG`. Empty lines and
    lines that begin with `#` are passed over. Names that no sample has are counted but otherwise ignored; a name that several samples
    have is refused.

    Args:
        path: the file.
        keys: (N,) of the samples to choose from, with `/` between folders.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no list `{path}`; --subset takes a text file with one file name a line")
    lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    names = dict.fromkeys(PurePosixPath(line.replace("\\", "/")).parts for line in lines if line and not line.startswith("#"))
    ends: dict[tuple[str, ...], list[int]] = defaultdict(list)
    lengths = {len(name) for name in names}
    for row, key in enumerate(keys):
        parts = PurePosixPath(key).parts
        for length in lengths:
            if length <= len(parts):
                ends[parts[len(parts) - length :]].append(row)
    used_N = np.zeros(len(keys), dtype=np.bool_)
    for name in names:
        rows = ends.get(name, [])
        if len(rows) > 1:
            both = " and ".join(repr(keys[row]) for row in rows[:2])
            raise UsageError(
                f"`{path}` lists {'/'.join(name)!r}, which is the name of {len(rows)} samples ({both}, …); list their folders too"
            )
        used_N[rows] = True
    if not used_N.any():
        first = "nothing" if not names else f"for example {'/'.join(next(iter(names)))!r}"
        raise UsageError(f"`{path}` names none of the labelled training images: it lists {first}, and the first image is {keys[0]!r}")
    return ListedSubset(path.stem, used_N, len(names))
