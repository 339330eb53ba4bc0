"""Prototype cross-entropy: Mo et al., Siamese Prototypical Contrastive Learning, equation 4.

Its symmetric form: Wang et al., Symmetric Cross Entropy for Robust Learning with Noisy Labels, ICCV 2019, equations 6 to 8.

Dimension key: A features, F size of a feature, K prototypes of a level, L levels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kinfolk import distributed


class PrototypeCrossEntropy(nn.Module):
    """A linear classifier g_p of features by their prototypes, at one or several numbers of prototypes.

        mean over levels and features of CE(g_p(h), y)

    See `prototype_cross_entropy` and `stacked_cross_entropy`. No state but the classifier's.

    Args:
        num_features: F.
        num_clusters: K of each level: what the classifier tells apart is prototypes, however many classes there are.
        reverse_weight, log_zero: of the symmetric form; see `prototype_cross_entropy`.
    """

    def __init__(self, num_features: int, num_clusters: tuple[int, ...], reverse_weight: float = 0.0, log_zero: float = -4.0) -> None:
        super().__init__()
        if not reverse_weight >= 0:
            raise ValueError(f"`reverse_weight` (={reverse_weight}) must not be negative")
        if not log_zero < 0:
            raise ValueError(f"`log_zero` (={log_zero}) must be below 0")
        self.num_clusters, self.reverse_weight, self.log_zero = tuple(num_clusters), reverse_weight, log_zero
        self.head = nn.Linear(num_features, sum(self.num_clusters))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Scalar, of this rank's (A, F) features and their labels (L, A), below 0 where unknown."""
        with torch.autocast(features.device.type, enabled=False):
            logits: Tensor = self.head(features.to(self.head.weight.dtype))
        levels = list(zip(torch.split(logits, list(self.num_clusters), 1), labels, strict=True))
        return stacked_cross_entropy(levels, self.reverse_weight, self.log_zero)


def prototype_cross_entropy(logits: Tensor, labels: Tensor, reverse_weight: float = 0.0, log_zero: float = -4.0) -> Tensor:
    """(A,) cross-entropy of each row to its prototype, and with a `reverse_weight` w the symmetric one.

        −log p_y + w · RCE,       RCE = −Σ_k p_k log q_k = −log_zero · (1 − p_y)

    q is the one-hot label, whose zeros have the logarithm `log_zero`. RCE is bounded, so a wrong prototype pulls no harder than that.

    Args:
        logits: (A, K) g_p(h).
        labels: (A,) prototype of each; below 0: none, the loss is 0.
        reverse_weight: w; 0: plain cross-entropy.
        log_zero: A of Wang et al., below 0.

    Example:
        >>> prototype_cross_entropy(torch.zeros(2, 4), torch.tensor([3, -1]))
        tensor([1.3863, 0.0000])
        >>> prototype_cross_entropy(torch.zeros(1, 4), torch.tensor([3]), reverse_weight=1.0)
        tensor([4.3863])
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    log_p_A = logits.log_softmax(1).gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    loss_A = -log_p_A
    if reverse_weight:
        loss_A = loss_A - reverse_weight * log_zero * (1 - log_p_A.exp())
    return loss_A.where(labels >= 0, 0.0)


def stacked_cross_entropy(levels: Sequence[tuple[Tensor, Tensor]], reverse_weight: float = 0.0, log_zero: float = -4.0) -> Tensor:
    """Scalar: the cross-entropy to the prototypes, mean over the levels and over the features of all ranks.

    Args:
        levels: (A, K) logits and (A,) labels of each number of prototypes; this rank's, ranks may hold unequal numbers.
        reverse_weight, log_zero: see `prototype_cross_entropy`.
    """
    first = levels[0][0]
    with torch.autocast(first.device.type, enabled=False):
        losses_LA = torch.stack([prototype_cross_entropy(*level, reverse_weight, log_zero) for level in levels])
    if distributed.world_size() == 1:
        return losses_LA.mean()
    number = sum(distributed.batch_sizes(len(first), first.device))
    return distributed.sum_over_ranks(losses_LA.mean(0).sum() / number)
