"""What one direction of a two-way contrast adds to the gradient of the other: four matrix products for both, instead of six.

Images i and texts j have one matrix of similarities, and the two directions their losses of it:

    loss = Σ_i f_i(lse_i) + Σ_j f'_j(lse'_j),     lse'_j = log Σ_i v_ij exp(s_ij / t)
    ∂loss/∂s_ij = f_i' p_ij / t + f'_j' q_ij / t,     q_ij = v_ij exp(s_ij / t − lse'_j)

The texts' direction is evaluated first and without gradient: one product, after which a text is known by lse'_j, its derivative, and the
similarities above and up to which v_ij is 0. With these the images' direction, where a block of s is at hand, has the second term as well,
and takes the two products of the gradient from the sum. Under a process group only these numbers cross ranks.

Dimension key: R rows of a block, C candidates, P own positives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk import distributed
from kinfolk.kinship import Interval, Roles, Weighed, greater
from kinfolk.pairs import LEFT_OUT


class Across:
    """Collects from the blocks of one direction (`note`), and answers for blocks of the other (`push`), in which its anchors are the
    candidates. Kin may only be an interval without upper end, and be left out.

    Args:
        temperature: t, one for all.
    """

    def __init__(self, temperature: float | Tensor) -> None:
        self.temperature = temperature
        self.d_own: list[Tensor] = []  # (R, P) by the similarities of the own pairs, which are one for both directions
        self.d_temperature: Tensor | None = None  # with these and lse held
        self._noted: list[tuple[Tensor, ...]] = []

    def note(self, roles: Roles, weighed: Weighed, d_lse_R: Tensor, d_own_RP: Tensor, d_temperature: Tensor | None) -> None:
        """What the gradient of the other direction needs of a block: the derivatives of the loss by its row terms."""
        lse_R, scale_R = weighed.lse_R, d_lse_R / self.temperature
        above_R, cut_R = torch.full_like(lse_R, torch.inf), torch.full_like(lse_R, -torch.inf)
        if roles.kin is not None:  # the other direction's product may round the same similarity to another side of a bound
            assert isinstance(roles.kin, Interval)
            assert roles.kin.lower_R is not None
            slack = 4 * torch.finfo(lse_R.dtype).eps
            above_R = roles.kin.lower_R.to(lse_R.dtype) + slack  # one row for each sample
            cut_R = cut_R if weighed.cut_R is None else weighed.cut_R
        log_factor_R = torch.where(scale_R == 0, LEFT_OUT, scale_R.log() - lse_R)
        self._noted.append((log_factor_R, above_R, cut_R))
        self.d_own.append(d_own_RP)
        if d_temperature is not None:
            self.d_temperature = d_temperature if self.d_temperature is None else self.d_temperature + d_temperature

    def settle(self, sizes: list[int] | None) -> None:
        """Joins what was noted of all blocks and ranks; between the two directions."""
        columns = [torch.cat(parts) for parts in zip(*self._noted, strict=True)]
        if sizes is not None:
            columns = distributed.gather_together(columns, sizes)
        self._columns = columns

    def own(self, rows: slice) -> Tensor:
        """(R, P) the other direction's derivative by the similarities of the own pairs, of these rows."""
        return (self.d_own[0] if len(self.d_own) == 1 else torch.cat(self.d_own))[rows]

    def push(self, sim_RC: Tensor) -> Tensor:
        """(R, C) the other direction's part of ∂loss/∂s."""
        log_factor_C, above_C, cut_C = self._columns
        out_RC = greater(sim_RC, torch.maximum(above_C, cut_C))
        return (sim_RC / self.temperature).add_(log_factor_C).add_(out_RC, alpha=LEFT_OUT).exp_()
