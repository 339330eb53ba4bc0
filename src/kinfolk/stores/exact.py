"""What all stores share: a cast to 16 bits, meant for weights, leaves them as exact as they are; ids in range; one rule for duplicates; and
a step whose loss is not finite changes nothing. Nothing here waits for an accelerator.

Dimension key: N data set, D embedding, F fields, b rows of a write.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

COARSE = (torch.bfloat16, torch.float16)


class OnHost(nn.Module):
    """A module some of whose buffers stay on the CPU wherever it moves: numbers that the host goes by in every step."""

    on_host: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OnHost:
        held = {name: self._buffers[name] for name in self.on_host}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._buffers.update(held)
        return self


class Exact(OnHost, ABC):
    """Abstract. A module whose own buffers move to another device as any module's, but are never cast to 16 bits."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Exact:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, field in list(self.named_buffers(recurse=False)):
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


def finite(loss: Tensor) -> Tensor:
    """Whether a loss is, without dimensions and on its device: what the `sound` of a write is made of."""
    return (loss.detach() - loss.detach()) == 0  # two launches, where `isfinite` has four


def skips(sound: Tensor | None) -> bool:
    """Whether a step is known to be broken. On a CPU it is known; on an accelerator asking would stop the step, so there the write itself
    keeps what was there (`kept`)."""
    return sound is not None and sound.device.type == "cpu" and not bool(sound)


def kept(sound: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """The new values, or of a broken step on an accelerator the old ones."""
    return new if sound is None or sound.device.type == "cpu" else torch.where(sound, new, old)


def means_by_id(ids: Tensor, rows: Tensor) -> Tensor:
    """(b, F) the mean of the rows that share each row's id."""
    sorted_b = ids.sort().values
    if ids.device.type == "cpu" and not bool((sorted_b[1:] == sorted_b[:-1]).any()):
        return rows  # the usual case; on an accelerator looking would stop the step
    group_bF = torch.searchsorted(sorted_b, ids).unsqueeze(1).expand_as(rows)
    return torch.empty_like(rows).scatter_reduce_(0, group_bF, rows, "mean", include_self=False).gather(0, group_bF)
