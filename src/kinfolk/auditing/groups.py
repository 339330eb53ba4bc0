"""Samples that stand out from the rest: duplicates, near-duplicates and hubs.

Dimension key: N data set, K nearest, M pairs.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kinfolk.auditing.inputs import Features, Floats, Ints

GROUP = np.dtype([("group", np.int64), ("sample", np.int64), ("kind", "U14")])
HUB = np.dtype([("sample", np.int64), ("occurrence", np.int64), ("times_expected", np.float32)])
NEAR = 0.1
_SAME = 1e-6
"""Rounding of a float32 similarity: closer than this is no distance."""


def equal_rows(features: Features) -> list[list[int]]:
    """Samples whose features are equal, number for number."""
    seen: dict[bytes, list[int]] = defaultdict(list)
    for start in range(0, len(features), 4096):
        for at, row in enumerate(np.ascontiguousarray(features.array[start : start + 4096])):
            seen[_digest(row)].append(start + at)
    return [members for members in seen.values() if len(members) > 1]


def near_distance(near_sim_NK: Floats, near: float = NEAR) -> float:
    """The largest 1 − similarity of near-duplicates: `near` times the usual one to the nearest other that is no duplicate."""
    distance_NK = np.where(1 - near_sim_NK > _SAME, 1 - near_sim_NK, np.inf)
    nearest_N = distance_NK.min(1)
    nearest_N = nearest_N[np.isfinite(nearest_N)]
    return near * float(np.median(nearest_N)) if len(nearest_N) else 0.0


def find_groups(features: Features, near_NK: Ints, near_sim_NK: Floats, near: float = NEAR) -> NDArray[Any]:
    """Rows of group, sample and kind, largest groups first.

    Near-duplicates are joined through each sample's K nearest: a group is a connected component of pairs that are `near` times closer
    than neighbours usually are. A group in which all rows are equal is of the kind "duplicate".
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    num = len(features)
    limit = max(near_distance(near_sim_NK, near), _SAME)
    row_M, rank_M = np.nonzero((1 - near_sim_NK <= limit) & (near_NK >= 0))
    equal = equal_rows(features)
    first_M = np.asarray([members[0] for members in equal for _ in members[1:]], dtype=np.int64)
    other_M = np.asarray([member for members in equal for member in members[1:]], dtype=np.int64)
    one, two = np.concatenate([row_M, first_M]), np.concatenate([near_NK[row_M, rank_M], other_M])
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
    """Samples that are kin of very many: more than three standard deviations above the mean, most first."""
    mean, deviation = float(occurrence_N.mean()), float(occurrence_N.std())
    if mean == 0 or deviation == 0:
        return np.empty(0, dtype=HUB)
    found = np.flatnonzero(occurrence_N > mean + 3 * deviation)
    found = found[np.lexsort((found, -occurrence_N[found]))]
    return np.array([(i, occurrence_N[i], occurrence_N[i] / mean) for i in found], dtype=HUB)


def _digest(row: NDArray[Any]) -> bytes:
    from hashlib import blake2b

    return blake2b(row.tobytes(), digest_size=16).digest()
