"""What an audit measures from the similarities of all samples.

**All pairs** are compared exactly, a tile of the product at a time. Only the values of a row above
a floor are kept, which is estimated from a random part of the columns; a row with too few of them,
or far too many (ties), is computed again in full.

**What stands out** is measured with decoys instead of labels: made-up samples that have no kin but
are spread like the real ones. The share of decoys above an anchor's threshold says how many of its
flagged samples chance explains; the rest stands out. The kind of decoys that explains most counts.
None imitates every noise exactly, so a share is given only if at least `CLEAR` of the flagged pairs
stand out at some α.

Dimension key: N data set, D embedding, A anchors, R rows of a block, C columns of a tile, M sampled
columns or other samples, S values kept of a row, K nearest neighbours kept, P pairs or values of
α."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kinfolk.errors import show_progress
from kinfolk.features import Features, Floats, Ints

ROWS, TILE_COLUMNS, COLUMNS = 512, 4096, 1 << 14
"""Rows of a block, and columns of a tile and of a product of whole rows."""
SAMPLED = 2048
"""Columns from which the lower bound of a row is estimated."""
_BLOCK_ELEMENTS = 1 << 23
NAN = float("nan")


def num_kin(alpha: float, others: int) -> int:
    return min(others - 1, int(alpha * others + 1e-9))


def column_sample(num_samples: int, limit: int) -> Ints:
    if num_samples <= limit:
        return np.arange(num_samples, dtype=np.int64)
    random = np.random.default_rng(num_samples)
    return np.sort(random.choice(num_samples, limit, replace=False)).astype(np.int64)


def full_rows(
    features: Features, anchors_A: Ints, progress: bool = False, title: str = ""
) -> Iterator[tuple[Ints, Floats]]:
    """Yields ids (R,) and similarities (R, N) of some anchors, −inf to itself."""
    num = len(features)
    step = max(1, _BLOCK_ELEMENTS // num)
    starts = range(0, len(anchors_A), step)
    block = torch.empty(min(step, len(anchors_A)), num)  # one for all: new memory is slow
    for start in show_progress(starts, len(starts), title, enabled=progress):
        ids_R = anchors_A[start : start + step]
        rows = torch.from_numpy(features.take(ids_R))
        sim = block[: len(ids_R)]
        for first in range(0, num, COLUMNS):
            last = min(num, first + COLUMNS)
            columns = torch.from_numpy(features.rows(first, last))
            torch.mm(rows, columns.T, out=sim[:, first:last])
        sim_RN: Floats = sim.numpy()
        sim_RN[np.arange(len(ids_R)), ids_R] = -np.inf
        yield ids_R, sim_RN


# ---- all pairs


class AllPairs:
    """Neighbours are closest first; `occurrence_N` counts the anchors that flag a sample."""

    def __init__(self, num_samples: int, nearest: int) -> None:
        self.threshold_N = np.zeros(num_samples, np.float32)
        self.near_NK = np.zeros((num_samples, nearest), np.int64)
        self.near_sim_NK = np.zeros((num_samples, nearest), np.float32)
        self.flagged_N, self.occurrence_N = np.zeros((2, num_samples), np.int64)


def compare_all(features: Features, alpha: float, nearest: int, progress: bool = False) -> AllPairs:
    """Each thread computes on one core, which suits both products and comparisons."""
    num, before, lock = len(features), torch.get_num_threads(), Lock()
    nearest, k = min(nearest, num - 1), num_kin(alpha, num - 1)
    found, starts = AllPairs(num, nearest), range(0, num, ROWS)
    search = _RowSearch(features, max(k + 1, nearest))

    def compare(start: int) -> None:
        for ids_R, kept_R in search.block(np.arange(start, min(start + ROWS, num))):
            kin = [row(sample, *kept) for sample, kept in zip(ids_R, kept_R, strict=True)]
            with lock:
                found.occurrence_N += np.bincount(np.concatenate(kin), minlength=num)

    def row(sample: int, kept_S: Ints, sim_S: Floats) -> Ints:
        """Fills in the results of one sample; returns the ids that it flags."""
        sim_S = sim_S.clip(-1, 1)
        closest = np.flatnonzero(sim_S >= _largest(sim_S, nearest))
        closest = closest[np.argsort(-sim_S[closest], kind="stable")][:nearest]
        found.near_NK[sample], found.near_sim_NK[sample] = kept_S[closest], sim_S[closest]
        threshold = found.threshold_N[sample] = _largest(sim_S, k + 1)
        kin: Ints = kept_S[sim_S > threshold]
        found.flagged_N[sample] = len(kin)
        return kin

    threads = min(before, len(starts))
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            done = pool.map(compare, starts)
            for _ in show_progress(done, len(starts), "Comparing all samples", enabled=progress):
                pass
    finally:
        torch.set_num_threads(before)  # new threads take the number that was set last on any thread
    return found


Kept = list[tuple[Ints, Floats]]
"""Ids (S,) and similarities (S,) of each row, in the order of ids."""


class _RowSearch:
    """Finds at least the `least` largest similarities of each row; threads share one instance."""

    def __init__(self, features: Features, least: int) -> None:
        self.features, self.least = features, least
        self.sample_M = column_sample(len(features), SAMPLED)
        self.sample_DM = torch.from_numpy(features.take(self.sample_M)).T
        expected = least / (len(features) - 1) * len(self.sample_M)
        self.rank = math.ceil(expected + 4 * math.sqrt(expected) + 4)

    def block(self, ids_R: Ints) -> Iterator[tuple[Ints, Kept]]:
        again_R = ids_R
        if self.rank < len(self.sample_M) < len(self.features):
            kept = self._above_floor(ids_R)
            enough_R = np.array([len(sim_S) >= self.least for _, sim_S in kept])
            again_R = ids_R[~enough_R]  # the floor is an estimate
            if enough_R.any():
                yield ids_R[enough_R], [kept[row] for row in np.flatnonzero(enough_R)]
        every = np.arange(len(self.features))
        for ids, sim_RN in full_rows(self.features, again_R):
            yield ids, [(every, sim_N) for sim_N in sim_RN]

    def _above_floor(self, ids_R: Ints) -> Kept:
        """The values from an estimated floor on; none of any row if they are too many to keep."""
        num, rows_RD = len(self.features), torch.from_numpy(self.features.take(ids_R))
        most = 6 * self.rank * (num // len(self.sample_M) + 1) * len(ids_R)
        sim_RM: Floats = (rows_RD @ self.sample_DM).numpy()
        sim_RM[ids_R[:, None] == self.sample_M] = -np.inf
        floor_R1 = _largest(sim_RM, self.rank)[:, None]
        rows, ids, sims, number = [], [], [], 0
        whole = torch.empty(len(ids_R) * TILE_COLUMNS)  # one for all: new memory is slow
        for first in range(0, num, TILE_COLUMNS):
            columns = torch.from_numpy(self.features.rows(first, min(first + TILE_COLUMNS, num)))
            tile = whole[: len(ids_R) * len(columns)].view(len(ids_R), len(columns))
            sim_RC: Floats = torch.mm(rows_RD, columns.T, out=tile).numpy()
            same_R = ids_R - first
            inside = (same_R >= 0) & (same_R < len(columns))
            sim_RC[inside, same_R[inside]] = -np.inf
            place_P = np.flatnonzero(sim_RC >= floor_R1)
            number += len(place_P)
            if number > most:
                return [(ids_R[:0], sim_RM[0, :0])] * len(ids_R)
            rows.append(place_P // len(columns))
            ids.append(place_P % len(columns) + first)
            sims.append(sim_RC.reshape(-1)[place_P])
        row_P = np.concatenate(rows)
        order_P = np.argsort(row_P, kind="stable")
        ends = np.bincount(row_P, minlength=len(ids_R)).cumsum()[:-1]
        parts = (np.split(np.concatenate(each)[order_P], ends) for each in (ids, sims))
        return list(zip(*parts, strict=True))


def _largest(values: Floats, rank: int) -> Any:
    place = values.shape[-1] - rank
    return np.partition(values, place)[..., place]


# ---- precision and recall along α

CURVE_PAIRS, FEWEST_ANCHORS = 50_000_000, 256
ALPHAS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3)
MOSTLY_RIGHT = 0.5
"""Precision below which an α is not suggested: a detector would flag mostly true negatives."""


@dataclass(frozen=True)
class Point:
    """NaN where no labels are known."""

    alpha: float
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True)
class AlphaCurve:
    """One point for each α, over all pairs of `num_anchors`; empty without labels."""

    points: tuple[Point, ...] = ()
    num_anchors: int = 0

    def at(self, alpha: float) -> Point:
        found = (point for point in self.points if point.alpha == alpha)
        return next(found, Point(alpha, NAN, NAN, NAN))

    def best_alpha(self, precision: float = MOSTLY_RIGHT) -> float | None:
        points = [p for p in self.points if np.isfinite(p.f1) and p.precision >= precision]
        return max(points, key=lambda point: point.f1).alpha if points else None


def measure_curve(
    features: Features, alpha: float, labels_N: Ints, progress: bool = False
) -> AlphaCurve:
    """Compares about fifty million pairs with the labels; all of a small data set."""
    num, others = len(features), len(features) - 1
    anchors_A = column_sample(num, max(FEWEST_ANCHORS, CURVE_PAIRS // num))
    alphas = sorted({*ALPHAS, alpha})
    ranks = others - np.asarray([num_kin(each, others) for each in alphas])
    # flagged pairs with known labels, and with equal labels
    counts, kin = np.zeros((2, len(alphas)), dtype=np.int64), 0
    for ids_R, sim_RN in full_rows(features, anchors_A, progress, "Comparing with the labels"):
        sim_RN.clip(max=1, out=sim_RN)  # of equal rows, apart from rounding
        label_R1, order_RN = labels_N[ids_R][:, None], np.sort(sim_RN, axis=1)
        known_RN = (label_R1 >= 0) & (labels_N >= 0)
        same_RN = known_RN & (label_R1 == labels_N)
        kin += int(same_RN.sum() - (label_R1 >= 0).sum())  # a sample is not its own kin
        for place, rank in enumerate(ranks):
            above_RN = sim_RN > order_RN[:, rank, None]
            counts[:, place] += [(above_RN & of).sum() for of in (known_RN, same_RN)]
    points = []
    for each, (known, hits) in zip(alphas, counts.T.tolist(), strict=True):
        precision, recall = hits / known if known else NAN, hits / kin if kin else NAN
        f1 = 2 * hits / (known + kin) if known + kin else NAN
        points.append(Point(each, precision, recall, f1))
    return AlphaCurve(tuple(points), len(anchors_A))


# ---- pairs with equal labels


def kin_shares(labels_N: Ints | None, otherwise: float) -> NDArray[np.float64]:
    """(A,) share of the others with the same label, for each sample with a known label; `otherwise`
    if there are fewer than two."""
    known = np.empty(0) if labels_N is None else labels_N[labels_N >= 0]
    if len(known) < 2:
        return np.full(1, otherwise)
    _, inverse, sizes = np.unique(known, return_inverse=True, return_counts=True)
    shares: NDArray[np.float64] = (sizes[inverse] - 1) / (len(known) - 1)
    return shares


def kin_share(labels_N: Ints | None) -> float:
    """Share of pairs with equal labels; NaN without labels."""
    return float(kin_shares(labels_N, NAN).mean())


def kin_share_range(labels_N: Ints) -> tuple[float, float]:
    """95 % confidence interval of `kin_share` if a random part is labelled: that of a U-statistic,
    corrected for the labelled part, on a logarithmic scale."""
    share, num = kin_share(labels_N), int((labels_N >= 0).sum())
    known = num / len(labels_N)
    if num < 3 or share in (0, 1):
        highest = -math.log(0.025) / max(1, num * (num - 1) // 2)
        return (0.0, min(1.0, highest)) if share == 0 and known < 1 else (share, share)
    by_pair = share * (1 - share) / (num - 1)
    by_sample = max(0.0, float(kin_shares(labels_N, share).var(ddof=1)) - by_pair)
    # 3 instead of the 2 of theory: `by_sample` is itself uncertain if few samples are labelled
    error = math.sqrt(((1 - known) * 4 * by_sample + (1 - known**2) * 3 * by_pair) / num)
    factor = math.exp(1.96 * error / share)
    return share / factor, min(1.0, share * factor)


BATCH_SIZES = (64, 128, 256, 512, 1024, 4096)


@dataclass(frozen=True)
class BatchLine:
    """Expected false negatives of an anchor, and the chance of at least one."""

    batch_size: int
    negatives: int
    per_anchor: float
    chance: float


def batch_line(shares_A: NDArray[np.float64], size: int, views: int) -> BatchLine:
    """`shares_A`: see `kin_shares`; `views` of each sample are among the negatives."""
    negatives, chance = views * (size - 1), float((1 - (1 - shares_A) ** (size - 1)).mean())
    return BatchLine(size, negatives, negatives * float(shares_A.mean()), chance)


# ---- what stands out

ANCHORS, OTHERS = 1024, 2048
WIDEST, ROUNDS = 512, 4
CLEAR = 0.5
"""Share of the flagged pairs that must stand out at some α; noise stays below."""
FEWEST = 20


@dataclass(frozen=True)
class Outstanding:
    """(P,) shares of the flagged pairs that stand out, for several α: the mean over anchors minus
    two standard errors."""

    alphas: tuple[float, ...]
    stands: tuple[float, ...]

    @property
    def share(self) -> float:
        """Share of all pairs: the largest α · stands, rounded down to two digits, or 0 if no α has
        `CLEAR`. It is also the suggested α."""
        if max(self.stands, default=0.0) < CLEAR:
            return 0.0
        share = max(alpha * stands for alpha, stands in zip(self.alphas, self.stands, strict=True))
        digit = 10.0 ** (math.floor(math.log10(share)) - 1)
        return float(f"{math.floor(share / digit + 1e-9) * digit:.2g}")

    def at(self, alpha: float) -> float:
        return self.stands[self.alphas.index(alpha)]


def measure_standing_out(features: Features, alphas: Sequence[float]) -> Outstanding:
    order = np.random.default_rng(len(features)).permutation(len(features))
    num_anchors = min(ANCHORS, len(features) // 2)
    others = np.sort(order[num_anchors : num_anchors + OTHERS])
    num = len(others)
    if min(num_anchors, num) < FEWEST:
        return Outstanding(tuple(alphas), (0.0,) * len(alphas))
    anchors_AD, others_MD = features.take(np.sort(order[:num_anchors])), features.take(others)
    kin_P = np.asarray([num_kin(alpha, num) for alpha in alphas])
    threshold_AP = np.sort(anchors_AD @ others_MD.T, axis=1)[:, num - 1 - kin_P]
    chance_P = np.zeros(len(kin_P))
    for decoys_MD in _decoys(others_MD):
        sim_AM = np.sort(anchors_AD @ decoys_MD.T, axis=1)
        rows = zip(sim_AM, threshold_AP, strict=True)
        above_AP = np.stack([num - np.searchsorted(sim, bounds, "right") for sim, bounds in rows])
        error_P = above_AP.std(0, ddof=1) / np.sqrt(num_anchors)
        chance_P = np.maximum(chance_P, above_AP.mean(0) + 2 * error_P)
    stands_P = np.where(kin_P > 0, 1 - chance_P / np.maximum(kin_P, 1), 0).clip(min=0)
    return Outstanding(tuple(alphas), tuple(stands_P.tolist()))


def _decoys(others_MD: Floats) -> Iterator[Floats]:
    random = np.random.default_rng(0)
    mean_D = others_MD.mean(0)
    deviation_MD = others_MD - mean_D
    # the mirror image 2·mean − x: the same as x for noise of any covariance, also after PCA
    yield _unit(mean_D - deviation_MD)
    # each coordinate shuffled: the same for independent ones such as ReLU activations
    yield _unit(mean_D + random.permuted(deviation_MD, axis=0))
    # each principal component shuffled: the same covariance and skewed or heavy-tailed components
    components_DD = np.linalg.svd(deviation_MD, full_matrices=False)[2]
    yield _unit(mean_D + random.permuted(deviation_MD @ components_DD.T, axis=0) @ components_DD)
    # about the same for activations of correlated values; takes too long for wide features
    if others_MD.shape[1] <= WIDEST:
        yield _unit(_normal_with_margins(others_MD, random))


def _normal_with_margins(x_MD: Floats, random: np.random.Generator) -> Floats:
    """Normal values with the covariance of `x_MD`, mapped to the values of each of its coordinates;
    mapping changes the covariance, so both are imposed in turn."""
    sorted_MD, root_DD = np.sort(x_MD, axis=0), _root(x_MD)
    values_MD = random.normal(size=x_MD.shape) @ root_DD.T
    for left in range(ROUNDS, -1, -1):
        mapped_MD: Floats = np.take_along_axis(sorted_MD, values_MD.argsort(0).argsort(0), 0)
        if left:
            white_DM = np.linalg.solve(_root(mapped_MD), (mapped_MD - mapped_MD.mean(0)).T)
            values_MD = white_DM.T @ root_DD.T
    return mapped_MD


def _root(x_MD: Floats) -> Any:
    """Cholesky factor of the covariance, slightly regularised."""
    covariance_DD = np.cov(x_MD, rowvar=False).reshape(x_MD.shape[1], -1)
    ridge = 1e-3 * covariance_DD.diagonal().mean() + 1e-12
    return np.linalg.cholesky(covariance_DD + ridge * np.eye(len(covariance_DD)))


def _unit(rows_MD: Floats) -> Floats:
    norm_M = np.linalg.norm(rows_MD, axis=1, keepdims=True)
    unit: Floats = (rows_MD / np.maximum(norm_M, 1e-12)).astype(np.float32)
    return unit
