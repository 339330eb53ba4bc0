"""Hierarchy: the levels of RCL's online clustering say who is kin, and how nearly. Tang et al., ECCV 2022, section 4.3 and equation 9.

Dimension key: R rows of a block, C candidates, M places of kin, H levels, N data set, B samples of a step, V views, D embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from kinfolk import distributed
from kinfolk.clustering.dbscan import dbscan
from kinfolk.clustering.hierarchy import Hierarchy as Levels
from kinfolk.clustering.split import Rule
from kinfolk.detectors.base import Detector, Found
from kinfolk.pairs import Block, Roles, own_matches


class Hierarchy(Detector):
    """Kin are the candidates in the anchor's cluster at a level of a hierarchy that every step refines.

    For `reweight` the degree of kinship is the share of all H levels, level 1 among them, at which the two agree (P_c of equation 9): the
    nearer, the less of a negative. Nobody is kin before the hierarchy starts.

    Args:
        num_samples: N.
        levels: H; level 1 is every sample its own.
        level: at which level, counted from 1, a shared cluster means kin; None: the highest. At level 1 nobody is kin.
        warmup_epochs: epochs before DBSCAN on the embeddings of all samples sets the levels; from then on every step refines them.
        radii: of DBSCAN for the levels 2 … H, growing; None: evenly from 0.6 to 0.8.
        min_samples: of DBSCAN.
        merge_similarity: σ_m, a number or one for each level from 2; None: that of two samples at the level's radius apart, 1 − r² / 2.
        parts, rule, max_units: of the refinement; see `kinfolk.clustering.Hierarchy`.

    State: the hierarchy, and whether it has started.

    Example:
        >>> Hierarchy(num_samples=100, levels=3).radii
        (0.6, 0.8)
    """

    paper: ClassVar[str] = "Tang et al., ECCV 2022"
    needs: ClassVar[str] = "one DBSCAN of all samples"
    addresses: ClassVar[bool] = True
    started: Tensor

    def __init__(
        self,
        num_samples: int,
        levels: int = 3,
        level: int | None = None,
        warmup_epochs: int = 10,
        radii: Sequence[float] | None = None,
        min_samples: int = 4,
        merge_similarity: float | Sequence[float] | None = None,
        parts: int = 3,
        rule: Rule = "centres",
        max_units: int = 32,
    ) -> None:
        super().__init__()
        if level is not None and not 1 <= level <= levels:
            raise ValueError(f"`level` (={level}) must be in [1, {levels}]: there are that many `levels`")
        if warmup_epochs < 0:
            raise ValueError(f"`warmup_epochs` (={warmup_epochs}) must be at least 0")
        steps = max(levels - 2, 1)
        self.radii = tuple(round(0.6 + 0.2 * place / steps, 4) for place in range(levels - 1)) if radii is None else tuple(radii)
        if len(self.radii) != levels - 1:
            raise ValueError(f"`radii` (={list(self.radii)}) must be one for each of the levels 2 to {levels}")
        similarity = [1 - r * r / 2 for r in self.radii] if merge_similarity is None else merge_similarity
        self.level, self.warmup_epochs, self.min_samples = level or levels, warmup_epochs, min_samples
        self.clusters = Levels(num_samples, levels, merge_similarity=similarity, parts=parts, rule=rule, max_units=max_units)
        self.register_buffer("started", torch.tensor(False))
        self._sorted: tuple[Tensor, int, Tensor, Tensor] | None = None

    @torch.no_grad()
    def find(self, block: Block) -> Found:
        if not self.started or self.level == 1:
            return Found((Roles(),))
        row_R = block.row_ids
        row_M, col_M = own_matches(self.clusters.labels_of(row_R)[self.level - 1], *self._candidates(block.candidate_ids))
        other_M = block.sim_RC[row_M, col_M] != -torch.inf
        kin = row_M[other_M], col_M[other_M]
        one_HM, other_HM = self.clusters.labels_of(row_R)[:, kin[0]], self.clusters.labels_of(block.candidate_ids)[:, kin[1]]
        degree_RC = torch.zeros_like(block.sim_RC)
        degree_RC[kin] = (one_HM == other_HM).to(degree_RC.dtype).mean(0)
        return Found((Roles(kin=kin, degree_RC=degree_RC),))

    @property
    def collects(self) -> bool:  # type: ignore[override]
        """Once it has started: the start itself goes by the features of all samples."""
        return bool(self.started)

    def collect(self, ids: Tensor, anchors: Tensor) -> None:
        """Refines the clusters of this step's samples, each with the mean of its views."""
        self.clusters.update(ids.repeat_interleave(len(anchors) // max(len(ids), 1)), anchors)
        self._sorted = None

    def due(self, epoch: int) -> bool:
        return epoch == self.warmup_epochs

    @torch.no_grad()
    def refresh(self, features: Tensor | None, progress: float) -> None:
        """Sets the levels by DBSCAN: rank zero does it and shares the labels."""
        if features is None or len(features) != self.clusters.num_samples:
            shape = None if features is None else tuple(features.shape)
            raise ValueError(f"`features` (={shape}) must have the shape ({self.clusters.num_samples}, any): all samples in data-set order")
        own_N = torch.arange(len(features), device=features.device).unsqueeze(0)
        labels_HN = own_N.repeat(self.clusters.levels, 1)
        if self.radii and (distributed.world_size() == 1 or dist.get_rank() == 0):
            labels_HN[1:] = dbscan(features, self.radii, min_samples=self.min_samples)
        if distributed.world_size() > 1:
            dist.broadcast(labels_HN, 0)
        self.clusters.start(labels_HN, features)
        self.started.fill_(True)
        self._sorted = None

    def _candidates(self, ids_C: Tensor) -> tuple[Tensor, Tensor]:
        """The candidates' clusters at the level, sorted, with their places: once for all blocks of a step."""
        version = -1 if ids_C.is_inference() else ids_C._version  # a queue overwrites its ids in place
        if self._sorted is None or self._sorted[0] is not ids_C or version < 0 or self._sorted[1] != version:
            self._sorted = (ids_C, version, *self.clusters.labels_of(ids_C)[self.level - 1].sort(stable=True))
        return self._sorted[2:]

    def __repr__(self) -> str:
        of = self.clusters
        start = f"warmup_epochs={self.warmup_epochs}, radii={self.radii}, min_samples={self.min_samples}"
        how = f"merge_similarity={of.merge_similarity}, parts={of.parts}, rule={of.rule!r}, max_units={of.max_units}"
        return f"Hierarchy(num_samples={of.num_samples}, levels={of.levels}, level={self.level}, {start}, {how})"
