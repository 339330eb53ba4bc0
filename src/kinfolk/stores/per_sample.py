"""What all stores share: a cast to 16 bits, meant for weights, leaves them as exact as they are; ids in range; one rule for duplicates; and
a step whose loss is not finite changes nothing. Nothing here waits for an accelerator.

Dimension key: N data set, D embedding, F fields, b rows of a write.

State per sample, addressed by id: persistent, strict on loading, one rule for duplicates.

Dimension key: N data set, b rows of a write, F fields.

The embeddings that the training computes anyway, kept until all samples are looked at once.

Dimension key: N data set, D embedding, b samples of a write, V views.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

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
    """(b, F) the mean of the rows of each row's id. The order of rows does not matter, not even in the last bit."""
    group_b, number_b1 = grouped(ids)
    sorted_bF, order_bF = rows.sort(0)
    total_bF = torch.zeros_like(rows).scatter_add_(0, group_b[order_bF], sorted_bF)
    return total_bF[group_b] / number_b1


def grouped(ids: Tensor) -> tuple[Tensor, Tensor]:
    """(b,) a number in [0, b) for each row, the same for rows of one id, and (b, 1) how many these are."""
    sorted_b = ids.sort().values
    group_b = torch.searchsorted(sorted_b, ids)
    return group_b, (torch.searchsorted(sorted_b, ids, right=True) - group_b).unsqueeze(1)


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


class Collected(Exact):
    """The mean over views of each sample's embedding as it was last computed; D is known from the first write on.

    Args:
        num_samples: N; ids are in [0, N).

    State: `features` (N, D), zero for a sample that was not seen; `seen` (N,).

    Example:
        >>> store = Collected(3)
        >>> store.write(torch.tensor([2]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> store.features.tolist()
        [[0.0, 0.0], [0.0, 0.0], [0.5, 0.5]]
    """

    features: Tensor
    seen: Tensor

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self.num_samples = num_samples
        self.register_buffer("features", torch.zeros(num_samples, 0))
        self.register_buffer("seen", torch.zeros(num_samples, dtype=torch.bool))

    @torch.no_grad()
    def write(self, ids: Tensor, anchors: Tensor, sound: Tensor | None = None) -> None:
        """Keeps the mean of the (b·V, D) `anchors`, sample-major, of each of `ids` (b,); of a sample that is there twice, the mean.

        `sound`: whether the step was; see `kept`."""
        check_ids(ids, self.num_samples)
        if not len(ids) or skips(sound):
            return
        mean_bD = anchors.view(len(ids), -1, anchors.shape[-1]).mean(1)
        if not self.features.shape[1]:
            self.features = mean_bD.new_zeros(self.num_samples, mean_bD.shape[1], dtype=torch.float32)
        self.features[ids] = kept(sound, means_by_id(ids, mean_bD.to(self.features.dtype)), self.features[ids])
        self.seen[ids] = True if sound is None else self.seen[ids] | sound

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        saved = state_dict.get(f"{prefix}features")
        if saved is not None and len(saved) != self.num_samples:
            error_msgs: list[str] = others[-1]
            error_msgs.append(
                f"`{prefix}features` holds {len(saved)} samples, but `num_samples` is {self.num_samples}: use the same data set"
            )
            return
        if saved is not None and saved.shape != self.features.shape:
            self.features = self.features.new_zeros(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *others)
