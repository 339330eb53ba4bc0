"""Known positives: samples that share an image, a caption or the user's own group are of one group, and never negatives of each other."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kinfolk.data.captions import Caption, all_of, normalised

Ints = npt.NDArray[np.int64]


def group_ids(digests: Sequence[str], captions: Sequence[Caption | None] | None, groups: Sequence[str | None] | None) -> Ints:
    """(N,) one group for each sample, named by its first member.

    Two samples are of one group if their images have the same bytes, if a caption of each reads the same (composed Unicode, lower case,
    single spaces), or if the user gave them one group; and so is whoever is of one group with a third.

    Args:
        digests: (N,) of the images.
        captions, groups: (N,) where there are any.

    Example:
        >>> group_ids(["a", "b", "a", "c"], ["x", "y", "z", "y"], None).tolist()
        [0, 1, 0, 1]
    """
    parents = list(range(len(digests)))
    _join(parents, ((digest,) for digest in digests))
    if captions is not None:
        _join(parents, ({normalised(text) for text in all_of(caption)} for caption in captions))
    if groups is not None:
        _join(parents, (() if group is None or group == "" else (group,) for group in groups))
    return np.array([_root(parents, sample) for sample in range(len(parents))], dtype=np.int64)


def _join(parents: list[int], keys: Iterable[Iterable[Hashable]]) -> None:
    """Unites all samples that have a key in common."""
    first: dict[Hashable, int] = {}
    for sample, own in enumerate(keys):
        for key in own:
            a, b = _root(parents, sample), _root(parents, first.setdefault(key, sample))
            parents[max(a, b)] = min(a, b)  # the first member stays the root


def _root(parents: list[int], sample: int) -> int:
    while parents[sample] != sample:
        parents[sample] = parents[parents[sample]]
        sample = parents[sample]
    return sample
