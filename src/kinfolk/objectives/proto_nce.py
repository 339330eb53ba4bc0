"""The prototype term of ProtoNCE: Li et al., Prototypical Contrastive Learning of Unsupervised Representations, ICLR 2021, equation 11.

Dimension key: A anchors, D embedding, K prototypes, M prototypes contrasted with, L levels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk import distributed


def prototype_nce(anchors: Tensor, prototypes: Tensor, concentration: Tensor, labels: Tensor, drawn: Tensor | None = None) -> Tensor:
    """(A,) the loss of each anchor: its own prototype against the others, each at its own temperature.

        −log( exp(v_i·c_s / φ_s) / Σ_j exp(v_i·c_j / φ_j) )        s the prototype of sample i

    Args:
        anchors: (A, D) v, of any norm.
        prototypes: (K, D) c, of any norm, without gradient.
        concentration: (K,) φ; 0 marks an empty cluster, which is nobody's negative.
        labels: (A,) prototype of each anchor; below 0: none, the loss is 0.
        drawn: (M,) prototypes that stand in the sum beside the anchor's own; None: all.

    Example:
        >>> prototype_nce(torch.eye(2), torch.eye(2), torch.tensor([0.5, 0.5]), torch.tensor([0, -1]))
        tensor([0.1269, 0.0000])
    """
    anchors_AD = F.normalize(anchors if anchors.dtype == torch.float64 else anchors.float(), dim=1)
    prototypes_KD, phi_K = F.normalize(prototypes.to(anchors_AD.dtype), dim=1).detach(), concentration.to(anchors_AD.dtype)
    known_A = labels >= 0
    own_A = labels.clamp(min=0)
    others_M = torch.arange(len(prototypes_KD), device=labels.device) if drawn is None else drawn
    logit_A = (anchors_AD * prototypes_KD[own_A]).sum(1) / phi_K[own_A].where(known_A, 1.0)
    logit_AM = anchors_AD @ prototypes_KD[others_M].T / phi_K[others_M].where(phi_K[others_M] > 0, 1.0)
    absent_AM = (others_M == own_A.unsqueeze(1)) | (phi_K[others_M] == 0)  # the own one enters once, by `logit_A`
    all_A = torch.logaddexp(logit_A, logit_AM.masked_fill(absent_AM, -torch.inf).logsumexp(1)) if len(others_M) else logit_A
    return (all_A - logit_A).where(known_A, 0.0)


def proto_nce(anchors: Tensor, levels: Sequence[tuple[Tensor, Tensor, Tensor]], drawn: Sequence[Tensor | None] | None = None) -> Tensor:
    """Scalar: the prototype term, mean over the levels and over the anchors of all ranks.

    Args:
        anchors: (A, D), this rank's; ranks may hold unequal numbers.
        levels: (prototypes, concentration, labels) of each; see `prototype_nce`.
        drawn: of each level, the same on all ranks; see `prototype_nce`.
    """
    with torch.autocast(anchors.device.type, enabled=False):
        chosen = [None] * len(levels) if drawn is None else drawn
        losses_LA = torch.stack([prototype_nce(anchors, *level, some) for level, some in zip(levels, chosen, strict=True)])
    if distributed.world_size() == 1:
        return losses_LA.mean()
    number = sum(distributed.batch_sizes(len(anchors), anchors.device))
    return distributed.sum_over_ranks(losses_LA.mean(0).sum() / number)
