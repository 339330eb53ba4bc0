"""The split and the merge of online hierarchical clustering as slow loops, and a check of all that
must hold after an update."""

from __future__ import annotations

import math

import torch

from kinfolk.clustering import OnlineHierarchy


def density_peaks(centres: list[list[float]], parts: int, rest: bool) -> list[int]:
    """The part of every unit: prototypes by ρ·δ and the last by δ, every unit to the most similar
    one.

    `rest`: the first is the densest, always chosen."""
    n = len(centres)
    sim = [[sum(a * b for a, b in zip(x, y, strict=True)) for y in centres] for x in centres]
    square = [
        [2 - 2 * sim[i][j] if 2 - 2 * sim[i][j] > 1e-13 else 0.0 for j in range(n)]
        for i in range(n)
    ]
    scale = sum(sum(row) for row in square) / max(1, n * (n - 1)) or 1.0
    rho = [sum(math.exp(-square[i][j] / scale) for j in range(n)) for i in range(n)]
    if rest:
        rho[0] = math.inf
    gamma, deltas = [], []
    for i in range(n):
        denser = [j for j in range(n) if rho[j] > rho[i] or (rho[j] == rho[i] and j < i)]
        delta = math.sqrt(min(square[i][j] for j in denser) if denser else max(square[i]))
        deltas.append(delta)
        gamma.append(math.inf if rest and i == 0 else rho[i] * delta)
    chosen = sorted(range(n), key=lambda i: (-gamma[i], i))[: parts - 1]
    chosen += sorted((i for i in range(n) if i not in chosen), key=lambda i: (-deltas[i], i))[:1]
    return [max(range(len(chosen)), key=lambda k: (sim[i][chosen[k]], -k)) for i in range(n)]


def merge(centres: list[list[float]], borders: list[int], similarity: float) -> list[int]:
    """The group of every node: joined while any two of one border are more alike than
    `similarity`."""
    group = list(range(len(centres)))
    for i, x in enumerate(centres):
        for j, y in enumerate(centres):
            if (
                i != j
                and borders[i] == borders[j]
                and sum(a * b for a, b in zip(x, y, strict=True)) > similarity
            ):
                old, new = max(group[i], group[j]), min(group[i], group[j])
                group = [new if g == old else g for g in group]
    return group


def check(hierarchy: OnlineHierarchy) -> None:
    """Nested levels, sums and sizes equal to recomputed ones, every alive cluster once in its ring
    and none other, the rest free."""
    tree, labels = hierarchy.tree, hierarchy.labels
    H, N = labels.shape
    rows = labels.tolist()
    assert rows[0] == list(range(N))
    for level in range(H):
        alive = set(rows[level])
        assert tree.sizes[level].tolist() == [rows[level].count(cluster) for cluster in range(N)]
        for high in range(level + 1, H):
            assert len(set(zip(rows[level], rows[high], strict=True))) == len(alive), (
                "the cluster-preserve property"
            )
        if level:
            sums = torch.zeros_like(tree.sums[level - 1]).index_add_(
                0, labels[level], tree.features
            )
            assert torch.allclose(tree.sums[level - 1], sums, atol=1e-4, rtol=1e-4)
            free = tree.free[level, : int(tree.num_free[level])].tolist()
            assert sorted([*free, *alive]) == list(range(N))
        parent, units, entry = (
            tree.parent[level].tolist(),
            tree.units[level].tolist(),
            tree.entry[level].tolist(),
        )
        after, before = tree.after[level].tolist(), tree.before[level].tolist()
        seen = set()
        for above in {parent[unit] for unit in alive}:
            unit = entry[above]
            for _ in range(units[above]):
                assert unit not in seen
                assert before[after[unit]] == unit
                assert parent[unit] == above
                seen.add(unit)
                unit = after[unit]
            assert unit == entry[above]
        assert seen == alive
