"""State per sample, addressed by id: persistent, strict on loading, one rule for duplicates.

Dimension key: N data set, b rows of a write, F fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kinfolk.stores.exact import Exact, check_ids, kept, means_by_id, skips


class PerSample(Exact):
    """One value per sample and field, as buffers of the module, so that `state_dict()` holds them all.

    Args:
        num_samples: N; ids are in [0, N).
        fields: name = initial value (a number, a bool or a 0-d tensor); its dtype is the field's.

    Example:
        >>> store = PerSample(3, threshold=1.0)
        >>> store.write(torch.tensor([1, 1]), {"threshold": torch.tensor([0.2, 0.4])})
        >>> [round(x, 3) for x in store.threshold.tolist()]
        [1.0, 0.3, 1.0]
    """

    def __init__(self, num_samples: int, **fields: Tensor | float) -> None:
        super().__init__()
        if num_samples < 1:
            raise ValueError(f"`num_samples` (={num_samples}) must be at least 1")
        self.num_samples = num_samples
        for name, initial in fields.items():
            self.register_buffer(name, torch.as_tensor(initial).detach().clone().repeat(num_samples))

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    def read(self, ids: Tensor) -> dict[str, Tensor]:
        """The rows of all fields at `ids` (b,)."""
        check_ids(ids, self.num_samples)
        return {name: field[ids] for name, field in self.named_buffers()}

    def write(self, ids: Tensor, values: Mapping[str, Tensor], sound: Tensor | None = None) -> None:
        """Sets rows; several rows of one id are stored as their mean (bools: any; integers: the rounded mean).

        The order of the rows does not matter, not even in the last bit. `sound`: whether the step was; see `kept`.
        """
        check_ids(ids, self.num_samples)
        if skips(sound):
            return
        mean_bF = means_by_id(ids, torch.stack([rows.to(torch.float64) for rows in values.values()], 1))
        for name, mean_b in zip(values, mean_bF.unbind(1), strict=True):
            field = getattr(self, name)
            new_b = mean_b > 0 if field.dtype == torch.bool else mean_b if field.is_floating_point() else mean_b.round()
            field[ids] = kept(sound, new_b.to(field.dtype), field[ids])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        error_msgs: list[str] = others[-1]
        for name, _ in self.named_buffers():
            saved = state_dict.get(prefix + name)
            if saved is not None and len(saved) != self.num_samples:
                error_msgs.append(
                    f"`{prefix}{name}` holds {len(saved)} samples, but `num_samples` is {self.num_samples}: use the same data set"
                )
                return
        super()._load_from_state_dict(state_dict, prefix, *others)
