"""What one direction of a two-way contrast adds to the gradient of the other: four matrix products for both, instead of six.

Images i and texts j have one matrix of similarities, and the two directions their losses of it:

    loss = Σ_i f_i(lse_i) + Σ_j f'_j(lse'_j),     lse'_j = log Σ_i v_ij exp(s_ij / t)
    ∂loss/∂s_ij = f_i' p_ij / t + f'_j' q_ij / t,     q_ij = v_ij exp(s_ij / t − lse'_j)

The texts' direction is evaluated first and without gradient: one product, after which a text is known by lse'_j, its derivative, and the
level above which v_ij is 0. With these the images' direction, where a block of s is at hand, has the second term as well, and takes the two
products of the gradient from the sum. Under a process group only these numbers cross ranks.

Dimension key: R rows of a block, C candidates, A anchors, P own positives, K negatives that are kept in any case.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk import distributed
from kinfolk.actions import Settled
from kinfolk.pairs import Block, Roles

_OUT = -1e30  # in the exponent of a pair that is left out


class Across:
    """Collects from the blocks of one direction (`note`), and answers for blocks of the other (`push`), in which its anchors are the
    candidates. Kin may only be said by a level, and be left out.

    Args:
        temperature: t.
        min_negatives: K, see `Policy`.
    """

    def __init__(self, temperature: float, min_negatives: int) -> None:
        self.temperature, self.min_negatives, self.first_row = temperature, min_negatives, 0
        self.d_own: list[Tensor] = []  # (R, P) by the similarities of the own pairs, which are one for both directions
        self.d_temperature: float | Tensor = 0.0  # with these and lse held
        self._noted: list[tuple[Tensor, ...]] = []

    def note(self, roles: Roles, settled: Settled, lse_R: Tensor, shares_RC: Tensor, d_lse_R: Tensor) -> None:
        """What the gradient of the other direction needs of a block: `d_lse_R` is the derivative of the loss by `lse_R`."""
        scale_R = d_lse_R / self.temperature
        level_R = torch.full_like(lse_R, torch.inf)
        if roles.kin_above_R is not None:  # the other direction's product may round the same similarity to another side of it
            level_R = roles.kin_above_R.to(lse_R.dtype) + 4 * torch.finfo(lse_R.dtype).eps
        # Where no more than `min_negatives` are left, some may have been spared: no level says which, but they are few.
        spared_R = (settled.weight_R <= self.min_negatives) & (level_R < torch.inf)
        share_RK = shares_RC.new_zeros(len(lse_R), min(self.min_negatives, shares_RC.shape[1]))
        place_RK = torch.zeros_like(share_RK, dtype=torch.int64)
        if spared_R.any():
            share_RK[spared_R], place_RK[spared_R] = shares_RC[spared_R].topk(share_RK.shape[1])
        silent_R = spared_R | (scale_R == 0) | (lse_R == -torch.inf)
        log_factor_R = (scale_R.log() - lse_R).masked_fill(silent_R, -torch.inf)
        self._noted.append((log_factor_R, level_R, share_RK * scale_R.unsqueeze(1), place_RK))

    def settle(self, sizes: list[int] | None) -> None:
        """Joins what was noted of all blocks and ranks; between the two directions."""
        columns = [torch.cat(parts) for parts in zip(*self._noted, strict=True)]
        if sizes is not None:
            columns = [distributed.gather_rows(column, sizes) for column in columns]
            self.first_row = sum(sizes[: torch.distributed.get_rank()])
        self._log_factor_C, self._level_C, self._kept_CK, self._place_CK = columns
        self._leveled, self._sparing = bool((self._level_C < torch.inf).any()), bool((self._kept_CK > 0).any())

    def push(self, block: Block, rows: slice, out_RC: Tensor) -> None:
        """Writes the other direction's part of ∂loss/∂s to `out_RC`; a few rows at a time, so that they stay in the cache."""
        for part, (above_RC,) in block.parts(1):
            sim_RC, push_RC = block.sim_RC[part], out_RC[part]
            torch.add(self._log_factor_C, sim_RC, alpha=1 / self.temperature, out=push_RC)
            if self._leveled:  # a mask of numbers, see `actions`
                push_RC.add_(torch.gt(sim_RC, self._level_C, out=above_RC), alpha=_OUT)
            push_RC.exp_()
        if self._sparing:
            row_CK = self._place_CK - self.first_row - rows.start
            here_CK = (self._kept_CK > 0) & (row_CK >= 0) & (row_CK < len(out_RC))
            out_RC[row_CK[here_CK], here_CK.nonzero()[:, 0]] += self._kept_CK[here_CK]
