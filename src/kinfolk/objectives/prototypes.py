"""Losses of methods that cluster the samples.

- Prototype cross-entropy: Mo et al. (SPCL), 2022, equation 4; its symmetric form: Wang et al., ICCV
  2019, equations 6 to 8.
- The prototype term of ProtoNCE: Li et al., ICLR 2021, equation 11.
- Local aggregation: Zhuang et al., ICCV 2019, section 3; equation 5 of Wu et al., ICLR 2021, up to
  a constant.
- The relative contrastive loss: Tang et al., ECCV 2022, equation 3.

Dimension key: A features or anchors, F size of a feature, D embedding, K prototypes of a level, M
prototypes in the sum, L levels, R rows of a block, C candidates, P positives or keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from kinfolk import distributed
from kinfolk.contrast import Contrast, Rows, State, contrast
from kinfolk.errors import require, require_at_least
from kinfolk.objectives.base import Objective
from kinfolk.pairs import OUT, Action, Pairs, unit


class PrototypeCrossEntropy(nn.Module):
    """A linear classifier g_p of features by their prototypes: the mean of CE(g_p(h), y) over
    levels and the features of all ranks.

    See `prototype_cross_entropy`.
    """

    def __init__(
        self,
        num_features: int,
        num_clusters: tuple[int, ...],
        reverse_weight: float = 0.0,
        log_zero: float = -4.0,
    ) -> None:
        super().__init__()
        require_at_least(0, reverse_weight=reverse_weight)
        require(log_zero < 0, "log_zero", log_zero, "below 0")
        self.num_clusters, self.symmetric = tuple(num_clusters), (reverse_weight, log_zero)
        self.head = nn.Linear(num_features, sum(self.num_clusters))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Scalar, of this rank's (A, F) features and their (L, A) labels, below 0: unknown."""
        with torch.autocast(features.device.type, enabled=False):
            logits = self.head(features.to(self.head.weight.dtype)).split(self.num_clusters, 1)
            losses = [
                prototype_cross_entropy(*level, *self.symmetric)
                for level in zip(logits, labels, strict=True)
            ]
        return mean_over_ranks(torch.stack(losses).mean(0))


def mean_over_ranks(loss_A: Tensor) -> Tensor:
    if distributed.world_size() == 1:
        return loss_A.mean()
    number = sum(distributed.batch_sizes(len(loss_A), loss_A.device))
    return distributed.sum_over_ranks(loss_A.sum() / number)


def prototype_cross_entropy(
    logits: Tensor, labels: Tensor, reverse_weight: float = 0.0, log_zero: float = -4.0
) -> Tensor:
    """(A,) cross-entropy of (A, K) `logits`, 0 for labels below 0; with a `reverse_weight` w the
    symmetric one, in which a wrong prototype has less effect.

        −log p_y + w · RCE,       RCE = −Σ_k p_k log q_k = −log_zero · (1 − p_y)

    q is the one-hot label, whose zeros have the logarithm `log_zero` (A of Wang et al.).

    Example:
        >>> prototype_cross_entropy(torch.zeros(2, 4), torch.tensor([3, -1]))
        tensor([1.3863, 0.0000])
        >>> prototype_cross_entropy(torch.zeros(1, 4), torch.tensor([3]), reverse_weight=1.0)
        tensor([4.3863])
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    log_p_A = logits.log_softmax(1).gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    loss_A = -log_p_A - reverse_weight * log_zero * (1 - log_p_A.exp())
    return loss_A.where(labels >= 0, 0.0)


def prototype_nce(
    anchors: Tensor,
    prototypes: Tensor,
    concentration: Tensor,
    labels: Tensor,
    drawn: Tensor | None = None,
) -> Tensor:
    """Scalar: the mean over this rank's anchors, each of which is contrasted with its prototype s.

        loss_i = −log( exp(v_i·c_s / φ_s) / Σ_j exp(v_i·c_j / φ_j) )

    This is InfoNCE with t the smallest φ, candidates c_j · t / φ_j, and prototypes as samples.

    v (A, D) and c (K, D), without gradient, have any norm. Where φ (K,) is 0, a cluster is empty
    and not in the sum. Anchors with a label (A,) below 0 have the loss 0. `drawn`: (M,) prototypes
    in the sum besides the anchor's.

    Example:
        >>> z, phi = torch.eye(2), torch.tensor([0.5, 0.5])
        >>> round(prototype_nce(z, z, phi, torch.tensor([0, -1])).item(), 4)
        0.0635
    """
    anchors_AD = unit(anchors)
    phi_K = concentration.to(anchors_AD.dtype).masked_fill(concentration <= 0, torch.inf)
    smallest = phi_K.amin()
    scaled_KD = unit(prototypes.detach(), anchors_AD.dtype) * (smallest / phi_K).unsqueeze(1)
    number_M = torch.arange(len(phi_K), device=labels.device) if drawn is None else drawn
    own_A1D = scaled_KD[labels.clamp(min=0)].unsqueeze(1)
    # an empty cluster counts for a sample that there is not
    owners_M = torch.where(phi_K[number_M].isinf(), len(phi_K), -1)
    pairs = Pairs(
        anchors_AD, scaled_KD[number_M], own_A1D, labels, number_M, candidate_owners=owners_M
    )
    return contrast(Contrast(_prototype_row_loss), pairs, smallest).loss


def _prototype_row_loss(rows: Rows) -> tuple[Tensor, State]:
    loss = torch.logaddexp(rows.log_pos(), rows.log_sum()) - rows.pull() / rows.t
    return loss * (rows.ids >= 0), {}  # 0 for an anchor without a prototype


def proto_nce(
    anchors: Tensor,
    levels: Sequence[tuple[Tensor, Tensor, Tensor]],
    drawn: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Scalar: the mean of `prototype_nce` over levels (prototypes, concentration, labels) and the
    anchors of all ranks. `drawn`: the same on all ranks."""
    given = zip(levels, drawn or [None] * len(levels), strict=True)
    loss = torch.stack([prototype_nce(anchors, *level, some) for level, some in given]).mean()
    return mean_over_ranks(loss.expand(len(anchors)))


