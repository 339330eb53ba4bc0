"""IFND: Chen et al., ICLR 2022.

Dimension key: N data set, D features, L levels, K clusters, R rows of a block, C candidates, S
samples that are clustered.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.clustering.labels import (
    Confidence,
    PseudoLabels,
    Schedule,
    check_acceptance,
    cluster_confidence,
    last_clustering,
    rate_at,
    sample_confidence,
)
from kinfolk.detectors.base import Answer, Detector, Space, register
from kinfolk.errors import require, require_at_least, require_choice
from kinfolk.pairs import Block, Kin, same_key
from kinfolk.stores.per_sample import Collected, size_differs

Source = Literal["pass", "bank"]


@register("ifnd", "Chen et al., ICLR 2022", "clusters, refreshed each epoch")
class IFND(Detector):
    """Kin are the candidates of the anchor's k-means cluster, if both labels are accepted. The
    accepted share grows during training.

    At each refresh the features of all samples are clustered, once for each k. The confidence of a
    label is (equation 2)

        κ_i = exp(cos(z_i, c_{y_i}) / t) / Σ_j exp(cos(z_i, c_j) / t)

    and the most confident labels are accepted. Each k is a level, and the loss is the mean over
    levels. Nothing is flagged before the first refresh.

    Args:
        num_samples: N; ids are in [0, N).
        num_clusters: k of each level, below N; None: see `default_clusters`.
        num_classes: number of classes, which a training takes from labels.
        schedule, final_rate: the accepted share: "linear" grows from 0 in the first epoch to
            `final_rate` at the last refresh, "step" jumps to it, "constant" is it.
        confidence: "sample" (equation 2), or "cluster": that of the sample's cluster, as in PCL.
        every: epochs between two refreshes; well below the number of epochs.
        space: what is clustered: "projected" embeddings, or the encoder's "features".
        source: "pass" embeds all samples without augmentation; "bank" uses the mean over views of
            each sample's last embedding in training, at no cost.
        temperature: t of the confidence; None: that of the loss.
        step_at: share of the training before the jump of "step".
        seed, warm_start, points_per_cluster: of k-means, see `PseudoLabels`.

    State: labels, clusters, centroids, confidence; with "bank" the embeddings.

    Deviates from the paper in: k-means on projected embeddings by default, with a warm start and
    fewer points; the rate reaches its final value; see `docs/methods/ifnd.md`.

    Example:
        >>> detector = IFND(num_samples=4, num_clusters=(2,), schedule="constant")
        >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> detector.refresh(features, progress=0.5)
        >>> (detector.labels[0, :1] == detector.labels[0]).tolist()
        [True, True, False, False]
    """

    num_samples: int

    def __init__(
        self,
        *,
        num_samples: int,
        num_clusters: int | tuple[int, ...] | None = None,
        num_classes: int | None = None,
        schedule: Schedule = "linear",
        final_rate: float = 1.0,
        confidence: Confidence = "sample",
        every: int = 1,
        space: Space = "projected",
        source: Source = "pass",
        temperature: float | None = None,
        step_at: float = 0.1,
        seed: int = 0,
        warm_start: bool = True,
        points_per_cluster: int = 256,
    ) -> None:
        super().__init__()
        require_at_least(2, num_samples=num_samples)
        check_acceptance(schedule, final_rate, confidence, step_at)
        require_choice("space", space, get_args(Space))
        require_choice("source", source, get_args(Source))
        require_at_least(1, every=every)
        above_0 = temperature is None or temperature > 0
        require(above_0, "temperature", temperature, "above 0, or None for that of the loss")
        projected = "'projected' with `source` (='bank'), which collects projected embeddings"
        require(source != "bank" or space == "projected", "space", space, projected)
        self.schedule, self.final_rate, self.measure = schedule, final_rate, confidence
        self.every, self.space, self.source, self.temperature = every, space, source, temperature
        self.step_at = step_at
        if num_clusters is None:
            num_clusters = default_clusters(num_samples, num_classes)
        self.clusters = PseudoLabels(
            num_samples,
            num_clusters,
            seed=seed,
            accepts=True,
            warm_start=warm_start,
            points_per_cluster=points_per_cluster,
        )
        self.num_samples, self.num_clusters = num_samples, self.clusters.num_clusters
        self.collects = source == "bank"
        self.collected = Collected(num_samples) if self.collects else None

    @property
    def labels(self) -> Tensor:
        """(L, N); a sample whose label is not accepted has a label alone."""
        return self.clusters.distinct

    @property
    def confidence(self) -> Tensor:
        """(L, N), 0 before the first refresh."""
        assert self.clusters.confidence is not None
        return self.clusters.confidence

    @property
    def metrics(self) -> dict[str, float]:
        """The share of accepted labels, mean over the levels."""
        assert self.clusters.accepted is not None
        return {"accepted": self.clusters.accepted.double().mean().item()}

    def rate(self, progress: float) -> float:
        last = last_clustering(self.every, self.num_epochs)
        return rate_at(self.schedule, self.final_rate, progress, self.step_at, last)

    def due(self, epoch: int) -> bool:
        return epoch % self.every == 0 and self.rate(epoch / self.num_epochs) > 0

    @property
    def refreshed_at_end(self) -> bool:  # type: ignore[override]
        return self.rate(1.0) > 0

    def silent_reason(self, first_epoch: int = 0) -> str | None:
        if round(self.final_rate * self.num_samples) < 2:
            return (
                f"`final_rate` (={self.final_rate}) accepts fewer than two of {self.num_samples}"
                " labels; choose a higher rate"
            )
        first = 1 if self.collects else 0  # before the first epoch nothing was collected
        if any(map(self.due, range(first, self.num_epochs))):
            return None
        return (
            f"no clustering is due in {self.num_epochs} epochs; choose a smaller `every`"
            f" (={self.every}) or an earlier `schedule`"
        )

    @torch.no_grad()
    def find(self, block: Block) -> Answer:
        if not self.clusters.has_labels:
            return Kin()
        keys_LR, keys_LC = self.clusters.of(block.row_ids), self.clusters.of(block.candidate_ids)
        keys = zip(keys_LR, keys_LC, strict=True)
        return tuple(Kin(same_key(key_R, key_C)) for key_R, key_C in keys)

    def collect(self, ids: Tensor, anchors: Tensor, is_finite: Tensor | None = None) -> None:
        assert self.collected is not None
        self.collected.write(ids, anchors, is_finite)

    @torch.no_grad()
    def refresh(self, features: Tensor | None, progress: float) -> None:
        """Uses `features` of any norm, or what was collected."""
        rate, ids_S = self.rate(progress), None
        if self.collected is not None:
            ids_S = self.collected.seen.nonzero().squeeze(1)
            features = self.collected.features[ids_S]
        if features is None:
            raise ValueError(
                "`features` must be given: they are collected only with `source` (='bank')"
            )
        if rate == 0 or (ids_S is not None and len(ids_S) <= max(self.num_clusters)):
            self.clusters.set_acceptance()
            return
        unit_SD = F.normalize(features.to(self.clusters.labels.device, torch.float32), dim=1)
        self.clusters.refresh(unit_SD, ids_S)
        self.clusters.accept(unit_SD, rate, self._confidence, ids_S)

    def _confidence(
        self, unit_SD: Tensor, centroids_KD: Tensor, cluster_S: Tensor, level: int
    ) -> Tensor:
        if self.measure == "cluster":
            return cluster_confidence(unit_SD, centroids_KD, cluster_S)
        temperature = self.loss_temperature if self.temperature is None else self.temperature
        return sample_confidence(unit_SD, F.normalize(centroids_KD, dim=1), cluster_S, temperature)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._save_to_state_dict(destination, prefix, *rest)
        destination[f"{prefix}labels"] = self.labels
        destination[f"{prefix}confidence"] = self.confidence

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        missing, (levels, num_samples) = others[2], self.labels.shape
        advice = "use the same data set and numbers of clusters"
        names = (f"{prefix}labels", f"{prefix}confidence")
        missing += [name for name in names if state_dict.get(name) is None]
        labels, confidence = (state_dict.pop(name, None) for name in names)
        sizes = {"levels": levels, "num_samples": num_samples}
        if size_differs(names[0], labels, others[-1], advice, **sizes):
            return
        if labels is not None and confidence is not None:
            known = labels < labels.new_tensor(self.num_clusters).unsqueeze(1)
            self.clusters.set_acceptance(known, confidence)
        super()._load_from_state_dict(state_dict, prefix, *others)


def default_clusters(num_samples: int, num_classes: int | None = None) -> tuple[int, ...]:
    """1, 3 and 10 times the number of classes, at most N/2, each once. Without `num_classes` it is
    estimated as √(N / 5), at least 20: too few clusters are worse than too many.

    Example:
        >>> default_clusters(50_000, 10), default_clusters(50_000), default_clusters(1_536)
        ((10, 30, 100), (100, 300, 1000), (20, 60, 200))
    """
    coarsest = max(20.0, math.sqrt(num_samples / 5)) if num_classes is None else max(2, num_classes)
    most = max(1, num_samples // 2)
    return tuple(sorted({min(round(coarsest * times), most) for times in (1, 3, 10)}))
