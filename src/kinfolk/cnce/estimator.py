"""Two lower bounds on mutual information from critic scores: NCE, and CNCE with negatives drawn
near the anchor.

Wu, Mosse, Zhuang, Yamins, Goodman, Conditional Negative Sampling for Contrastive Learning of Visual
Representations, ICLR 2021, equation 1 and theorems 3.1 and 3.2. With k candidates, one of which is
the positive v_1,

    Z = log( e^f(u, v_1) / (1/k · Σ_j e^f(u, v_j)) ),
    NCE = E[Z] with v_2:k ~ p(v),     CNCE = E[Z] with v_2:k ~ p(v | S_B).

S_B contains the v whose score is between the ω_ℓ-th and the ω_u-th percentile of the anchor's
scores (section 4). Appendix B calls S_B "the top w_ℓ percentage", but its support shrinks from w =
10 to 95. Both agree only if w is the lower percentile, as in section 4. So ω = 95 keeps the hardest
5 percent here, and ω = 0 is NCE.

Theorem 3.1 requires that B lies above c = E_p[e^f], which does not hold for a low ω (`premise`).
Without an upper end the premise is not needed: scores above a percentile are stochastically larger
than all scores, and Z decreases with each of them, so CNCE decreases as ω increases and never
exceeds NCE. A ring (upper < 100) needs the premise: below c, CNCE can exceed the mutual
information.

Dimension key: A anchors, C candidates of an anchor other than its positive, K negatives drawn, D
embedding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


def nce(
    positive_A: Tensor, others_AC: Tensor, num_negatives: int, generator: torch.Generator
) -> Tensor:
    """The NCE estimate (a scalar): the mean of Z with negatives from all candidates. Equals `cnce`
    with `lower=0`."""
    return cnce(positive_A, others_AC, num_negatives, generator, lower=0.0)


def cnce(
    positive_A: Tensor,
    others_AC: Tensor,
    num_negatives: int,
    generator: torch.Generator,
    lower: float,
    upper: float = 100.0,
) -> Tensor:
    """The CNCE estimate (a scalar): the mean of Z with negatives from the candidates between two
    percentiles of each anchor's scores.

    Estimates with equal generators use the same random numbers, so they differ only by the
    percentiles. With `upper` = 100 such an estimate decreases with `lower` in every draw.

    Args:
        positive_A: (A,) scores f(u, v_1).
        others_AC: (A, C) scores of draws from p(v) that are independent of v_1. The positive is not
            among them.
        num_negatives: negatives per anchor, drawn independently and with replacement; k − 1 in
            theorem 3.1.
        generator: random generator on the device of the scores.
        lower, upper: ω_ℓ and ω_u, percentiles in [0, 100].

    Example:
        >>> from kinfolk.seeding import generator
        >>> others = torch.tensor([[-1.0, 0.0, 1.0, 2.0]])
        >>> one = torch.tensor([1.5])
        >>> estimates = [cnce(one, others, 50, generator(0), lower) for lower in (0, 50, 75)]
        >>> [round(float(estimate), 2) for estimate in estimates]
        [0.45, -0.04, -0.49]
    """
    kept_AM = support(others_AC.sort(1).values, lower, upper)
    return log_ratio(positive_A, draw(kept_AM, num_negatives, generator)).mean()


def log_ratio(positive_A: Tensor, negatives_AK: Tensor) -> Tensor:
    """(A,) Z for each anchor. The positive is one of the k = K + 1 candidates, so Z is at most log
    k."""
    if positive_A.ndim != 1 or negatives_AK.ndim != 2 or len(positive_A) != len(negatives_AK):
        raise ValueError(
            f"`positive_A` (={tuple(positive_A.shape)}) and `negatives_AK`"
            f" (={tuple(negatives_AK.shape)}) must have the shapes (A,), (A, K)"
        )
    every = torch.cat((positive_A[:, None], negatives_AK), 1)
    return positive_A - every.logsumexp(1) + math.log(every.shape[1])


def support(ordered_AC: Tensor, lower: float, upper: float = 100.0) -> Tensor:
    """(A, M) the scores between the percentiles `lower` and `upper` of each row of ascending
    scores, at least one."""
    first, last = bounds(ordered_AC.shape[1], lower, upper)
    return ordered_AC[:, first:last]


def bounds(num_candidates: int, lower: float, upper: float = 100.0) -> tuple[int, int]:
    """The range of ranks between the percentiles, for `num_candidates` in ascending order. The end
    is exclusive."""
    if not 0 <= lower < upper <= 100:
        raise ValueError(
            f"`lower` (={lower}) and `upper` (={upper}) must be percentiles, 0 <= lower < upper"
            " <= 100"
        )
    if num_candidates < 1:
        raise ValueError(f"`num_candidates` (={num_candidates}) must be at least 1")
    first = min(math.floor(num_candidates * lower / 100), num_candidates - 1)
    return first, max(math.ceil(num_candidates * upper / 100), first + 1)


def draw(kept_AM: Tensor, num_negatives: int, generator: torch.Generator) -> Tensor:
    """(A, K) scores drawn from each row, independently and with replacement.

    Uses the inverse of the distribution function: the same random number picks a larger score from
    a higher part of ascending scores.
    """
    if num_negatives < 1:
        raise ValueError(f"`num_negatives` (={num_negatives}) must be at least 1")
    size = kept_AM.shape[1]
    # Counted from the top, so that sets with the same upper end use the same random number for
    # their largest score.
    share_AK = torch.rand(
        len(kept_AM), num_negatives, generator=generator, device=kept_AM.device, dtype=torch.float64
    )
    below_top_AK = (share_AK * size).long().clamp_(max=size - 1)
    return kept_AM.gather(1, size - 1 - below_top_AK)


def premise(ordered_AC: Tensor, lower: float) -> float:
    """Share of anchors (rows of ascending scores) for which theorem 3.1 applies: the lowest e^f in
    the support is above the mean c."""
    mean_A = ordered_AC.logsumexp(1) - math.log(ordered_AC.shape[1])
    return float((support(ordered_AC, lower)[:, 0] > mean_A).double().mean())


def scores(u_AD: Tensor, v_ND: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Scores f(u, v) = ⟨u, v⟩ / temperature of unit vectors: (A,) of row i with row i, (A, N − 1)
    with all other rows of `v_ND`.

    `u_AD` may have only the first rows. The further rows of `v_ND` are candidates too.
    """
    if (
        u_AD.ndim != 2
        or v_ND.ndim != 2
        or u_AD.shape[1] != v_ND.shape[1]
        or not 0 < len(u_AD) <= len(v_ND)
        or len(v_ND) < 2
    ):
        raise ValueError(
            f"`u_AD` (={tuple(u_AD.shape)}) and `v_ND` (={tuple(v_ND.shape)}) must be (A, D) and"
            " (N, D) with A <= N and N at least 2"
        )
    if not temperature > 0:
        raise ValueError(f"`temperature` (={temperature}) must be above 0")
    score_AN = (
        functional.normalize(u_AD.double(), dim=1)
        @ functional.normalize(v_ND.double(), dim=1).T
        / temperature
    )
    others = torch.ones_like(score_AN, dtype=torch.bool)
    others.fill_diagonal_(False)
    return score_AN.diagonal().clone(), score_AN[others].view(len(u_AD), len(v_ND) - 1)
