"""Groups of duplicates and near-duplicates, and hubs.

Dimension key: N data set, K nearest, M pairs.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kinfolk.auditing.inputs import Features, Floats, Ints

if TYPE_CHECKING:
    from kinfolk.data.images import ImageData

GROUP = np.dtype([("group", np.int64), ("sample", np.int64), ("kind", "U14")])
HUB = np.dtype([("sample", np.int64), ("occurrence", np.int64), ("times_expected", np.float32)])
NEAR = 0.1
CANDIDATES = 4
"""Number of nearest neighbours whose pixels are compared."""
_SAME = 1e-6
"""Rounding of a float32 similarity; a smaller distance counts as zero."""


def equal_rows(features: Features) -> list[list[int]]:
    """Groups of samples whose features are exactly equal."""
    seen: dict[bytes, list[int]] = defaultdict(list)
    for start in range(0, len(features), 4096):
        for at, row in enumerate(np.ascontiguousarray(features.array[start : start + 4096])):
            seen[_digest(row)].append(start + at)
    return [members for members in seen.values() if len(members) > 1]


def near_distance(near_sim_NK: Floats, near: float = NEAR) -> float:
    """Largest 1 − similarity of near-duplicates: `near` times the median distance to the nearest sample that is not a duplicate."""
    distance_NK = np.where(1 - near_sim_NK > _SAME, 1 - near_sim_NK, np.inf)
    nearest_N = distance_NK.min(1)
    nearest_N = nearest_N[np.isfinite(nearest_N)]
    return near * float(np.median(nearest_N)) if len(nearest_N) else 0.0


def find_groups(features: Features, near_NK: Ints, near_sim_NK: Floats, near: float = NEAR) -> NDArray[Any]:
    """Rows of group, sample and kind, largest groups first, from the features alone.

    Near-duplicates are joined through each sample's K nearest neighbours: a group is a connected component of pairs whose distance is at
    most `near` times the median distance to the nearest neighbour. A group in which all rows are equal is of the kind "duplicate".
    """
    limit = max(near_distance(near_sim_NK, near), _SAME)
    row_M, rank_M = np.nonzero((1 - near_sim_NK <= limit) & (near_NK >= 0))
    return _components(features, row_M, near_NK[row_M, rank_M])


def verified_groups(features: Features, near_NK: Ints, images: ImageData, progress: bool = False) -> NDArray[Any]:
    """Rows of group, sample and kind, largest groups first, verified by the pixels of the images.

    Candidates are each sample's nearest neighbours in the features and, in data sets that are not too large, the most similar thumbnails;
    see `pixel_comparison`.
    """
    from kinfolk.auditing import pixel_comparison as pixels

    num = len(features)
    small = pixels.thumbnails(images, num)
    near_NK = near_NK[:, :CANDIDATES]
    row_M, rank_M = np.nonzero(near_NK >= 0)
    pairs = [np.stack([row_M, near_NK[row_M, rank_M]], 1)]
    if num <= pixels.SEARCH_UP_TO:
        pairs.append(pixels.similar_thumbnails(small))
    pairs_M2 = np.unique(np.sort(np.concatenate(pairs), axis=1), axis=0)
    copies_M2 = pairs_M2[pixels.are_copies(small, pairs_M2, progress)]
    return _components(features, copies_M2[:, 0], copies_M2[:, 1])


def _components(features: Features, one_M: Ints, other_M: Ints) -> NDArray[Any]:
    """Groups that are connected by the given pairs or by equal features."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    num = len(features)
    equal = equal_rows(features)
    first = np.asarray([members[0] for members in equal for _ in members[1:]], dtype=np.int64)
    rest = np.asarray([member for members in equal for member in members[1:]], dtype=np.int64)
    one, two = np.concatenate([one_M, first]), np.concatenate([other_M, rest])
    component_N = connected_components(coo_array((np.ones(len(one), np.int8), (one, two)), shape=(num, num)), directed=False)[1]
    size = np.bincount(component_N)
    whole = {frozenset(members) for members in equal}
    rows: list[tuple[int, int, str]] = []
    joined = np.flatnonzero(size[component_N] > 1)
    order = np.lexsort((joined, component_N[joined], -size[component_N[joined]]))
    members_of: dict[int, list[int]] = defaultdict(list)
    for sample in joined[order].tolist():
        members_of[int(component_N[sample])].append(sample)
    for group, members in enumerate(members_of.values()):
        kind = "duplicate" if frozenset(members) in whole else "near-duplicate"
        rows += [(group, sample, kind) for sample in members]
    return np.array(rows, dtype=GROUP)


def find_hubs(occurrence_N: Ints) -> NDArray[Any]:
    """Samples that very many anchors flag: more than three standard deviations above the mean, the largest first."""
    mean, deviation = float(occurrence_N.mean()), float(occurrence_N.std())
    if mean == 0 or deviation == 0:
        return np.empty(0, dtype=HUB)
    found = np.flatnonzero(occurrence_N > mean + 3 * deviation)
    found = found[np.lexsort((found, -occurrence_N[found]))]
    return np.array([(i, occurrence_N[i], occurrence_N[i] / mean) for i in found], dtype=HUB)


def _digest(row: NDArray[Any]) -> bytes:
    from hashlib import blake2b

    return blake2b(row.tobytes(), digest_size=16).digest()
