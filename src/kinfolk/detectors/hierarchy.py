"""Hierarchy: kin share a cluster of RCL's online clustering, to a degree. Tang et al., ECCV 2022,
section 4.3 and equation 9.

Dimension key: R rows of a block, C candidates, H levels, N data set, B samples of a step, V views,
D embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kinfolk import distributed
from kinfolk.clustering.dbscan import Radii, count_levels, dbscan, require_all_samples
from kinfolk.clustering.hierarchy import OnlineHierarchy, level_figures
from kinfolk.detectors.base import Detector, register
from kinfolk.errors import require, require_at_least
from kinfolk.pairs import Block, Kin, same_key


@register("hierarchy", "Tang et al., ECCV 2022", "one DBSCAN of all samples")
class Hierarchy(Detector):
    """Kin are the candidates in the anchor's cluster at a level of a hierarchy that every step
    refines.

    The degree is the share of the H levels at which the two share a cluster (P_c of equation 9).
    Nothing is flagged before the hierarchy starts.

    Args:
        num_samples: N.
        levels: H; at level 1 every sample is a cluster. None: one more than `radii`, or 3.
        level: the level at which a shared cluster means kin; None: the highest.
        warmup_epochs: epochs before DBSCAN on all embeddings sets the levels.
        radii: of DBSCAN for the levels 2 … H, growing; None: fitted to the embeddings.
        min_samples: of DBSCAN.
        merge_similarity: σ_m, a number or one for each level from 2; None: the larger of 1 − ¾ r²
            and 0.95 (1 − r² / 2), r the radius.
        parts, feature_momentum: see `kinfolk.clustering.OnlineHierarchy`.

    State: the hierarchy, its radii if they are fitted, and whether it has started.

    Example:
        >>> detector = Hierarchy(num_samples=4, levels=2, radii=[0.3], min_samples=2)
        >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> detector.refresh(features, progress=0.0)
        >>> [len(level.unique()) for level in detector.clusters.labels]
        [4, 2]
    """

    num_samples: int
    on_host = ("started",)
    started: Tensor

    def __init__(
        self,
        *,
        num_samples: int,
        levels: int | None = None,
        level: int | None = None,
        warmup_epochs: int = 10,
        radii: Sequence[float] | None = None,
        min_samples: int = 4,
        merge_similarity: float | Sequence[float] | None = None,
        parts: int = 3,
        feature_momentum: float = 0.5,
    ) -> None:
        super().__init__()
        levels = count_levels(radii) if levels is None else levels
        require_at_least(1, levels=levels)
        within = f"in [1, {levels}]: there are that many `levels`"
        require(level is None or 1 <= level <= levels, "level", level, within)
        require_at_least(0, warmup_epochs=warmup_epochs)
        most = f"at most the number of samples (={num_samples})"
        require(min_samples <= num_samples, "min_samples", min_samples, most)
        self.num_samples = num_samples
        self.radii, self.merge_similarity = Radii(levels, radii, min_samples), merge_similarity
        similarity = merge_similarity
        if similarity is None:
            similarity = _similarity(self.radii.given or (0.5,) * (levels - 1))
        self.level, self.warmup_epochs = level or levels, warmup_epochs
        self.min_samples = min_samples
        self.clusters = OnlineHierarchy(
            num_samples,
            levels,
            merge_similarity=similarity,
            parts=parts,
            feature_momentum=feature_momentum,
        )
        self.register_buffer("started", torch.tensor(False))

    @torch.no_grad()
    def find(self, block: Block) -> Kin:
        keys = self.clusters.labels_of(block.row_ids), self.clusters.labels_of(block.candidate_ids)
        same = [same_key(key_R, key_C) for key_R, key_C in zip(*keys, strict=True)]
        agree_RC = torch.zeros_like(block.sim_RC)
        for same_RC in same:
            agree_RC = agree_RC + same_RC
        return Kin(agree_RC / len(same) * same[self.level - 1])

    @property
    def collects(self) -> bool:  # type: ignore[override]
        """From the start on, which uses the features of all samples."""
        return bool(self.started)

    def collect(self, ids: Tensor, anchors: Tensor, is_finite: Tensor | None = None) -> None:
        if self.merge_similarity is None and self.radii.values is not None:
            self.clusters.merge_similarity = _similarity(self.radii.values)
        ids = ids.repeat_interleave(len(anchors) // max(len(ids), 1))
        self.clusters.update(ids, anchors, is_finite)

    def due(self, epoch: int) -> bool:
        return epoch == self.warmup_epochs

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self.follow(epoch)

    def silent_reason(self, first_epoch: int = 0) -> str | None:
        if self.level == 1:
            return "at `level` (=1) every sample is its own cluster; choose a level from 2"
        if self.warmup_epochs >= self.num_epochs:
            return (
                f"`warmup_epochs` (={self.warmup_epochs}) must be below the number of epochs"
                f" (={self.num_epochs}); choose a shorter one"
            )
        return None

    def follow(self, epoch: int) -> None:
        """Fits the radii to the current features, once per epoch. All ranks continue with the
        hierarchy of rank zero."""
        self.epoch = epoch
        if self.started and int(self.radii.epoch) != epoch:
            self.clusters.share()
            if self.merge_similarity is None:
                self.radii.follow(self.clusters.tree.features.to(self.clusters.tree.device))
                distributed.overwrite_from_rank_zero([self.radii.fitted], self.clusters.tree.device)
            self.radii.epoch.fill_(epoch)

    @torch.no_grad()
    def refresh(self, features: Tensor | None, progress: float) -> None:
        x = require_all_samples(features, self.num_samples).to(self.clusters.tree.device)
        labels_HN = torch.arange(len(x), device=x.device).repeat(self.clusters.levels, 1)
        if self.clusters.levels > 1:
            labels_HN[1:] = distributed.from_rank_zero(
                lambda: dbscan(x, self.radii.fit(x), min_samples=self.min_samples),
                labels_HN[1:].clone(),
            )
        distributed.overwrite_from_rank_zero([self.radii.fitted, self.radii.shares], x.device)
        self.radii.epoch.fill_(self.epoch)
        self.clusters.start(labels_HN, x)
        self.started.fill_(True)

    @property
    def metrics(self) -> dict[str, float]:
        return level_figures(self.clusters.labels) if self.started else {}


def _similarity(radii: Sequence[float]) -> tuple[float, ...]:
    """A little below the similarity 1 − r² / 2 of two samples at the distance r, at which clusters
    may dissolve; much below it, one may absorb the others."""
    return tuple(max(1 - 0.75 * r * r, 0.95 * (1 - r * r / 2)) for r in radii)
