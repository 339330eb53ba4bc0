"""The thresholds of the samples: learned ones beside the exact quantiles, and beside what FNC goes by in a batch.

GloFND paper, Figure 3a; for rings both of their bounds.

Dimension key: M samples that are compared, R rows of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kinfolk.data.seeding import generator
from kinfolk.detectors import FNC, Detector, GloFND, Ring, StartAt
from kinfolk.detectors.thresholds import batch_quantile
from kinfolk.report.plots import Panel, figure, outlines

if TYPE_CHECKING:
    from kinfolk.report.kin import Compared


@dataclass(frozen=True)
class Bound:
    """A similarity that a share of an anchor's negatives lies above; (M,) as it was learned, where it was."""

    name: str
    above: float
    learned: Tensor | None


def bounds_of(compared: Compared) -> list[Bound]:
    """The bounds that the detector goes by; empty for one without any."""
    detector: Detector | None = compared.detector
    while isinstance(detector, StartAt):
        detector = detector.detector
    if isinstance(detector, GloFND) and detector.alpha > 0 and detector.alphas is None:
        return [Bound("threshold", detector.alpha, detector.thresholds[compared.ids])]
    if isinstance(detector, FNC) and detector.fraction is not None:
        return [Bound("threshold", detector.fraction, None)]
    if isinstance(detector, Ring):
        shares = {name: share for name, share in (("lower", detector.lower), ("upper", detector.upper)) if 0 < share < 1}
        state = {} if detector.boundaries is None else detector.boundaries.store.read(compared.ids)
        return [Bound(name, 1 - share, state.get(f"{name}_level")) for name, share in shares.items()]
    return []


def level_panels(compared: Compared, batch_size: int, seed: int) -> list[Panel]:
    """One panel: the distribution of each bound. Empty where the detector has none, or there are too few samples to tell."""
    bounds = bounds_of(compared)
    if not bounds or len(compared.ids) < 3:
        return []
    exact = exact_levels(compared, bounds)
    if bounds[0].name == "threshold":
        return [_thresholds(bounds[0], exact[0], batch_levels(compared, bounds[0].above, batch_size, seed), batch_size)]
    colours = {"lower": "accent", "upper": "second"}
    groups = [(f"{bound.name}, exact", level_M, colours[bound.name], "solid") for bound, level_M in zip(bounds, exact, strict=True)]
    learned = [(bound.name, bound.learned) for bound in bounds if bound.learned is not None and bool(bound.learned.isfinite().any())]
    groups += [(f"{name}, learned", level_M[level_M.isfinite()], colours[name], "dot") for name, level_M in learned]
    shares = " and ".join(f"{1 - bound.above:.4g}" for bound in bounds)
    note = f"similarities at the shares {shares} of each sample's negatives"
    return [Panel("levels", "Ring", note, _medians(groups), figure(outlines(groups), "similarity", share=True))]


def exact_levels(compared: Compared, bounds: list[Bound]) -> list[Tensor]:
    """(M,) for each bound: the quantile over all the other samples."""
    levels: list[list[Tensor]] = [[] for _ in bounds]
    number = len(compared.ids) - 1
    for _, sim_RM, _ in compared.blocks():
        n_R = torch.full((len(sim_RM),), number)
        for found, bound in zip(levels, bounds, strict=True):
            found.append(batch_quantile(sim_RM, n_R, bound.above))
    return [torch.cat(found) for found in levels]


def batch_levels(compared: Compared, alpha: float, batch_size: int, seed: int) -> Tensor:
    """(M,) the similarity of the last that FNC flags, in batches drawn at random."""
    order = torch.randperm(len(compared.ids), generator=generator(seed, "batches"))
    levels = torch.empty(len(order))
    for batch in order.tensor_split(max(1, len(order) // batch_size)):
        sim = (compared.embedding[batch] @ compared.embedding[batch].T).fill_diagonal_(-torch.inf)
        number = max(1, round(alpha * (len(batch) - 1)))
        levels[batch] = sim.topk(number, dim=1).values[:, -1]
    return levels


def _thresholds(bound: Bound, exact_M: Tensor, batch_M: Tensor, batch_size: int) -> Panel:
    groups = [] if bound.learned is None else [("learned", bound.learned, "accent", "solid")]
    groups += [("exact", exact_M, "second", "solid"), ("FNC", batch_M, "third", "dot")]
    described = _medians(groups)
    for name, level_M, *_ in groups:
        if name != "exact":
            described += f"; {name} differ from the exact ones by {(level_M - exact_M).abs().mean():.3f} on average"
    note = f"with {bound.above:.4g} above: exact over {len(exact_M):,} samples, FNC in batches of {batch_size:,}"
    return Panel("levels", "Thresholds of the samples", note, described, figure(outlines(groups), "similarity", share=True))


def _medians(groups: list[tuple[str, Tensor, str, str]]) -> str:
    return "Medians: " + ", ".join(f"{name} {level_M.median():.3f}" for name, level_M, *_ in groups)
