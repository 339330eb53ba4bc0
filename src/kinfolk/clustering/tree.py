"""The levels of a hierarchy as a tree over all samples: one pointer up for every cluster, rings of
units, sums and sizes.

Each cluster of a level points to one cluster of the next level. Two samples that share a cluster at
a level therefore share one at every higher level (the cluster-preserve property of the paper), and
moving a unit writes one pointer, however many samples it contains. Levels are counted from 0 in
this file: at level 0 every sample is its own cluster, and level H is a single root.

The tree is on the CPU, because splitting and merging depend on values at every turn. An accelerator
has a copy of the pointers, which is all that looking up labels needs.

Dimension key: N data set, D embedding, H levels, U distinct samples, F new clusters, M units that
move, C clusters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.clustering.dbscan import require_finite
from kinfolk.clustering.hierarchy_update import Level, Moves, Rings
from kinfolk.stores.per_sample import COARSE, Exact, sent, size_differs


class Tree(Exact):
    """The state of a `Hierarchy`. At first every sample is alone at every level, with a feature of
    zero.

    Args:
        num_samples: N.
        levels: H.
        dim: D; None: the size of the first features.

    State: `features` (N, D); `parent`, `after`, `before` (H, N) over the clusters of a level;
    `entry`, `units` (H, N) over those of the level above; `sizes` (H, N) samples and `sums` (H − 1,
    N, D) of their features; `free` slots and their number. Not saved: `pointers`, the copy of
    `parent` on an accelerator, None on a CPU.
    """

    features: Tensor
    sums: Tensor
    sizes: Tensor
    parent: Tensor
    after: Tensor
    before: Tensor
    entry: Tensor
    units: Tensor
    free: Tensor
    num_free: Tensor
    pointers: Tensor | None

    def __init__(self, num_samples: int, levels: int, dim: int | None) -> None:
        super().__init__()
        self.num_samples, self.levels, self.dim = num_samples, levels, dim
        for name in ("parent", "after", "before", "entry", "units", "free"):
            self.register_buffer(name, torch.zeros(levels, num_samples, dtype=torch.int64))
        self.register_buffer("num_free", torch.zeros(levels, dtype=torch.int64))
        self.register_buffer("sizes", torch.zeros(levels, num_samples, dtype=torch.int64))
        self.register_buffer("features", torch.zeros(num_samples, dim or 0))
        self.register_buffer("sums", torch.zeros(levels - 1, num_samples, dim or 0))
        self.register_buffer("pointers", None, persistent=False)
        self.start(torch.arange(num_samples).expand(levels, -1))

    @property
    def device(self) -> torch.device:
        """The device that labels are looked up on."""
        return self.parent.device if self.pointers is None else self.pointers.device

    def labels_of(self, ids: Tensor) -> Tensor:
        """(H, …) the clusters of some samples, on the device of `ids`: a CPU, or that of the
        pointers."""
        above, found = (
            self.parent if self.pointers is None or ids.device.type == "cpu" else self.pointers,
            [ids],
        )
        found.extend(above[level][found[level]] for level in range(self.levels - 1))
        return torch.stack(found)

    @torch.no_grad()
    def start(self, labels: Tensor, features: Tensor | None = None) -> None:
        """Sets all levels to (H, N) nested labels, any integers, the first row one of its own for
        every sample; and (N, D) features."""
        if labels.shape != (self.levels, self.num_samples):
            raise ValueError(
                f"`labels` (={tuple(labels.shape)}) must have the shape"
                f" {(self.levels, self.num_samples)}: levels × samples"
            )
        if len(torch.unique(labels[0])) < self.num_samples:
            raise ValueError(
                "`labels` must have a cluster of its own for every sample in their first row"
            )
        if features is not None:
            self.set_features(features)
            require_finite(features)
            labels, features = labels.cpu(), features.cpu()
            self.features.copy_(F.normalize(features.to(self.features), dim=1))
        device, N = self.parent.device, self.num_samples
        below, alive = torch.arange(N, device=device), N
        self.sizes[0] = 1
        for level in range(1, self.levels + 1):
            row = labels[level] if level < self.levels else torch.zeros_like(below)
            names, label = torch.unique(row, return_inverse=True)
            above = torch.zeros_like(below).scatter_(0, below, label)
            if not torch.equal(above[below], label):
                raise ValueError(
                    f"`labels` must be nested: some samples share a cluster at level {level} and"
                    f" not at level {level + 1}"
                )
            self.parent[level - 1] = -1
            self.parent[level - 1, :alive] = above[:alive]
            self.rings(level - 1).rebuild(above, alive)
            below, alive = label, len(names)
            if level < self.levels:
                self.sizes[level] = torch.bincount(label, minlength=N)
                self.sums[level - 1].zero_().index_add_(0, label, self.features)
                self.num_free[level] = N - alive
                self.free[level, : N - alive] = torch.arange(alive, N, device=device)
        self.send_all()

    def write(self, ids_U: Tensor, new_UD: Tensor) -> None:
        """Sets the features of distinct samples, and with them the sums above."""
        change_UD = new_UD - self.features[ids_U]
        self.features[ids_U] = new_UD
        for level, label_U in enumerate(self.labels_of(ids_U)[1:]):
            self.sums[level].index_add_(0, label_U, change_UD)

    def move(self, level: int, moves: Moves) -> None:
        """Moves units between clusters of a level: pointers, rings, sums and sizes. Makes new
        clusters and frees empty ones."""
        if not len(moves.unit):
            return
        unit_M, to_M = moves.unit, moves.to.clone()
        from_M = self.parent[level - 1][unit_M]
        new_F, which = torch.unique(-1 - to_M[to_M < 0], return_inverse=True)
        if len(new_F):
            left = int(self.num_free[level]) - len(new_F)
            slot_F = self.free[level, left : left + len(new_F)].clone()
            self.num_free[level] = left
            self.parent[level, slot_F] = moves.border[new_F]
            self._send(level, slot_F)
            self.rings(level).put_in(slot_F, moves.border[new_F])
            to_M[to_M < 0] = slot_F[which]
        rings = self.rings(level - 1)
        rings.take_out(unit_M, from_M)
        rings.put_in(unit_M, to_M)
        self.parent[level - 1, unit_M] = to_M
        self._send(level - 1, unit_M)
        sum_MD, size_M = self.sums_at(level - 1)[unit_M], self.sizes[level - 1][unit_M]
        for cluster_M, sign in ((to_M, 1), (from_M, -1)):
            self.sums[level - 1].index_add_(0, cluster_M, sum_MD, alpha=sign)
            self.sizes[level].index_add_(0, cluster_M, size_M, alpha=sign)
        left_C = torch.unique(from_M)
        empty_C = left_C[self.units[level - 1][left_C] == 0]
        if len(empty_C):
            self.rings(level).take_out(empty_C, self.parent[level, empty_C])
            self.parent[level, empty_C] = -1
            self.sums[level - 1, empty_C] = 0
            free = int(self.num_free[level])
            self.free[level, free : free + len(empty_C)] = empty_C
            self.num_free[level] = free + len(empty_C)

    def _send(self, level: int, slots: Tensor) -> None:
        """Copies some pointers to the accelerator, without waiting for it."""
        if self.pointers is not None:
            there, values = (
                sent(x, self.pointers.device) for x in (slots, self.parent[level, slots])
            )
            self.pointers[level, there] = values

    def send_all(self) -> None:
        """Copies all pointers to the accelerator, if there is one."""
        if self.pointers is not None:
            self.pointers = self.parent.to(self.pointers.device)

    def sums_at(self, level: int) -> Tensor:
        """The sums of the clusters of a level."""
        return self.features if level == 0 else self.sums[level - 1]

    def rings(self, level: int) -> Rings:
        """The rings that the clusters of a level are members of."""
        return Rings(self.after[level], self.before[level], self.entry[level], self.units[level])

    def at(self, level: int) -> Level:
        """What a refinement of a level reads."""
        below = level - 1
        return Level(
            self.rings(below),
            self.sums_at(below),
            self.parent[below],
            self.rings(level),
            self.sums_at(level),
            self.parent[level],
        )

    def set_features(self, features: Tensor) -> None:
        """Checks the size of the features, or sets it if it is not known yet."""
        if features.ndim != 2 or (self.dim is not None and features.shape[1] != self.dim):
            raise ValueError(
                f"`features` (={tuple(features.shape)}) must have the shape (rows,"
                f" {'any' if self.dim is None else self.dim})"
            )
        if self.dim is None:
            self._set_dim(features.shape[1])

    def _set_dim(self, dim: int) -> None:
        self.dim = dim
        self.features = self.features.new_zeros(self.num_samples, dim)
        self.sums = self.sums.new_zeros(self.levels - 1, self.num_samples, dim)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        saved, features = state_dict.get(prefix + "parent"), state_dict.get(prefix + "features")
        advice = "use the same data set and levels"
        if size_differs(
            f"{prefix}parent",
            saved,
            others[-1],
            advice,
            levels=self.levels,
            num_samples=self.num_samples,
        ):
            return
        if self.dim is None and features is not None and features.shape[1]:
            self._set_dim(features.shape[1])
        super()._load_from_state_dict(state_dict, prefix, *others)
        self.send_all()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Tree:
        """A cast changes the tree as it changes any module, though never to 16 bits. A move to
        another device moves only the pointers."""
        probe = fn(torch.empty(0, dtype=self.features.dtype))
        if probe.dtype not in COARSE:
            self.features, self.sums = self.features.to(probe.dtype), self.sums.to(probe.dtype)
        self.pointers = (
            None if probe.device.type in ("cpu", "meta") else self.parent.to(probe.device)
        )
        return self
