"""State per sample, and what all stores share. A step whose loss is not finite changes nothing; the
host waits for nothing.

Dimension key: N data set, D embedding, F fields, b rows of a write, V views.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kinfolk.errors import require, require_at_least
from kinfolk.seeding import step_generator

COARSE = (torch.bfloat16, torch.float16)


class OnHost(nn.Module):
    """A module with buffers that stay on the CPU, because the host reads them in every step."""

    on_host: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OnHost:
        held = {name: self._buffers[name] for name in self.on_host}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._buffers.update(held)
        return self


class Exact(OnHost, ABC):
    """Abstract. A module whose buffers are never cast to 16 bits, and loaded only if they have the
    size that `sizes_of` returns."""

    advice = "use the same data set and settings"

    def sizes_of(self) -> Mapping[str, Mapping[str, int]]:
        """Leading dimensions of buffers, by the names of the arguments that set them."""
        return {}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        for name, sizes in self.sizes_of().items():
            key = prefix + name
            if size_differs(key, state_dict.get(key), others[-1], self.advice, **sizes):
                return
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Exact:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, field in list(self.named_buffers(recurse=False)):
            if field.dtype in COARSE:
                setattr(self, name, before[name].to(field.device))
        return self


class StepRandom(OnHost, ABC):
    """Abstract. Random numbers by a seed and the number of the step, the same after a resume and on
    all ranks."""

    on_host = ("count", "seed")
    count: Tensor
    seed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("seed", torch.randint(1 << 62, ()))

    def generator(self) -> torch.Generator:
        return step_generator(int(self.seed), int(self.count))

    def advance(self, is_finite: Tensor | None = None) -> None:
        """Moves to the next step, unless this one is known to be broken."""
        if not is_broken(is_finite):
            self.count += 1


def check_num_samples(num_samples: object) -> None:
    if isinstance(num_samples, bool) or not isinstance(num_samples, Integral):
        raise TypeError(f"`num_samples` (={num_samples!r}) must be an int")
    require_at_least(1, num_samples=int(num_samples))


def check_ids(ids: Tensor, num_samples: int, why: str = "`num_samples` is too small") -> None:
    """Refuses ids outside of [0, N). An accelerator does that itself."""
    if len(ids) and ids.device.type == "cpu":
        low, high = (int(x) for x in ids.aminmax())
        must = f"in [0, {num_samples}): {why}"
        require(0 <= low <= high < num_samples, "ids", low if low < 0 else high, must)


def refuse_recomputation(name: str) -> None:
    """Refuses to write state in a backward pass, where gradient checkpointing repeats a forward
    pass that would read other state."""
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f"{name} is called again in a backward pass, as by torch.utils.checkpoint, but its"
            " state has changed since the first call: call the loss outside of the checkpoint,"
            " which can hold the encoder alone"
        )


def size_differs(
    key: str, saved: Tensor | None, error_msgs: list[str], advice: str, **sizes: int
) -> bool:
    """Whether a tensor to be loaded has other leading dimensions than `sizes` (argument = size);
    `error_msgs` then says so."""
    if saved is None or saved.shape[: len(sizes)] == tuple(sizes.values()):
        return False
    got = " × ".join(map(str, saved.shape[: len(sizes)] or (1,)))
    names = " × ".join(f"`{name}`" for name in sizes)
    expected = " × ".join(map(str, sizes.values()))
    error_msgs.append(f"`{key}` has the size {got}, but {names} is {expected}: {advice}")
    return True


def finite(loss: Tensor) -> Tensor:
    """Whether a loss is finite, on its device."""
    return (loss.detach() - loss.detach()) == 0  # two launches, where `isfinite` has four


def is_broken(is_finite: Tensor | None) -> bool:
    """Whether a step is known to be broken; on an accelerator see `unless_broken`."""
    return is_finite is not None and is_finite.device.type == "cpu" and not bool(is_finite)


def unless_broken(is_finite: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """The new values, or of a broken step on an accelerator the old ones."""
    if is_finite is None or is_finite.device.type == "cpu":
        return new
    return torch.where(is_finite, new, old)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor on the host, without a wait."""
    pins = device.type == "cuda" and torch.cuda.is_available()  # other copies may wait
    return (tensor.pin_memory() if pins else tensor).to(device, non_blocking=True)


