"""DBSCAN (Ester et al., KDD 1996) at several radii, in memory linear in the data set, and radii
fitted by the distance to the k-th neighbour (section 4.2).

Dimension key: N samples, n of them that are measured, D features, R radii, b rows of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.clustering.hierarchy_update import components
from kinfolk.errors import require, require_at_least
from kinfolk.stores.per_sample import Exact

_CPU_ELEMENTS, _DEVICE_ELEMENTS = 1 << 22, 1 << 25  # similarities held at a time


@torch.no_grad()
def dbscan(
    features: Tensor, radii: Sequence[float], *, min_samples: int = 4, nested: bool = True
) -> Tensor:
    """(R, N) clusters of (N, D) features, named by one of their samples; a noise sample is a
    cluster alone.

    A sample with at least `min_samples` samples within the radius, itself included, is a core;
    cores within the radius of each other share a cluster; other samples join the nearest core.

    Args:
        radii: growing; Euclidean distances of the unit-norm features: cos = 1 − r² / 2.
        nested: a sample that is no core stays with the first cluster it joins, so that clusters are
            nested.

    Example:
        >>> points = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [0.0, 1.0]])
        >>> dbscan(points, [0.3], min_samples=2)
        tensor([[0, 0, 0, 3]])
    """
    if not radii:
        raise ValueError("`radii` must name at least one radius")
    check_dbscan(radii, min_samples)
    require_finite(features)
    unit_ND = F.normalize(features.float(), dim=1)
    near = [1 - r * r / 2 for r in radii]
    number, device = len(unit_ND), unit_ND.device
    rows = _block_rows(number, device)
    blocks = [(start, unit_ND[start : start + rows]) for start in range(0, number, rows)]
    core_RN = torch.zeros(len(near), number, dtype=torch.bool, device=device)
    for start, block in blocks:
        sim_bN = block @ unit_ND.T
        sim_bN.diagonal(start).fill_(1)
        for r, least in enumerate(near):
            core_RN[r, start : start + rows] = (sim_bN >= least).sum(1) >= min_samples
    part_RN = torch.arange(number, device=device).repeat(len(near), 1)
    anchor_RN = torch.where(core_RN, part_RN, -1)
    for start, block in blocks:
        sim_bN = block @ unit_ND.T
        for r, least in enumerate(near):
            part_RN[r] = _join_parts(part_RN[r], sim_bN >= least, core_RN[r], start)
            best = sim_bN.masked_fill(~core_RN[r], -torch.inf).max(1)
            span = slice(start, start + rows)
            reached = (best.values >= least) & ~core_RN[r, span]
            anchor_RN[r, span] = torch.where(reached, best.indices, anchor_RN[r, span])
    for r in range(1, len(near) if nested else 0):
        follows = ~core_RN[r] & (anchor_RN[r - 1] >= 0)
        anchor_RN[r] = torch.where(follows, anchor_RN[r - 1], anchor_RN[r])
    noise_RN = anchor_RN < 0
    own_N = torch.arange(number, device=device)
    return torch.where(noise_RN, own_N, part_RN.gather(1, anchor_RN.clamp(min=0)))


def _block_rows(number: int, device: torch.device) -> int:
    most = _CPU_ELEMENTS if device.type == "cpu" else _DEVICE_ELEMENTS
    return max(1, most // max(number, 1))


def count_levels(given: Sequence[float] | None) -> int:
    """H of a hierarchy with a value for each of the levels from 2 on; 3 without."""
    return 3 if given is None else len(given) + 1


def check_dbscan(radii: Sequence[float], min_samples: int) -> None:
    grow = all(a < b for a, b in pairwise(radii)) and all(r > 0 for r in radii)
    require(grow, "radii", list(radii), "above 0 and grow from one level to the next")
    require_at_least(1, min_samples=min_samples)


def require_finite(features: Tensor) -> None:
    fits = features.ndim == 2 and bool(features.isfinite().all())
    must = "finite and of the shape (samples, features)"
    require(fits, "features", tuple(features.shape), must)


def require_all_samples(features: Tensor | None, num_samples: int) -> Tensor:
    shape = None if features is None else tuple(features.shape)
    must = f"of the shape ({num_samples}, any): all samples in data-set order"
    require(shape is not None and shape[0] == num_samples, "features", shape, must)
    assert features is not None
    require_finite(features)
    return features


def _join_parts(part_N: Tensor, near_bN: Tensor, core_N: Tensor, start: int) -> Tensor:
    """Joins the parts of cores that are near each other; the smallest core names a part."""
    rows = slice(start, start + len(near_bN))
    cores_bN = near_bN & core_N & core_N[rows].unsqueeze(1)
    row, column = (cores_bN & (part_N != part_N[rows].unsqueeze(1))).nonzero(as_tuple=True)
    if not len(row):
        return part_N
    edge_E2 = torch.stack((part_N[start + row], part_N[column]), 1)
    return components(edge_E2, len(part_N))[part_N]


_FIT_SAMPLES, _FOLLOW_SAMPLES = 1 << 14, 1 << 11  # whose distances radii are fitted to
LARGEST = 0.1  # the share of all samples that no cluster may exceed
SHARES = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.18, 0.25, 0.5)  # of cores, among which is chosen


class Radii(Exact):
    """The radii of the levels 2 … H of a hierarchy: given, or fitted to features.

    State: `fitted` (H − 1,), 0 until they are; `shares` (H − 1,) of the samples that were cores.
    """

    on_host = ("fitted", "shares", "epoch")
    fitted: Tensor
    shares: Tensor
    epoch: Tensor

    def __init__(self, levels: int, given: Sequence[float] | None, min_samples: int) -> None:
        super().__init__()
        self.given, self.min_samples = None if given is None else tuple(given), min_samples
        fits = self.given is None or len(self.given) == levels - 1
        must = (
            f"one for each of the levels 2 to {levels} (`criteria` of rcl, `levels` of hierarchy)"
        )
        require(fits, "radii", list(given or ()), must)
        check_dbscan(self.given or (), min_samples)
        self.register_buffer("fitted", torch.zeros(levels - 1, dtype=torch.float64))
        self.register_buffer("shares", torch.zeros(levels - 1, dtype=torch.float64))
        self.register_buffer("epoch", torch.tensor(-1, dtype=torch.int32))

    @property
    def values(self) -> tuple[float, ...] | None:
        """None before they are fitted."""
        if self.given is not None:
            return self.given
        return tuple(self.fitted.tolist()) if self.fitted.all() else None

    def fit(self, features: Tensor) -> tuple[float, ...]:
        if self.given is not None:
            return self.given
        distance_n = _core_distances(features, self.min_samples, _FIT_SAMPLES)
        radii = fitting_radii(features, len(self.fitted), min_samples=self.min_samples)
        self.fitted.copy_(torch.tensor(radii, dtype=torch.float64))
        shares = [(distance_n <= radius).double().mean().item() for radius in radii]
        self.shares.copy_(torch.tensor(shares))
        return radii

    @torch.no_grad()
    def follow(self, features: Tensor) -> None:
        """Sets fitted radii to those with as many cores as at the first fit, because an encoder
        that learns spreads its features."""
        if self.given is None and self.fitted.all():
            distance_n = _core_distances(features, self.min_samples, _FOLLOW_SAMPLES)
            *lower, last = self.shares.tolist()
            radii = _growing(distance_n, lower, _radius(distance_n, last))
            self.fitted.copy_(torch.tensor(radii, dtype=torch.float64))


@torch.no_grad()
def fitting_radii(features: Tensor, number: int, *, min_samples: int = 4) -> tuple[float, ...]:
    """`number` growing radii. At the last, as many samples are cores as possible, at most half,
    without a cluster of more than `LARGEST` of all samples; at each before it half as many."""
    if number < 1:
        return ()
    distance_n = _core_distances(features, min_samples, _FIT_SAMPLES)
    tried = sorted({_radius(distance_n, share) for share in SHARES})
    low, high = 0, len(tried)  # the largest cluster grows with the radius
    while high - low > 1:
        middle = (low + high) // 2
        label_N = dbscan(features, [tried[middle]], min_samples=min_samples)[0]
        fits = torch.bincount(label_N).max().item() <= LARGEST * len(features)
        low, high = (middle, high) if fits else (low, middle)
    share = (distance_n <= tried[low]).double().mean().item()
    shares = [share / 2**level for level in range(number - 1, 0, -1)]
    return tuple(round(radius, 6) for radius in _growing(distance_n, shares, tried[low]))


def _growing(distance_n: Tensor, shares: Sequence[float], last: float) -> list[float]:
    """The radii at which these shares of the samples are cores, each clearly below the next."""
    radii = [last]
    for share in reversed(shares):
        radii.insert(0, min(_radius(distance_n, share), 0.99 * radii[0]))
    return radii


def _core_distances(features: Tensor, min_samples: int, number: int) -> Tensor:
    step = max(1, len(features) // number)
    places_n = torch.arange(0, len(features), step, device=features.device)
    return kth_distance(features, min_samples, places_n).sort().values


def kth_distance(features: Tensor, min_samples: int, places_n: Tensor) -> Tensor:
    """(n,) the radius from which on each of some samples is a core, itself counted."""
    unit_ND = F.normalize(features.float(), dim=1)
    kth = min(min_samples, len(unit_ND))
    found = []
    for place_b in torch.split(places_n, _block_rows(len(unit_ND), unit_ND.device)):
        sim_bN = unit_ND[place_b] @ unit_ND.T
        sim_bN.scatter_(1, place_b.unsqueeze(1), 1.0)
        found.append((2 - 2 * sim_bN.topk(kth, 1).values[:, -1]).clamp(min=0).sqrt())
    return torch.cat(found)


def _radius(distance_n: Tensor, share: float) -> float:
    """The least radius with that share of cores; above 0 even for duplicates."""
    place = min(max(round(share * len(distance_n)) - 1, 0), len(distance_n) - 1)
    return max(distance_n[place].item(), 1e-2) * 1.0001
