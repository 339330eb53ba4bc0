"""State per sample, addressed by id: persistent, strict on loading, one rule for duplicates.

Dimension key: N data set, b rows of a write, F fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kinfolk.stores.exact import Exact, check_ids, means_by_id, skips


class PerSample(Exact):
    """One number per sample and field. All fields are columns of one tensor, so that a step reads and writes them with one operation each.

    `state_dict()` holds every field by its name. A field is also an attribute: a view of its column.

    Args:
        num_samples: N; ids are in [0, N).
        fields: name = initial value.

    Example:
        >>> store = PerSample(3, threshold=1.0)
        >>> store.write(torch.tensor([1, 1]), {"threshold": torch.tensor([0.2, 0.4])})
        >>> [round(x, 3) for x in store.threshold.tolist()]
        [1.0, 0.3, 1.0]
    """

    rows: Tensor

    def __init__(self, num_samples: int, **fields: float) -> None:
        super().__init__()
        if num_samples < 1:
            raise ValueError(f"`num_samples` (={num_samples}) must be at least 1")
        self.num_samples, self.fields = num_samples, tuple(fields)
        first = torch.tensor([float(value) for value in fields.values()])
        self.register_buffer("rows", first.repeat(num_samples, 1), persistent=False)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("fields", ()):
            return self.rows[:, self.fields.index(name)]
        return super().__getattr__(name)

    def read(self, ids: Tensor) -> dict[str, Tensor]:
        """The fields of the samples `ids`, (b,) each."""
        return dict(zip(self.fields, self.read_rows(ids).unbind(1), strict=True))

    def read_rows(self, ids: Tensor) -> Tensor:
        """(b, F) all fields of the samples `ids`."""
        check_ids(ids, self.num_samples)
        return self.rows[ids]

    def write(self, ids: Tensor, values: Mapping[str, Tensor], sound: Tensor | None = None) -> None:
        """Sets fields of the samples `ids`; other fields stay as they are. See `write_rows`."""
        check_ids(ids, self.num_samples)
        if set(values) == set(self.fields):
            columns = [values[name] for name in self.fields]
        else:
            before = self.read(ids)
            columns = [values.get(name, before[name]) for name in self.fields]
        self.write_rows(ids, torch.stack([column.to(self.rows.dtype) for column in columns], 1), sound)

    def write_rows(self, ids: Tensor, values_bF: Tensor, sound: Tensor | None = None) -> None:
        """Sets all fields of the samples `ids`. Several rows of one id are stored as their mean; where a value is NaN, the old one stays.

        `sound`: whether the step is sound; if not, nothing is written (see `stores.exact.skips`)."""
        check_ids(ids, self.num_samples)
        if skips(sound):
            return
        valid_bF = values_bF == values_bF  # NaN is not equal to itself
        if sound is not None and sound.device.type != "cpu":
            valid_bF = valid_bF & sound
        values_bF = torch.where(valid_bF, values_bF.to(self.rows.dtype), self.rows[ids])
        self.rows[ids] = means_by_id(ids, values_bF)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, column in zip(self.fields, self.rows.unbind(1), strict=True):
            destination[prefix + name] = column.clone()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        *rest: Any,
    ) -> None:
        error_msgs: list[str] = rest[-1]
        for name in self.fields:
            saved = state_dict.get(prefix + name)
            if saved is None:
                missing.append(prefix + name)
            elif len(saved) != self.num_samples:
                error_msgs.append(
                    f"`{prefix}{name}` holds {len(saved)} samples, but `num_samples` is {self.num_samples}: use the same data set"
                )
                return
            else:
                getattr(self, name).copy_(saved)
        if strict:
            unexpected += [key for key in state_dict if key.startswith(prefix) and key[len(prefix) :] not in self.fields]
