"""Samples to check: likely label errors, copies and hubs.

**Label errors.** A label is checked by a classifier that has not seen it: a ridge regression on the
principal components with its exact leave-one-out scores, plus the votes of the nearest neighbours,
as a softmax q(label). Labels are modelled as right with probability 1 − ε and otherwise drawn at
random from C classes,

    P(label) = (1 − ε) · q(label) + ε / C,

and the weights of both scores and ε are fitted by maximum likelihood. Labels of hard samples lower
the confidence of q; labels that are unlikely under any q raise ε.

**Copies** are images that are the same up to size, compression, a slight crop and mirroring: grey
thumbnails without uniform borders and low frequencies, as a shared background does not count, that
correlate as a whole (`COPY`), for the best crop of one, and in nearly every part that has structure
(`PARTS`).

Dimension key: N data set, R rows of a block, K nearest neighbours, C classes, F components, M
pairs, P pairs of a block, B images or parts, H, W image, S side of a thumbnail.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from kinfolk.errors import plural, show_progress
from kinfolk.features import Features, Floats, Ints

if TYPE_CHECKING:
    from kinfolk.data.images import ImageData

MISLABEL = np.dtype(
    [("sample", np.int64), ("label", np.int64), ("suggested", np.int64), ("probability", "f4")]
)
GROUP = np.dtype([("group", np.int64), ("sample", np.int64), ("kind", "U14")])
HUB = np.dtype([("sample", np.int64), ("occurrence", np.int64), ("times_expected", np.float32)])
NEIGHBOURS = 10
CERTAIN, LEAST_RECALL = 0.9, 0.05
"""Probability of an error with the suggested label from which a sample is listed, and share of
random errors that must be listed for a check to list any."""
MOST_NOISE = 0.3
"""Largest ε; else all labels that the features do not predict could be called random."""
FEWEST = 5
"""Samples that a class must have before its labels are checked."""
_COMPONENTS, _FITTED, _ROWS = 256, 4000, 4096
_REGULARISATIONS = (1e-4, 1e-3, 1e-2)

Matrix = NDArray[np.float64]


# ---- label errors


@dataclass(frozen=True)
class LabelCheck:
    """`found`: rows of sample, label, suggested label and its probability, the clearest first.
    `accuracy`: share of the labels that the features predict without having seen them. `noise`,
    `recall`: estimated shares of random labels, ε, and of random errors that would be listed."""

    found: NDArray[Any]
    accuracy: float = float("nan")
    noise: float = float("nan")
    recall: float = float("nan")
    num_checked: int = 0

    @property
    def can_tell(self) -> bool:
        return self.recall >= LEAST_RECALL

    @property
    def description(self) -> str:
        if not self.num_checked:
            return f"No class has {FEWEST} labels or more, so label errors cannot be judged."
        predicted = f"these features predict {self.accuracy:.0%} of the labels"
        if not self.can_tell:
            why = "too few to tell an error from a hard sample"
            return f"Label errors cannot be judged: {predicted}, {why}."
        random = f" About {self.noise:.1%} of the labels are random." if self.noise >= 5e-4 else ""
        return (
            f"{plural(len(self.found), 'likely label error')} found; {predicted}, and of random"
            f" errors about {self.recall:.0%} would be found.{random}"
        )


def check_labels(features: Features, labels_N: Ints | None, near_NK: Ints) -> LabelCheck:
    sizes = np.bincount(labels_N[labels_N >= 0]) if labels_N is not None else np.zeros(0)
    classes_C = np.flatnonzero(sizes >= FEWEST)
    if labels_N is None or len(classes_C) < 2:
        return LabelCheck(np.empty(0, dtype=MISLABEL))
    place = np.full(len(sizes), -1)
    place[classes_C] = np.arange(len(classes_C))
    model = _Classifier(features, np.where(labels_N >= 0, place[labels_N], -1), near_NK)
    noise = model.noise
    suggested, probability, right, caught = [], [], 0, 0.0

    def error(noise: float, q: Matrix) -> Matrix:
        """The probability that a label with probability q is random."""
        random = noise / len(classes_C)
        wrong: Matrix = random / (random + (1 - noise) * q + 1e-12)
        return wrong

    for part in model.parts():
        label_R, q_RC = model.class_N[part], model.probabilities(part)
        best_R, sure_R = q_RC.argmax(1), q_RC.max(1)
        wrong_R = error(noise, q_RC[np.arange(len(part)), label_R])
        suggested.append(classes_C[best_R])
        probability.append(np.where(best_R == label_R, 0, wrong_R * sure_R))
        right += int((best_R == label_R).sum())
        # what would be found of 1 % of errors, where there are none
        wrong_RC = error(max(noise, 0.01), q_RC)
        caught += float((wrong_RC * sure_R[:, None] >= CERTAIN).mean(1).sum())
    ids, probability_N, recall = model.ids, np.concatenate(probability), caught / len(model.ids)
    order = np.argsort(-probability_N, kind="stable")
    listed = order[probability_N[order] >= CERTAIN] if recall >= LEAST_RECALL else order[:0]
    columns = ids, labels_N[ids], np.concatenate(suggested), probability_N
    found = np.rec.fromarrays([column[listed] for column in columns], dtype=MISLABEL)
    return LabelCheck(found, right / len(ids), noise, recall, len(ids))


class _Classifier:
    """Ridge regression on the principal components and votes of the nearest neighbours, both
    without the sample itself; `class_N` is −1 for samples that are not checked."""

    def __init__(self, features: Features, class_N: Ints, near_NK: Ints) -> None:
        self.features, self.class_N, self.near_NK = features, class_N, near_NK
        self.ids = np.flatnonzero(class_N >= 0)
        self.prior_C = np.bincount(class_N[self.ids]).astype(np.float64)
        mean_D, cov_DD = np.zeros(features.dim), np.zeros((features.dim, features.dim))
        for part in self.parts():
            rows_RD = features.take(part)
            mean_D += rows_RD.sum(0, dtype=np.float64) / len(self.ids)
            cov_DD += (rows_RD.T @ rows_RD).astype(np.float64) / len(self.ids)
        value_D, vector_DD = np.linalg.eigh(cov_DD - np.outer(mean_D, mean_D))
        self.variance_F = value_D[::-1][:_COMPONENTS].clip(min=0)
        self.components_DF = vector_DD[:, ::-1][:, :_COMPONENTS].astype(np.float32)
        self.mean_F = (mean_D @ self.components_DF).astype(np.float32)
        self.sums_CF = np.zeros((len(self.prior_C), len(self.variance_F)))
        for part in self.parts():
            np.add.at(self.sums_CF, class_N[part], self._components(part))
        self._fit()

    def parts(self) -> list[Ints]:
        return [self.ids[start : start + _ROWS] for start in range(0, len(self.ids), _ROWS)]

    def _components(self, ids_R: Ints) -> Floats:
        return self.features.take(ids_R) @ self.components_DF - self.mean_F

    def _fit(self) -> None:
        from scipy.optimize import minimize
        from scipy.special import expit, softmax

        order = np.random.default_rng(0).permutation(len(self.ids))
        chosen = self.ids[np.sort(order[:_FITTED])]
        label, row = self.class_N[chosen], np.arange(len(chosen))

        def negative_log_likelihood(point: Matrix, ridge: Matrix, votes: Matrix) -> float:
            q = softmax(np.exp(point[0]) * ridge + np.exp(point[1]) * votes, 1)[row, label]
            noise = MOST_NOISE * expit(point[2])
            return -float(np.log((1 - noise) * q + noise / len(self.prior_C) + 1e-300).mean())

        def fit(regularisation: float) -> Any:
            scores, options = self.scores(chosen, regularisation), {"maxiter": 150}
            start, method = (2.0, 0.0, -1.5), "Nelder-Mead"
            return minimize(negative_log_likelihood, start, scores, method=method, options=options)

        fits = {regularisation: fit(regularisation) for regularisation in _REGULARISATIONS}
        self.regularisation = min(fits, key=lambda each: fits[each].fun)
        ridge, votes, noise = fits[self.regularisation].x
        self.weights = np.exp(ridge), np.exp(votes)
        self.noise = float(MOST_NOISE * expit(noise))

    def scores(self, ids_R: Ints, regularisation: float) -> tuple[Matrix, Matrix]:
        total = len(self.ids)
        scale_F = 1 / (total * (self.variance_F + regularisation * self.variance_F.sum()))
        z_RF = self._components(ids_R).astype(np.float64)
        label_RC = np.eye(len(self.prior_C))[self.class_N[ids_R]]
        influence_R1 = ((z_RF**2 * scale_F).sum(1) + 1 / total)[:, None]
        fitted_RC = (z_RF * scale_F) @ self.sums_CF.T + self.prior_C / total
        ridge_RC = (fitted_RC - influence_R1 * label_RC) / np.maximum(1 - influence_R1, 1e-3)
        class_RK = self.class_N[self.near_NK[ids_R, :NEIGHBOURS]]
        votes_RC = np.zeros_like(ridge_RC)
        row, rank = np.nonzero(class_RK >= 0)
        np.add.at(votes_RC, (row, class_RK[row, rank]), 1 / NEIGHBOURS)
        return ridge_RC, votes_RC

    def probabilities(self, ids_R: Ints) -> Matrix:
        from scipy.special import softmax

        ridge_RC, votes_RC = self.scores(ids_R, self.regularisation)
        q_RC: Matrix = softmax(self.weights[0] * ridge_RC + self.weights[1] * votes_RC, 1)
        return q_RC


# ---- duplicates and hubs

NEAR = 0.1
"""Largest distance of near-duplicates without images, relative to that of the nearest neighbour."""
_ROUNDING = 1e-6
"""A smaller distance counts as zero."""


def find_groups(
    features: Features, near_NK: Ints, near_sim_NK: Floats, copies_M2: Ints | None = None
) -> NDArray[Any]:
    """Rows of group, sample and kind, largest groups first: connected components of copies and of
    samples with equal features ("duplicate" if all are equal). Without `copies_M2`, near-duplicates
    are neighbours whose distance is at most `NEAR` times the median distance to the nearest sample
    that is not equal."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    if copies_M2 is None:
        distance_NK = 1 - near_sim_NK
        nearest_N = np.where(distance_NK > _ROUNDING, distance_NK, np.inf).min(1)
        nearest_N = nearest_N[np.isfinite(nearest_N)]
        limit = max(NEAR * float(np.median(nearest_N)) if len(nearest_N) else 0.0, _ROUNDING)
        row_M, rank_M = np.nonzero(distance_NK <= limit)
        copies_M2 = np.stack([row_M, near_NK[row_M, rank_M]], 1)
    first_N = first_of_equal(features)
    pairs_M2 = np.concatenate([copies_M2, np.stack([np.arange(len(features)), first_N], 1)])
    ones = np.ones(len(pairs_M2), np.int8)
    graph = coo_array((ones, tuple(pairs_M2.T)), shape=(len(features),) * 2)
    component_N = connected_components(graph, directed=False)[1]
    groups = defaultdict[int, list[int]](list)
    for sample in np.flatnonzero(np.bincount(component_N)[component_N] > 1).tolist():
        groups[int(component_N[sample])].append(sample)
    rows = []
    for group, members in enumerate(sorted(groups.values(), key=len, reverse=True)):
        kind = "duplicate" if len(set(first_N[members])) == 1 else "near-duplicate"
        rows += [(group, sample, kind) for sample in members]
    return np.array(rows, dtype=GROUP)


