"""Clusterings of all samples, once per epoch."""

from kinfolk.clustering.kmeans import Clusters, kmeans
from kinfolk.clustering.labels import ClusterLabels

__all__ = ["ClusterLabels", "Clusters", "kmeans"]
