"""Degrees of kinship for detectors whose answer is yes or no.

Dimension key: R rows of a block, C candidates, L levels of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from kinfolk.detectors.base import Found, Wrapped
from kinfolk.kinship import Interval, Keys, Mask, Places, Roles
from kinfolk.pairs import LEFT_OUT, Block


class Graded(Wrapped):
    """Wraps a detector: its kin are the same, and each has a degree, by which it is attracted or taken from the denominator.

        kin above a threshold (FNC, GloFND)         degree = (s − threshold) / (1 − threshold)
        the k most similar (FNC)                    the same, with the (k + 1)-th highest similarity as the threshold
        kin by clusters (Neighbours, Ring)          degree = share of the clusterings in which anchor and candidate agree
        kin by labels with a confidence κ (IFND)    degree = mean over levels of 1[labels agree] · min(κ_i, κ_j) / max κ of the level
        listed pairs with a similarity (Known)      degree = that similarity, in [0, 1]
        kin with degrees of their own (Hierarchy)   these

    A ring with learned boundaries has thresholds too. Kin of detectors without such a measure (Oracle, Components, an exact Ring, one
    clustering without confidence, Known without similarities, a hard Guide) stay as they are: they are attracted with the degree 1, and
    have the `kin_weight` with "reweight". Levels that would each be a separate loss become one answer. `eliminate` does not use degrees,
    so only the levels change.

    Args:
        detector: the wrapped detector.

    Example:
        >>> from kinfolk.detectors.fnc import FNC
        >>> Graded(FNC(top_k=2))
        Graded(FNC(top_k=2))
    """

    paper: ClassVar[str] = "weighted attraction of any detector's kin"

    @torch.no_grad()
    def find(self, block: Block) -> Found:
        found = self.detector.find(block)
        return Found(tuple(graded(roles, block.sim_RC) for roles in joined(found.levels)), found.update)


def joined(levels: Sequence[Roles]) -> tuple[Roles, ...]:
    """Levels that differ in their keys alone as one, whose keys they are; others as they are."""
    keys = [roles.kin for roles in levels]
    if (
        len(levels) == 1
        or any(not isinstance(each, Keys) or each.apart for each in keys)
        or any(roles.drop is not None for roles in levels)
    ):
        return tuple(levels)
    rows = torch.cat([each.key_LR if each.level is None else each.key_LR[[each.level]] for each in keys if isinstance(each, Keys)])
    columns = torch.cat([each.key_LC if each.level is None else each.key_LC[[each.level]] for each in keys if isinstance(each, Keys)])
    confidence = tuple(one for each in keys if isinstance(each, Keys) for one in each.confidence)
    return (Roles(kin=Keys(rows, columns, confidence=confidence if len(confidence) == len(rows) else ())),)


def graded(roles: Roles, sim_RC: Tensor) -> Roles:
    """The same kin with degrees, where something is known to make them of."""
    kin = roles.kin
    if isinstance(kin, Interval) and kin.lower_R is not None and kin.gradable:
        lower_b = kin.lower_R.to(sim_RC.dtype).nan_to_num(nan=1.0).clamp(-1, 1)  # NaN: of a sample without negatives
        lower_R1 = lower_b.repeat_interleave(len(sim_RC) // len(lower_b)).unsqueeze(1)  # of rows, or of samples
        mask_RC = kin.mask(sim_RC)
        if kin.degrees_from is not None:  # the bound is that of the last kin, which would have the degree 0
            lower_R1 = torch.where(mask_RC > 0, LEFT_OUT, sim_RC).amax(1, keepdim=True).clamp(min=kin.degrees_from)
        width_R1 = (1 - lower_R1).clamp(min=torch.finfo(sim_RC.dtype).eps)
        return replace(roles, kin=Mask(mask_RC, ((sim_RC - lower_R1) / width_R1).clamp(0, 1)))
    if isinstance(kin, Keys) and kin.level is None and not kin.apart and (len(kin.key_LR) > 1 or kin.confidence):
        return replace(roles, kin=replace(kin, graded=True))
    if isinstance(kin, Places) and kin.degree_P is not None:
        return replace(roles, kin=replace(kin, graded=True))
    return roles