def first_of_equal(features: Features) -> Ints:
    """(N,) the first sample whose features are exactly equal."""
    seen: dict[bytes, int] = {}
    first_N = np.empty(len(features), dtype=np.int64)
    for start in range(0, len(features), _ROWS):
        rows = np.ascontiguousarray(features.array[start : start + _ROWS])
        for sample, row in enumerate(rows, start):
            first_N[sample] = seen.setdefault(blake2b(row, digest_size=16).digest(), sample)
    return first_N


def find_hubs(occurrence_N: Ints) -> NDArray[Any]:
    """Samples that more anchors flag than three deviations above the mean."""
    mean, deviation = float(occurrence_N.mean()), float(occurrence_N.std())
    order = np.argsort(-occurrence_N, kind="stable")
    found = order[occurrence_N[order] > mean + 3 * deviation] if deviation else order[:0]
    return np.array([(i, occurrence_N[i], occurrence_N[i] / mean) for i in found], dtype=HUB)


# ---- copies by their pixels

SIDE = 32
COPY, PARTS = 0.85, 0.5
"""Correlation of whole images, and of nearly all their parts, from which two images are copies."""
_UNIFORM, _HARD, _LEAST, _STRUCTURE = 0.06, 0.1, 0.3, 0.02
"""Range of grey in a uniform border, its mean difference from what it borders on, least share of a
side that is kept, and deviation of a part with structure."""
_PLAUSIBLE, _PROMISING = 0.6, 0.55
"""Correlation of whole thumbnails from which crops are tried, and of the best crop from which it is
refined."""
_SCALES, _STEPS = (1.0, 0.95, 0.9, 0.84), (0.04, 0.02, 0.01)
_BLUR = 9
_PAIRS, _IMAGES = 512, 1024
CANDIDATES, SIMILAR, SEARCH_UP_TO = 4, 3, 20_000
"""Number of nearest neighbours whose pixels are compared, and of the most similar thumbnails, which
are candidates too for up to `SEARCH_UP_TO` images."""


