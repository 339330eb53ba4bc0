"""The share of pairs that stands out from unrelated ones, measured with decoys instead of labels.

A decoy is a made-up sample that has no kin but is spread like the real ones. The share of decoys
above an anchor's threshold tells how many of its flagged samples chance explains; the rest stands
out. Four kinds of decoys are made, and the one that explains most counts:

- the mirror image 2·mean − x: the same as x for noise of any covariance, also after PCA;
- the principal components of the samples, each shuffled over the samples: the same covariance and
  the same skewed or heavy-tailed components, but no combination of them is more frequent;
- the coordinates, each shuffled: the same for independent coordinates such as ReLU activations;
- correlated normal values with the distribution of each coordinate: about the same for activations
  of correlated values. It is left out above `WIDEST` dimensions, where it takes too long.

Decoys imitate noise, but not every noise exactly: of ReLU activations of 64 random inputs in 256
units, up to a quarter of the flagged pairs still seems to stand out. A share is therefore given
only if at least `CLEAR` of the flagged pairs stand out at some α; otherwise it cannot be known.

What stands out is a property of the features, not of any labels. The same images have 1 % of pairs
with equal labels in CIFAR-100 and 5 % in its 20 superclasses, and the features are the same. Pairs
stand out by class, but also by topic, colour or background, and kin may not stand out at all.

Dimension key: A anchors, M other samples, P values of α.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kinfolk.auditing.exact import num_kin
from kinfolk.auditing.inputs import Features, Floats

ANCHORS, OTHERS = 1024, 2048
WIDEST, ROUNDS = 512, 4
CLEAR = 0.5
"""Share of the flagged pairs that must stand out at some α; noise stays below."""
FEWEST = 20
"""Anchors and other samples below which nothing is measured."""


@dataclass(frozen=True)
class Outstanding:
    """How many flagged pairs stand out, for several α. Both are lower bounds: the mean over anchors
    minus two standard errors.

    Args:
        alphas: (P,) shares of the pairs that are flagged.
        stands: (P,) share of the flagged pairs that stands out.
    """

    alphas: tuple[float, ...]
    stands: tuple[float, ...]

    @property
    def share(self) -> float:
        """Share of all pairs that stands out: the largest α · stands, rounded down to two digits,
        or 0 if `CLEAR` is not reached. It is also the suggested α."""
        if max(self.stands, default=0.0) < CLEAR:
            return 0.0
        share = max(alpha * stands for alpha, stands in zip(self.alphas, self.stands, strict=True))
        digit = 10.0 ** (math.floor(math.log10(share)) - 1)
        return float(f"{math.floor(share / digit + 1e-9) * digit:.2g}")

    def at(self, alpha: float) -> float:
        """Share of the flagged pairs that stands out at one of `alphas`."""
        return self.stands[self.alphas.index(alpha)]


def measure_standing_out(features: Features, alphas: Sequence[float]) -> Outstanding:
    """Compares random anchors with other samples and with their decoys."""
    order = np.random.default_rng(len(features)).permutation(len(features))
    num_anchors = min(ANCHORS, len(features) // 2)
    others = np.sort(order[num_anchors : num_anchors + OTHERS])
    if min(num_anchors, len(others)) < FEWEST:
        return Outstanding(tuple(alphas), (0.0,) * len(alphas))
    anchors_AD = features.take(np.sort(order[:num_anchors]))
    others_MD = features.take(others)
    sim_AM = np.sort(anchors_AD @ others_MD.T, axis=1)
    num = len(others_MD)
    kin_P = np.asarray([num_kin(alpha, num) for alpha in alphas])
    threshold_AP = sim_AM[:, num - 1 - kin_P]
    chance_P = np.zeros(len(kin_P))
    for decoys_MD in _decoys(others_MD):
        decoy_sim_AM = np.sort(anchors_AD @ decoys_MD.T, axis=1)
        above_AP = np.asarray(
            [
                num - np.searchsorted(sim_M, threshold_P, side="right")
                for sim_M, threshold_P in zip(decoy_sim_AM, threshold_AP, strict=True)
            ]
        )
        error_P = above_AP.std(0, ddof=1) / np.sqrt(num_anchors)
        chance_P = np.maximum(chance_P, above_AP.mean(0) + 2 * error_P)
    stands_P = np.where(kin_P > 0, 1 - chance_P / np.maximum(kin_P, 1), 0).clip(min=0)
    return Outstanding(tuple(alphas), tuple(stands_P.tolist()))


def _decoys(others_MD: Floats) -> Iterator[Floats]:
    """Each kind of decoys, of unit norm."""
    random = np.random.default_rng(0)
    mean_D = others_MD.mean(0)
    deviation_MD = others_MD - mean_D
    yield _unit(mean_D - deviation_MD)
    yield _unit(mean_D + random.permuted(deviation_MD, axis=0))
    components_DD = np.linalg.svd(deviation_MD, full_matrices=False)[2]
    along_MD = random.permuted(deviation_MD @ components_DD.T, axis=0)
    yield _unit(mean_D + along_MD @ components_DD)
    if others_MD.shape[1] <= WIDEST:
        yield _unit(_normal_with_margins(others_MD, random))


def _normal_with_margins(x_MD: Floats, random: np.random.Generator) -> Floats:
    """Normal values with the covariance of `x_MD`, mapped to the values of each of its coordinates.
    Mapping changes the covariance, so both are imposed in turn."""
    sorted_MD = np.sort(x_MD, axis=0)
    root_DD = _root(x_MD)
    values_MD = random.normal(size=x_MD.shape) @ root_DD.T
    for _ in range(ROUNDS):
        made_MD = _with_margins(values_MD, sorted_MD)
        white_DM = np.linalg.solve(_root(made_MD), (made_MD - made_MD.mean(0)).T)
        values_MD = white_DM.T @ root_DD.T
    return _with_margins(values_MD, sorted_MD)


def _with_margins(values_MD: Floats, sorted_MD: Floats) -> Floats:
    rank_MD = values_MD.argsort(axis=0).argsort(axis=0)
    return np.take_along_axis(sorted_MD, rank_MD, axis=0)


def _root(x_MD: Floats) -> Floats:
    """Cholesky factor of the covariance, slightly regularised."""
    covariance_DD = np.cov(x_MD, rowvar=False).reshape(x_MD.shape[1], -1)
    ridge = 1e-3 * covariance_DD.diagonal().mean() + 1e-12
    root: Floats = np.linalg.cholesky(covariance_DD + ridge * np.eye(len(covariance_DD)))
    return root


def _unit(rows_MD: Floats) -> Floats:
    norm_M = np.linalg.norm(rows_MD, axis=1, keepdims=True)
    unit: Floats = (rows_MD / np.maximum(norm_M, 1e-12)).astype(np.float32)
    return unit
