"""Clusterings of all samples: once per epoch, or refined with every batch."""

from kinfolk.clustering.dbscan import dbscan
from kinfolk.clustering.hierarchy import OnlineHierarchy, conforming
from kinfolk.clustering.kmeans import Clusters, kmeans
from kinfolk.clustering.labels import PseudoLabels, dbscan_levels, kmeans_levels
from kinfolk.clustering.patch_features import PatchFeatures

__all__ = [
    "Clusters",
    "OnlineHierarchy",
    "PatchFeatures",
    "PseudoLabels",
    "conforming",
    "dbscan",
    "dbscan_levels",
    "kmeans",
    "kmeans_levels",
]