def find_copies(images: ImageData, near_NK: Ints, progress: bool = False) -> NDArray[np.int64]:
    """(M, 2) pairs of copies among the nearest neighbours and the most similar thumbnails."""
    small_N1SS = thumbnails(images, len(near_NK))
    candidates = [near_NK[:, :CANDIDATES]]
    if len(near_NK) <= SEARCH_UP_TO:
        candidates.append(similar_thumbnails(small_N1SS))
    near_NK = np.concatenate(candidates, axis=1)
    sample_NK = np.broadcast_to(np.arange(len(near_NK))[:, None], near_NK.shape)
    pairs_M2 = np.stack([sample_NK, near_NK], 2).reshape(-1, 2)
    pairs_M2 = np.unique(np.sort(pairs_M2, axis=1), axis=0)
    copies, starts = [np.empty((0, 2), np.int64)], range(0, len(pairs_M2), _PAIRS)
    for start in show_progress(starts, len(starts), "Comparing pixels", enabled=progress):
        part = pairs_M2[start : start + _PAIRS]
        one, other = small_N1SS[part.T]
        same = (correlation(one, other) >= COPY) | (correlation(one.flip(3), other) >= COPY)
        copies.append(part[same.numpy()])
    return np.concatenate(copies)


def thumbnails(images: ImageData, number: int) -> Tensor:
    """(N, 1, S, S) grey in [0, 1], without uniform borders."""
    found = torch.empty(number, 1, SIDE, SIDE)
    for start in range(0, number, _IMAGES):
        ids = torch.arange(start, min(number, start + _IMAGES))
        grey = images.pixels(ids).permute(0, 3, 1, 2).float().div_(255).mean(1, keepdim=True)
        found[start : start + len(ids)] = F.interpolate(grey, size=(SIDE, SIDE), mode="area")
        top, bottom = _uniform_edges(grey[:, 0])
        left, right = _uniform_edges(grey[:, 0].transpose(1, 2))
        framed = (bottom - top < grey.shape[2]) | (right - left < grey.shape[3])
        for row in framed.nonzero()[:, 0].tolist():
            content = grey[row : row + 1, :, top[row] : bottom[row], left[row] : right[row]]
            found[start + row] = F.interpolate(content, size=(SIDE, SIDE), mode="area")[0]
    return found


