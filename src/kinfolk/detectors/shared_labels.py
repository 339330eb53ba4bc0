"""Kin by pseudo-labels: what the detectors that cluster all samples share.

Dimension key: R rows of a block, C candidates, L clusterings.
"""

from __future__ import annotations

from torch import Tensor

from kinfolk.clustering.labels import PseudoLabels
from kinfolk.pairs import Block, same_key


def same_cluster(clusters: PseudoLabels, block: Block) -> Tensor:
    """(R, C) the candidates of the anchor's cluster in any of L clusterings; with `block.degrees`
    and several clusterings, the share of these."""
    keys_LR, keys_LC = clusters.of(block.row_ids), clusters.of(block.candidate_ids)
    same = [same_key(key_R, key_C) for key_R, key_C in zip(keys_LR, keys_LC, strict=True)]
    if block.degrees and len(same) > 1:
        return sum(
            (each.to(block.sim_RC.dtype) for each in same[1:]), same[0].to(block.sim_RC.dtype)
        ) / len(same)
    any_RC = same[0]
    for each in same[1:]:
        any_RC = any_RC | each
    return any_RC


def cluster_again(clusters: PseudoLabels | None, features: Tensor | None) -> None:
    """The refresh of a detector that clusters the features of all samples."""
    if clusters is None or features is None:
        raise ValueError(
            "`features` of all samples must be given to a detector that clusters them, and to no"
            " other"
        )
    clusters.refresh(features)
