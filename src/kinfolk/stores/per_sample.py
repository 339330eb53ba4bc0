"""State per sample, addressed by id: persistent, strict on loading, one rule for duplicates.

Dimension key: N data set, b rows of a write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class PerSample(nn.Module):
    """One value per sample and field, as buffers of the module, so that `state_dict()` holds them all.

    Args:
        num_samples: N; ids are in [0, N).
        fields: name = 0-d tensor, the initial value; its dtype is the field's.

    Example:
        >>> store = PerSample(3, threshold=torch.tensor(1.0))
        >>> store.write(torch.tensor([1, 1]), {"threshold": torch.tensor([0.2, 0.4])})
        >>> [round(x, 3) for x in store.threshold.tolist()]
        [1.0, 0.3, 1.0]
    """

    def __init__(self, num_samples: int, **fields: Tensor) -> None:
        super().__init__()
        if num_samples < 1:
            raise ValueError(f"`num_samples` (={num_samples}) must be at least 1")
        self.num_samples = num_samples
        for name, initial in fields.items():
            self.register_buffer(name, initial.detach().clone().repeat(num_samples))

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    def read(self, ids: Tensor) -> dict[str, Tensor]:
        """The rows of all fields at `ids` (b,)."""
        self._check(ids)
        return {name: field[ids] for name, field in self.named_buffers()}

    def write(self, ids: Tensor, values: Mapping[str, Tensor]) -> None:
        """Sets rows; several rows of one id are stored as their mean (bools: any; integers: the rounded mean)."""
        self._check(ids)
        unique, inverse, count = torch.unique(ids, return_inverse=True, return_counts=True)
        for name, rows in values.items():
            field = getattr(self, name)
            wide = rows.to(torch.float64)
            total = wide.new_zeros(len(unique)).index_add_(0, inverse, wide)
            mean = total / count
            field[unique] = total > 0 if field.dtype == torch.bool else (mean if field.is_floating_point() else mean.round()).to(field.dtype)

    def _check(self, ids: Tensor) -> None:
        if len(ids) and ids.device.type == "cpu":
            low, high = (int(x) for x in ids.aminmax())
            if low < 0 or high >= self.num_samples:
                raise ValueError(f"`ids` (={low if low < 0 else high}) must be in [0, {self.num_samples})")