def _uniform_edges(grey_BHW: Tensor) -> tuple[Tensor, Tensor]:
    """(B,), (B,) the rows between the uniform borders; all rows if too few are left."""
    height = grey_BHW.shape[1]
    first_B, last_B = _border(grey_BHW), height - _border(grey_BHW.flip(1))
    enough = last_B - first_B >= _LEAST * height
    return torch.where(enough, first_B, 0), torch.where(enough, last_B, height)


def _border(grey_BHW: Tensor) -> Tensor:
    """(B,) rows of one colour at the top and the blurred row below; zero where they fade, as a
    sky."""
    low_BH, high_BH = grey_BHW.amin(2), grey_BHW.amax(2)
    range_BH = torch.maximum(high_BH - low_BH[:, :1], high_BH[:, :1] - low_BH)
    border_B = (range_BH < _UNIFORM).long().cumprod(1).sum(1)
    below_B1 = (border_B + 1).clamp(max=range_BH.shape[1] - 1).unsqueeze(1)
    jump_BH = (grey_BHW - grey_BHW[:, :1].mean(2, keepdim=True)).abs().mean(2)
    ends = (border_B > 0) & (jump_BH.gather(1, below_B1)[:, 0] >= _HARD)
    return torch.where(ends, border_B + 1, 0)


def similar_thumbnails(thumbnails_N1SS: Tensor) -> NDArray[np.int64]:
    """(N, K) the most similar other images of each, also mirrored."""
    whole_ND, mirrored_ND = _rough(thumbnails_N1SS), _rough(thumbnails_N1SS.flip(3))
    near = []
    for start in range(0, len(whole_ND), _IMAGES):
        part = whole_ND[start : start + _IMAGES]
        sim = torch.maximum(part @ whole_ND.T, part @ mirrored_ND.T)
        sim.diagonal(start).fill_(-2)
        near.append(sim.topk(min(SIMILAR, len(whole_ND) - 1), dim=1).indices)
    return torch.cat(near).numpy()


