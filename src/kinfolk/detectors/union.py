"""The union of detectors: kin of any of them.

Bulat et al., FFF: Fixing Flawed Foundations in contrastive pre-training, CVPR 2024, section 3.2
(image–image, text–text and image–text similarity each find some of the false negatives).

Dimension key: R rows of a block, C candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kinfolk.detectors.base import Detector, require_detector
from kinfolk.pairs import Block, Kin, check_answer


class Union(Detector):
    """Kin are the candidates that any of several detectors finds.

        degree = maximum over the detectors; kin without degrees have 1

    A candidate that one detector ignores and none finds is ignored. Each detector keeps its state,
    warm-up and refresh. Level k is united with level k of the others, or with their last one.

    Args:
        detectors: at least one. Those that look samples up must agree in the number of samples,
            those that cluster features in the features (`space`).

    Example:
        >>> import torch, kinfolk as kf
        >>> kf.Union(kf.FNC(top_k=1), kf.Oracle(torch.tensor([0, 1, 0])))
        Union(FNC(top_k=1), Oracle(<Tensor (3,)>))
    """

    paper: ClassVar[str] = "Bulat et al., CVPR 2024"
    refreshed: Tensor

    def __init__(self, *detectors: Detector) -> None:
        super().__init__()
        for each in detectors or (None,):
            require_detector(each)
        self.members, self.detectors = detectors, nn.ModuleList(detectors)
        self.register_buffer("refreshed", torch.tensor(-1))  # the last epoch before which it was
        self.num_samples = _agree("num_samples", detectors)
        self.guide, self.own_weight = _agree("guide", detectors), _agree("own_weight", detectors)
        refreshing = [each for each in detectors if _refreshes(each)]
        self.space = _agree("space", refreshing) or "projected"
        self.soft = any(each.soft for each in detectors)
        self.needed_metrics = frozenset().union(*(each.needed_metrics for each in detectors))
        if len({each.collects for each in refreshing}) > 1:
            raise ValueError(
                "detectors that collect their features (`source` 'bank') cannot be united with"
                " those that receive them: set the same `source` for all of them"
            )

    @property
    def collects(self) -> bool:  # type: ignore[override]
        return any(each.collects for each in self.members)

    @property
    def refreshed_at_end(self) -> bool:  # type: ignore[override]
        return any(each.refreshed_at_end for each in self.members)

    def prepare(self, ids_C: Tensor, candidates_CD: Tensor, guide_CG: Tensor | None) -> Any:
        return tuple(each.prepare(ids_C, candidates_CD, guide_CG) for each in self.members)

    def find(self, block: Block) -> tuple[Kin, ...]:
        prepared = block.prepared or (None,) * len(self.members)
        found: list[tuple[Kin, ...]] = []
        update: dict[str, Tensor] = {}
        for number, (each, own) in enumerate(zip(self.members, prepared, strict=True)):
            levels = check_answer(each.find(replace(block, prepared=own)), block)
            for kin in levels:
                update |= {f"{number}.{name}": rows for name, rows in kin.update.items()}
            found.append(levels)
        number = max(map(len, found))
        by_level = ([kin[min(k, len(kin) - 1)] for kin in found] for k in range(number))
        return tuple(replace(_unite(level), update=update) for level in by_level)

    def observe(
        self, ids: Tensor, update: Mapping[str, Tensor], is_finite: Tensor | None = None
    ) -> None:
        for number, each in enumerate(self.members):
            start = f"{number}."
            own = {k.removeprefix(start): x for k, x in update.items() if k.startswith(start)}
            if own:
                each.observe(ids, own, is_finite)

    def due(self, epoch: int) -> bool:
        return any(each.due(epoch) for each in self.members)

    def refresh(self, features: Tensor | None, progress: float) -> None:
        """Refreshes the detectors that are due, or were since the last refresh, which `StartAt`
        delays; at the end (progress 1) those that want it."""
        first = min(int(self.refreshed) + 1, self.epoch)
        for each in self.members:
            is_due = any(map(each.due, range(first, self.epoch + 1)))
            if each.refreshed_at_end if progress >= 1 else is_due:
                each.refresh(features, progress)
        self.refreshed.fill_(self.epoch)

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


def _unite(found: list[Kin]) -> Kin:
    """Kin of any, with the highest degree; ignored where one ignores and none finds kin."""
    degrees = [
        kin.degree if kin.ignore is None else kin.degree * ~kin.ignore
        for kin in found
        if kin.degree is not None
    ]
    ignored = [kin.ignore for kin in found if kin.ignore is not None]
    degree_RC = functools.reduce(torch.maximum, degrees) if degrees else None
    ignore_RC = functools.reduce(torch.logical_or, ignored) if ignored else None
    if degree_RC is not None and ignore_RC is not None:
        ignore_RC = ignore_RC & (degree_RC == 0)
    return Kin(degree_RC, ignore_RC)


def _agree(name: str, detectors: Iterable[Detector]) -> Any:
    """The one value of an attribute that detectors have, or None."""
    values = {getattr(each, name) for each in detectors} - {None}
    if len(values) > 1:
        shown = ", ".join(sorted(map(repr, values)))
        raise ValueError(f"`{name}` of united detectors (={shown}) must be the same")
    return next(iter(values), None)


def _refreshes(detector: Detector) -> bool:
    inner = detector.inner
    if isinstance(inner, Union):
        return any(map(_refreshes, inner.members))
    return type(inner).refresh is not Detector.refresh