@dataclass(kw_only=True, eq=False, repr=False)
class LocalAggregationLoss(Objective):
    """The probability that the anchor is one of its close neighbours, among its background.

        loss_i = −log [ ( Σ_own exp(s/t) + Σ_{j ∈ C_i ∩ B_i} exp(s_ij/t) )
                        / ( Σ_own exp(s/t) + Σ_{j ∈ B_i} exp(s_ij/t) ) ]

    C_i are the kin, B_i the candidates that the detector does not ignore. It is enough if some of
    the kin are near, while `NTXentLoss` attracts each. Without a detector, or with another action
    than "attract", it is `NTXentLoss`.

    Args:
        temperature, detector, …: see `Settings`.

    Example:
        >>> import torch, kinfolk as kf
        >>> z1, z2 = torch.eye(4), torch.eye(4)
        >>> one_class = kf.Oracle(torch.tensor([0, 0, 0, 0]))
        >>> loss_fn = kf.LocalAggregationLoss(temperature=0.5, detector=one_class)
        >>> loss_fn(z1, z2, torch.arange(4)).item()  # all samples are close to each other
        0.0
    """

    temperature: float = 0.07
    action: Action = "attract"

    shares_pull: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("prior", "hardness", "decoupled", "rescale_kept"),
        "close neighbours are in numerator and denominator, and an estimated denominator could be"
        " the smaller one",
    )

    def row_loss(self, rows: Rows) -> tuple[Tensor, State]:
        own = close = rows.log_pos()
        if rows.y is not None:
            close = torch.logaddexp(own, rows.log_sum(rows.y.log().clamp(min=OUT)))
        return torch.logaddexp(own, rows.log_sum()) - close, {}


@dataclass(kw_only=True, eq=False, repr=False)
class RelativeContrastLoss(Objective):
    """Contrasts each key with the negatives. A key is attracted if a criterion calls it positive,
    and only repelled if not.

        loss_i = mean_{keys k} ( log( exp(s_ik / t) + Σ_j w_ij exp(s_ij / t) ) − y_ik · s_ik / t )

    The keys are the positives of `Pairs`, and y_ik their degrees: whether the criterion calls the
    key positive, or the share of several criteria (P_c of equation 9). w_ij: see `NTXentLoss`. With
    "attract" kin are further keys with y = 1. With one positive key, it is `NTXentLoss`.

    Args:
        temperature, detector, …: see `Settings`.

    Example:
        >>> import torch
        >>> from kinfolk.pairs import Pairs
        >>> z, ids = torch.eye(3), torch.arange(3)
        >>> keys, degree = torch.stack((z, z.roll(1, 0)), 1), torch.tensor([[1.0, 0.0]] * 3)
        >>> pairs = Pairs(z, z, keys, ids, ids, degree=degree)
        >>> round(RelativeContrastLoss(temperature=1.0).on(pairs).item(), 4)
        0.825
    """

    uses_degrees: ClassVar[bool] = True
    shares_pull: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("prior", "hardness", "decoupled"),
        "retrieved keys are entries of the queue too, so the sum over negatives contains positives",
    )

    def row_loss(self, rows: Rows) -> tuple[Tensor, State]:
        lse, logit_RP = rows.log_sum(), rows.pos / rows.t.unsqueeze(1)
        degree_RP = torch.ones_like(logit_RP) if rows.degree is None else rows.degree.to(lse.dtype)
        key_RP = torch.logaddexp(logit_RP, lse.unsqueeze(1)) - degree_RP * logit_RP
        loss, number = torch.where(degree_RP < 0, 0.0, key_RP).sum(1), (degree_RP >= 0).sum(1)
        if rows.y is not None:  # attracted kin are keys that are in the sum already
            num_kin = (rows.y > 0).sum(1)
            kin = num_kin * lse - (rows.y * rows.sim).sum(1) / rows.t
            loss, number = loss + torch.where(num_kin > 0, kin, 0.0), number + num_kin
        return loss / number, {}