def correlation(one_P1SS: Tensor, other_P1SS: Tensor) -> Tensor:
    """(P,) the highest correlation of one image with a crop of the other, in either direction; −1
    where they differ clearly."""
    found_P = torch.full((len(one_P1SS),), -1.0)
    plausible = ((_rough(one_P1SS) * _rough(other_P1SS)).sum(1) >= _PLAUSIBLE).nonzero()[:, 0]
    if len(plausible):
        one, other = one_P1SS[plausible], other_P1SS[plausible]
        found_P[plausible] = torch.maximum(_best_crop(one, other), _best_crop(other, one))
    return found_P


def _best_crop(cropped_P1SS: Tensor, whole_P1SS: Tensor) -> Tensor:
    """(P,) the highest correlation; −1 where some parts differ."""
    whole_PD = _normalise(_without_low_frequencies(whole_P1SS))
    best_P, crop_P4 = torch.full((len(whole_PD),), -1.0), torch.zeros(len(whole_PD), 4)
    for scale in _SCALES:
        for x, y in product(dict.fromkeys((scale - 1, 0.0, 1 - scale)), repeat=2):
            crop = torch.tensor([scale, scale, x, y]).expand(len(whole_PD), 4)
            _keep_better(cropped_P1SS, whole_PD, crop, best_P, crop_P4)
    promising = (best_P >= _PROMISING).nonzero()[:, 0]
    if len(promising):
        images, whole = cropped_P1SS[promising], whole_PD[promising]
        best, crop = best_P[promising], crop_P4[promising]
        for step, _, place, sign in product(_STEPS, range(2), range(4), (-1, 1)):
            moved = crop.clone()
            moved[:, place] += sign * step
            moved[:, :2].clamp_(0.75, 1)
            _keep_better(images, whole, moved, best, crop)
        same = _parts_agree(_crop(images, crop), whole_P1SS[promising])
        best_P[promising] = torch.where(same, best, -1.0)
    return best_P


def _parts_agree(one_P1SS: Tensor, other_P1SS: Tensor) -> Tensor:
    """(P,) True where the images correlate in nearly all parts with structure."""

    def parts(images_P1SS: Tensor) -> Tensor:
        detail, side = _without_low_frequencies(images_P1SS), SIDE // 4
        parts_PBD = F.unfold(detail, side, stride=side).transpose(1, 2)
        return parts_PBD - parts_PBD.mean(2, keepdim=True)

    one_PBD, other_PBD = parts(one_P1SS), parts(other_P1SS)
    norms_PB = one_PBD.norm(dim=2) * other_PBD.norm(dim=2)
    agree_PB = (one_PBD * other_PBD).sum(2) / norms_PB.clamp_min(1e-6) >= PARTS
    structured_PB = torch.maximum(one_PBD.std(2), other_PBD.std(2)) >= _STRUCTURE
    differ_P = (structured_PB & ~agree_PB).sum(1)
    agrees_P: Tensor = 8 * differ_P <= structured_PB.sum(1)
    return agrees_P


def _keep_better(
    images_P1SS: Tensor, whole_PD: Tensor, crop_P4: Tensor, best_P: Tensor, best_crop_P4: Tensor
) -> None:
    """`crop_P4`: scale and shift along x and y."""
    detail_P1SS = _without_low_frequencies(_crop(images_P1SS, crop_P4))
    value_P = (_normalise(detail_P1SS) * whole_PD).sum(1)
    better = value_P > best_P
    best_P[better], best_crop_P4[better] = value_P[better], crop_P4[better]


def _crop(images_P1SS: Tensor, crop_P4: Tensor) -> Tensor:
    matrix = torch.zeros(len(crop_P4), 2, 3)
    matrix[:, 0, 0], matrix[:, 1, 1], matrix[:, 0, 2], matrix[:, 1, 2] = crop_P4.unbind(1)
    grid = F.affine_grid(matrix, list(images_P1SS.shape), align_corners=False)
    return F.grid_sample(images_P1SS, grid, padding_mode="border", align_corners=False)


def _rough(images_P1SS: Tensor) -> Tensor:
    """A coarse version that a slight crop changes little."""
    return _normalise(F.avg_pool2d(images_P1SS, 4))


def _without_low_frequencies(images_P1SS: Tensor) -> Tensor:
    padded = F.pad(images_P1SS, (_BLUR // 2,) * 4, mode="replicate")
    return images_P1SS - F.avg_pool2d(padded, _BLUR, 1)


def _normalise(images: Tensor) -> Tensor:
    """(P, D) with mean zero and unit norm; an image without structure becomes zero."""
    flat = images.flatten(1)
    flat = flat - flat.mean(1, keepdim=True)
    norm = flat.norm(dim=1, keepdim=True)
    return torch.where(norm > 1e-3, flat / norm.clamp_min(1e-6), 0.0)
