"""What all stores share: a cast to 16 bits, meant for weights, leaves them as exact as they are; ids in range; one rule for duplicates.

Dimension key: N data set, D embedding, b rows of a write, U distinct ids among them.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable

import torch
from torch import Tensor, nn

COARSE = (torch.bfloat16, torch.float16)


class Exact(nn.Module, ABC):
    """Abstract. A module whose buffers move to another device as any module's, but are never cast to 16 bits."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Exact:
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, field in list(self.named_buffers()):
            if field.dtype in COARSE:
                setattr(self, name, before[name].to(field.device))
        return self


def check_ids(ids: Tensor, num_samples: int, why: str = "`num_samples` is too small") -> None:
    """Refuses ids outside of [0, N), where they are on the CPU: on an accelerator looking would stop the step, and an index out of range
    fails there by itself."""
    if len(ids) and ids.device.type == "cpu":
        low, high = (int(x) for x in ids.aminmax())
        if low < 0 or high >= num_samples:
            raise ValueError(f"`ids` (={low if low < 0 else high}) must be in [0, {num_samples}): {why}")


def means_by_id(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(U,) distinct ids and (U, D) the means of their (b, D) rows, summed in the order of the rows: a scattered sum has none on a GPU."""
    unique_U, inverse, count_U = torch.unique(ids, return_inverse=True, return_counts=True)
    if len(unique_U) == len(ids):
        return ids, rows
    order = inverse.argsort(stable=True)
    start_U = count_U.cumsum(0) - count_U
    total_UD = rows[order[start_U]]
    for repeat in range(1, int(count_U.max())):
        more_U = count_U > repeat
        total_UD[more_U] += rows[order[start_U[more_U] + repeat]]
    return unique_U, total_UD / count_U.unsqueeze(1)
