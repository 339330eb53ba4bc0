"""The union of detectors: kin of any of them.

Bulat et al., FFF: Fixing Flawed Foundations in contrastive pre-training, CVPR 2024, section 3.2
(image–image, text–text and image–text similarity each find some of the false negatives).

Dimension key: R rows of a block, C candidates, b samples of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kinfolk.detectors.base import Answer, Detector
from kinfolk.pairs import Block, Kin


class Union(Detector):
    """Kin are the candidates that any of several detectors finds.

        degree = maximum over the detectors; kin without degrees have 1

    A candidate that one detector ignores and none finds is ignored. Each detector keeps its own
    state, warm-up and refresh. Of detectors with several levels, level k is united with level k of
    the others, or with their last one.

    Args:
        detectors: at least one. Those that look samples up must agree in the number of samples,
            those that cluster features in the features (`space`).

    Example:
        >>> import torch, kinfolk as kf
        >>> kf.Union(kf.FNC(top_k=1), kf.Oracle(torch.tensor([0, 1, 0])))
        Union(FNC(top_k=1), Oracle(<Tensor (3,)>))
    """

    paper: ClassVar[str] = "Bulat et al., CVPR 2024"

    def __init__(self, *detectors: Detector) -> None:
        super().__init__()
        if not detectors or not all(isinstance(each, Detector) for each in detectors):
            example = "kf.Union(kf.FNC(top_k=3), kf.PositiveMargin())"
            raise TypeError(f"`detectors` (={detectors!r}) must be detectors, such as {example}")
        self.detectors = nn.ModuleList(detectors)
        self.num_samples = self._agree("num_samples", self.members)
        self.guide = self._agree("guide", self.members)
        self.own_weight = self._agree("own_weight", self.members)
        refreshed = [each for each in self.members if _refreshes(each)]
        self.space = self._agree("space", refreshed) or "projected"
        self.soft = any(each.soft for each in self.members)
        self.needed_metrics = frozenset().union(*(each.needed_metrics for each in self.members))
        if len({each.collects for each in refreshed}) > 1:
            raise ValueError(
                "detectors that collect their features (`source` 'bank') cannot be united with"
                " those that receive them: set the same `source` for all of them"
            )

    @property
    def members(self) -> tuple[Detector, ...]:
        """The united detectors."""
        return tuple(each for each in self.detectors if isinstance(each, Detector))

    @staticmethod
    def _agree(name: str, detectors: Iterable[Detector]) -> Any:
        """The one value of an attribute that detectors have, or None."""
        values = {getattr(each, name) for each in detectors} - {None}
        if len(values) > 1:
            shown = ", ".join(sorted(map(repr, values)))
            raise ValueError(f"`{name}` of united detectors (={shown}) must be the same")
        return next(iter(values), None)

    @property
    def collects(self) -> bool:  # type: ignore[override]
        return any(each.collects for each in self.members)

    @property
    def refreshed_at_end(self) -> bool:  # type: ignore[override]
        return any(each.refreshed_at_end for each in self.members)

    def prepare(self, ids_C: Tensor, candidates_CD: Tensor, guide_CG: Tensor | None) -> Any:
        return tuple(each.prepare(ids_C, candidates_CD, guide_CG) for each in self.members)

    def find(self, block: Block) -> Answer:
        prepared = block.prepared or (None,) * len(self.members)
        found: list[tuple[Kin, ...]] = []  # a call of `list[…]` would break a compiled graph
        for number, (each, own) in enumerate(zip(self.members, prepared, strict=True)):
            answer = each.find(replace(block, prepared=own))
            levels = answer if isinstance(answer, tuple) else (answer,)
            found.append(tuple(_in_namespace(kin, number) for kin in levels))
        number = max(map(len, found))
        united = tuple(unite([kin[min(k, len(kin) - 1)] for kin in found]) for k in range(number))
        return united if number > 1 else united[0]

    def observe(
        self, ids: Tensor, update: Mapping[str, Tensor], is_finite: Tensor | None = None
    ) -> None:
        for number, each in enumerate(self.members):
            start = f"{number}."
            mine = {
                k.removeprefix(start): rows for k, rows in update.items() if k.startswith(start)
            }
            if mine:
                each.observe(ids, mine, is_finite)

    def due(self, epoch: int) -> bool:
        return any(each.due(epoch) for each in self.members)

    def refresh(self, features: Tensor | None, progress: float) -> None:
        """Refreshes the detectors that are due in the epoch of `set_progress`; at the end (progress
        1) those that want it."""
        for each in self.members:
            if each.refreshed_at_end if progress >= 1 else each.due(self.epoch):
                each.refresh(features, progress)

    def collect(self, ids: Tensor, anchors: Tensor, is_finite: Tensor | None = None) -> None:
        for each in self.members:
            if each.collects:
                each.collect(ids, anchors, is_finite)

    def on_metric(self, name: str, value: float) -> None:
        for each in self.members:
            if name in each.needed_metrics:
                each.on_metric(name, value)

    @property
    def metrics(self) -> dict[str, float]:
        """Those of all detectors; a name that several have is followed by the detector's number."""
        found: dict[str, float] = {}
        for number, each in enumerate(self.members):
            for name, value in each.metrics.items():
                found[f"{name}_{number}" if name in found else name] = value
        return found

    def silent_reason(self, first_epoch: int = 0) -> str | None:
        reasons = [each.silent_reason(first_epoch) for each in self.members]
        return None if None in reasons else reasons[0]

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        for each in self.members:
            each.set_progress(epoch, num_epochs)

    def set_loss_temperature(self, temperature: float) -> None:
        for each in self.members:
            each.set_loss_temperature(temperature)


def unite(found: Iterable[Kin]) -> Kin:
    """One answer from several: kin of any, with the highest degree; ignored where none finds
    kin."""
    degree_RC: Tensor | None = None
    ignore_RC: Tensor | None = None
    update: dict[str, Tensor] = {}
    for kin in found:
        update |= kin.update
        one_RC = kin.degree
        if one_RC is not None and kin.ignore is not None:
            one_RC = one_RC * ~kin.ignore if one_RC.is_floating_point() else one_RC & ~kin.ignore
        degree_RC = _highest(degree_RC, one_RC)
        if kin.ignore is not None:
            ignore_RC = kin.ignore if ignore_RC is None else ignore_RC | kin.ignore
    if ignore_RC is not None and degree_RC is not None:
        ignore_RC = ignore_RC & (degree_RC == 0)
    return Kin(degree_RC, ignore_RC, update)


def _highest(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    if one.is_floating_point() or other.is_floating_point():
        dtype = one.dtype if one.is_floating_point() else other.dtype
        return torch.maximum(one.to(dtype), other.to(dtype))
    return one | other


def _in_namespace(kin: Kin, number: int) -> Kin:
    return replace(kin, update={f"{number}.{name}": rows for name, rows in kin.update.items()})


def _refreshes(detector: Detector) -> bool:
    inner = detector.inner
    return isinstance(inner, Union) or type(inner).refresh is not Detector.refresh