def means_by_id(ids: Tensor, rows: Tensor) -> Tensor:
    """(b, F) the mean of the rows that share each row's id."""
    sorted_b = ids.sort().values
    if ids.device.type == "cpu" and not bool((sorted_b[1:] == sorted_b[:-1]).any()):
        return rows  # the common case; on an accelerator the check would stop the step
    group_bF = torch.searchsorted(sorted_b, ids).unsqueeze(1).expand_as(rows)
    mean_bF = torch.empty_like(rows)
    mean_bF.scatter_reduce_(0, group_bF, rows, "mean", include_self=False)
    return mean_bF.gather(0, group_bF)


class PerSample(Exact):
    """One number per sample and field (name = initial value), in one tensor of which each field is
    a column. Fields are attributes (views) and entries of `state_dict()`.

    Example:
        >>> store = PerSample(3, threshold=1.0)
        >>> store.write(torch.tensor([1, 1]), {"threshold": torch.tensor([0.2, 0.4])})
        >>> [round(x, 3) for x in store.threshold.tolist()]
        [1.0, 0.3, 1.0]
    """

    rows: Tensor

    def __init__(self, num_samples: int, **fields: float) -> None:
        super().__init__()
        check_num_samples(num_samples)
        self.num_samples, self.fields = num_samples, tuple(fields)
        first = torch.tensor([float(value) for value in fields.values()])
        self.register_buffer("rows", first.repeat(num_samples, 1), persistent=False)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("fields", ()):
            return self.rows[:, self.fields.index(name)]
        return super().__getattr__(name)

    def write(
        self, ids: Tensor, values: Mapping[str, Tensor], is_finite: Tensor | None = None
    ) -> None:
        """See `write_rows`."""
        check_ids(ids, self.num_samples)
        rows_bF = self.rows[ids]
        for name, value_b in values.items():
            rows_bF[:, self.fields.index(name)] = value_b.to(rows_bF.dtype)
        self.write_rows(ids, rows_bF, is_finite)

    def write_rows(self, ids: Tensor, values_bF: Tensor, is_finite: Tensor | None = None) -> None:
        """Sets all fields of the samples `ids`: of several rows of one id the mean; the old value
        where one is NaN; nothing if the loss is not `is_finite`."""
        check_ids(ids, self.num_samples)
        if is_broken(is_finite):
            return
        valid_bF = values_bF == values_bF  # NaN is not equal to itself
        if is_finite is not None and is_finite.device.type != "cpu":
            valid_bF = valid_bF & is_finite
        values_bF = torch.where(valid_bF, values_bF.to(self.rows.dtype), self.rows[ids])
        self.rows[ids] = means_by_id(ids, values_bF)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Views of the columns: a second copy of the state might not fit."""
        destination.update((prefix + name, getattr(self, name)) for name in self.fields)

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
        for name in self.fields:
            key = prefix + name
            saved = state_dict.get(key)
            if saved is None:
                missing.append(key)
            elif size_differs(key, saved, rest[-1], self.advice, num_samples=self.num_samples):
                return
            else:
                getattr(self, name).copy_(saved)
        if strict:
            others = (key for key in state_dict if key.startswith(prefix))
            unexpected += [key for key in others if key[len(prefix) :] not in self.fields]


class Collected(Exact):
    """The mean over views of each sample's embedding as it was last computed. State: `features` (N,
    D), 0 before a sample is seen; `seen` (N,).

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
    def write(self, ids: Tensor, anchors: Tensor, is_finite: Tensor | None = None) -> None:
        """Keeps the mean of the (b·V, D) `anchors`, sample-major, of each of `ids` (b,)."""
        check_ids(ids, self.num_samples)
        if not len(ids) or is_broken(is_finite):
            return
        mean_bD = anchors.view(len(ids), -1, anchors.shape[-1]).mean(1)
        if not self.features.shape[1]:
            shape = self.num_samples, mean_bD.shape[1]
            self.features = mean_bD.new_zeros(shape, dtype=torch.float32)
        new_bD = means_by_id(ids, mean_bD.to(self.features.dtype))
        self.features[ids] = unless_broken(is_finite, new_bD, self.features[ids])
        self.seen[ids] = True if is_finite is None else self.seen[ids] | is_finite

    def sizes_of(self) -> Mapping[str, Mapping[str, int]]:
        return {"features": {"num_samples": self.num_samples}}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        saved = state_dict.get(f"{prefix}features")
        if saved is not None and len(saved) == self.num_samples:  # of any size of a feature
            self.features = self.features.new_zeros(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *others)
