"""NT-Xent and its relatives.

- NT-Xent: Chen et al., ICML 2020, equation 1. With attraction it is SupCon: Khosla et al., NeurIPS
  2020, equation 2 (mean over positives outside the logarithm).
- Debiased: Chuang et al., NeurIPS 2020, equations 7 and 8.
- Hard negatives: Robinson et al., ICLR 2021, equation 4.
- Decoupled: Yeh et al., ECCV 2022, equation 4.

Dimension key: R rows of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk.contrast import EMPTY, Rows, State
from kinfolk.errors import require
from kinfolk.objectives.base import Objective
from kinfolk.pairs import OUT


@dataclass(kw_only=True, eq=False, repr=False)
class NTXentLoss(Objective):
    """The loss of SimCLR, with false negatives eliminated, attracted or reweighted.

        loss_i = −(1/|P_i|) Σ_{p ∈ P_i} s_ip / t
                 + log( Σ_{own p} exp(s_ip / t) + Σ_j w_ij exp(s_ij / t) )

    P_i: the anchor's positives, with "attract" also its kin. w_ij of a negative is 1; of kin 0 with
    "eliminate", 1 with "attract", in [0, 1] with "reweight". With `Oracle` and "attract" it is
    SupCon.

    Args:
        temperature, detector, …: see `Settings`.
        decoupled: leaves the positives out of the sum.
        rescale_kept: with "eliminate", multiplies the sum over kept negatives by (kept +
            eliminated) / kept, as GloFND's code does for SimCLR.
        prior: τ⁺, the share of negatives that are false, such as 1 / number of classes: what they
            add on average is subtracted from the sum.
        hardness: β, by which negatives weigh more the more similar they are.

    Example:
        >>> import torch, kinfolk as kf
        >>> z1, z2 = torch.eye(4), torch.eye(4)
        >>> round(kf.NTXentLoss(temperature=0.5)(z1, z2).item(), 4)
        0.5944
    """

    decoupled: bool = False
    rescale_kept: bool = False
    prior: float | None = None
    hardness: float | None = None

    def __post_init__(self, compile: bool) -> None:
        super().__post_init__(compile)
        share = "in [0, 1): the share of negatives that are false, such as 1 / classes"
        require(self.prior is None or 0 <= self.prior < 1, "prior", self.prior, share)
        hardness = 0 if self.hardness is None else self.hardness
        must = "at least 0; with 0 all negatives have the same weight"
        require(0 <= hardness < math.inf, "hardness", hardness, must)
        if self.rescale_kept:
            only = f"False with `action` (={self.action!r}): only 'eliminate' leaves negatives out"
            require(self.action == "eliminate", "rescale_kept", True, only)
            twice = "False with `prior` or `hardness`, which estimate the sum themselves"
            require(not (self.prior or self.hardness), "rescale_kept", True, twice)

    def row_loss(self, rows: Rows) -> tuple[Tensor, State]:
        lse = harden(rows, self.hardness) if self.hardness else rows.log_sum()
        if self.prior:
            lse = debias(rows, lse, self.prior)
        if self.rescale_kept and rows.kin is not None:
            lse = lse + torch.log1p(rows.kin.sum(1) / rows.weight().clamp(min=1))
        pull = rows.pull(self.own_weight) / rows.t
        if self.decoupled:
            return lse.masked_fill(lse < EMPTY, 0.0) - pull, {}
        return torch.logaddexp(rows.log_pos(), lse) - pull, {}


def harden(rows: Rows, hardness: float) -> Tensor:
    """(R,) log Σ_j w_ij h_ij exp(s_ij / t), h_ij = exp(β s_ij / t) / its mean over negatives."""
    weight = rows.weight()
    log_mean = rows.log_sum(scale=hardness) - weight.where(weight > 0, 1.0).log()
    return (rows.log_sum(scale=1 + hardness) - log_mean).where(weight > 0, OUT)


def debias(rows: Rows, lse: Tensor, prior: float) -> Tensor:
    """(R,) log of the sum over negatives, without what false ones among them add on average.

        n·g = max( ( Σ_j w_j exp(s_j / t) − τ⁺ n E⁺ ) / (1 − τ⁺),  n exp(−1 / t) )

    E⁺ is the mean of exp(s / t) over the positives; exp(−1 / t) is the least a negative can add."""
    weight = rows.weight()
    log_n = weight.where(weight > 0, 1.0).log()
    # τ⁺ n E⁺ / Σ
    log_share = math.log(prior) + log_n + rows.log_pos() - math.log(rows.pos.shape[1]) - lse
    share = log_share.clamp(max=1).exp()
    free = lse + (1 - share).clamp(min=torch.finfo(lse.dtype).tiny).log() - math.log1p(-prior)
    least = log_n - 1 / rows.t
    debiased = torch.where((share >= 1) | (free <= least), least, free)
    return debiased.where(weight > 0, OUT)
