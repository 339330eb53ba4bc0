"""Clusters during training: how far the pseudo-labels that the method goes by agree with the labels it does not see.

Dimension key: L levels, N training samples.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kinfolk.clustering.hierarchy import Hierarchy
from kinfolk.clustering.labels import ClusterLabels
from kinfolk.data.images import ImageData
from kinfolk.evaluation.clusters import Normaliser, label_nmi, mtpr_mtnr
from kinfolk.frameworks.base import Framework
from kinfolk.training.module import TrainingModule


class ClusterQuality:
    """A measurement of the journal: `mtpr` and `mtnr` of the pseudo-labels, and `nmi` of the clusters, with the training labels.

    Of the first level alone: the one whose number of clusters is named first. `mtpr` and `mtnr` go by the pseudo-labels as the loss uses
    them, in which a sample that was not accepted is alone; `nmi` goes by the clusters of all samples. Nothing is measured without labels,
    for methods that do not cluster, or before the first clustering. `normaliser`: of the NMI, see `label_nmi`.
    """

    def __init__(self, data: ImageData, normaliser: Normaliser = "arithmetic") -> None:
        self.normaliser = normaliser
        labels = None if data.labels is None else data.labels[: data.num_train]
        self.truth = labels if labels is not None and bool((labels >= 0).any()) else None

    def __call__(self, module: TrainingModule, epoch: int) -> dict[str, float]:
        found = None if self.truth is None else pseudo_labels(module.framework)
        if found is None or self.truth is None:
            return {}
        used_N, clusters_N = (levels_LN[0].cpu() for levels_LN in found)
        rates = mtpr_mtnr(used_N, self.truth)
        figures = {"mtpr": rates.mtpr, "mtnr": rates.mtnr, "nmi": label_nmi(clusters_N, self.truth, self.normaliser)}
        return {name: value for name, value in figures.items() if math.isfinite(value)}


def pseudo_labels(framework: Framework) -> tuple[Tensor, Tensor] | None:
    """(L, N) pseudo-labels as the loss uses them, and (L, N) the clusters they come from; None for a method without clusters, or before
    the first of them."""
    clusters = next((part for part in framework.modules() if isinstance(part, ClusterLabels)), None)
    if clusters is None or not bool(clusters.refreshed):
        return None
    owners = (part for part in framework.modules() if not isinstance(part, ClusterLabels))
    labels = (getattr(part, "labels", None) for part in owners)  # an oracle's are (N,), and the truth
    used = next((each for each in labels if isinstance(each, Tensor) and each.shape == clusters.labels.shape), clusters.labels)
    return used, clusters.labels


def accepted_labels(framework: Framework) -> Tensor | None:
    """(N,) pseudo-labels of the first level that groups samples, −1 where none was accepted or the sample is alone; None for a method
    without clusters, or before the first of them."""
    found = pseudo_labels(framework)
    if found is not None:
        used_N, clusters_N = (levels_LN[0] for levels_LN in found)
        labels_N = used_N.where(used_N == clusters_N, -1)
    else:
        tree = next((part for part in framework.modules() if isinstance(part, Hierarchy)), None)
        if tree is None or tree.levels < 2:
            return None
        labels_N = tree.labels[1]
    _, group_N, size = torch.unique(labels_N, return_inverse=True, return_counts=True)
    return labels_N.where(size[group_N] > 1, -1)
