"""What is done about kin: eliminate (out of the denominator), attract (also a positive), reweight (a factor in the denominator)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Action = Literal["eliminate", "attract", "reweight"]
ACTIONS: tuple[Action, ...] = get_args(Action)


@dataclass(frozen=True)
class Policy:
    """What is done about kin.

    `min_negatives` of each anchor (the least similar ones) are kept however many are kin, so that no row loses them all. What a detector
    drops for another reason is its own affair.
    `attracted_stay`: whether attracted kin stay in the denominator (InfoNCE, SupCon) or leave it (SogCLR).
    `pools_kin`: whether attracted kin are summed inside the logarithm (Local Aggregation).
    `hardness`: β, by which similar negatives weigh more in the denominator (`kinship.hardened`).
    """

    action: Action
    kin_weight: float
    min_negatives: int
    attracted_stay: bool
    pools_kin: bool = False
    hardness: float = 0.0

    def removes(self, graded: bool) -> bool:
        """Whether kin leave the denominator altogether. `graded`: whether they have degrees, by which they then leave it with "reweight",
        and with "attract" where attracted kin do not stay."""
        if self.action == "reweight":
            return self.kin_weight == 0 and not graded
        return self.action == "eliminate" or not (self.attracted_stay or graded)

    def removes_by_degrees(self, graded: bool) -> bool:
        """Whether kin leave the denominator by their degrees, so that those with the degree 1 leave it altogether."""
        return graded and (self.action == "reweight" or (self.action == "attract" and not self.attracted_stay))
