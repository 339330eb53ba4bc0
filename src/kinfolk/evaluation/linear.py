"""Linear probe: multinomial logistic regression on frozen, standardised features, its ℓ2 strength chosen inside the training part.

Dimension key: N training samples, F features, S strengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kinfolk.data.progress import show_progress
from kinfolk.data.seeding import generator
from kinfolk.errors import KinfolkError
from kinfolk.evaluation.logistic import Probe

if TYPE_CHECKING:
    Array = Tensor | np.ndarray

STRENGTHS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
ENOUGH_HELD_OUT, MOST_REPEATS = 200, 5
"""Samples to choose a strength by, and how often another part is held out where one has fewer."""


@dataclass(frozen=True)
class LinearResult:
    """What a linear probe found.

    Args:
        accuracy: share of test samples that are classified rightly, in [0, 1].
        strength: the chosen ℓ2 penalty.
        held_out: accuracy on the held-out training labels for each strength tried, strongest first; empty where nothing could be held out.
        converged: whether the final fit reached its tolerance.
        top5: share of test samples whose class is among the five likeliest; NaN up to five classes.
    """

    accuracy: float
    strength: float
    held_out: dict[float, float]
    converged: bool
    top5: float = math.nan


def linear_probe(
    train_x: Array,
    train_y: Array,
    test_x: Array,
    test_y: Array,
    *,
    strengths: Sequence[float] = STRENGTHS,
    holdout: float = 0.1,
    seed: int = 0,
    max_iter: int = 1000,
    progress: bool = False,
) -> LinearResult:
    """Accuracy of a linear classifier on frozen features.

        minimise over w    mean cross-entropy + strength / 2 · ‖w‖²

    The strength is the one with the best accuracy on a stratified, held-out part of the **training** labels (the stronger in a tie); the
    classifier is then fitted again on all training labels and meets the test labels once. Features are standardised by mean and deviation
    of what is fitted. Samples without a label (−1) are left out. Of few samples several parts are held out in turn, up to five, and the
    mean decides. A class with one training sample is never held out; where no class has two, nothing can be held out and the middle
    strength is taken.

    Args:
        train_x, test_x: (N, F), (M, F).
        train_y, test_y: classes; −1: unlabelled. A test class that training lacks counts as wrong.
        strengths: ℓ2 penalties to choose from, for the *mean* loss, so that they mean the same for any number of samples.
        holdout: share of each class that is held out, at least one sample.
        seed: of the held-out part.
        max_iter: L-BFGS iterations of a fit.
        progress: whether to show a bar.
    """
    if not strengths or not min(strengths) > 0:
        raise ValueError(f"`strengths` (={tuple(strengths)}) must be one or more numbers above 0")
    if not 0 < holdout < 1:
        raise ValueError(f"`holdout` (={holdout}) must be in (0, 1)")
    x, y = labelled(train_x, train_y, "train")
    xt, yt = labelled(test_x, test_y, "test")
    if len(np.unique(y)) < 2:
        raise KinfolkError(f"A linear probe needs at least two classes; all {len(y)} labelled training samples are of class {y[0]}.")
    ordered = sorted(strengths, reverse=True)
    held_out: dict[float, float] = {}
    strength = ordered[len(ordered) // 2]
    held = held_out_part(y, holdout, seed)
    if len(ordered) > 1 and held.any() and len(np.unique(y[~held])) > 1:
        repeats = min(MOST_REPEATS, math.ceil(ENOUGH_HELD_OUT / held.sum()))
        right: dict[float, int] = {}
        plan = [(repeat, candidate) for repeat in range(repeats) for candidate in ordered]
        for repeat, candidate in show_progress(plan, len(plan), "Linear probe", enabled=progress):
            if candidate == ordered[0]:
                held = held_out_part(y, holdout, seed, repeat)
                probe = Probe(x[~held], y[~held], max_iter)
            probe.fit(candidate)
            right[candidate] = right.get(candidate, 0) + int((probe.predict(x[held]) == y[held]).sum())  # whole numbers: ties are ties
        held_out = {candidate: number / (repeats * int(held.sum())) for candidate, number in right.items()}
        strength = max(ordered, key=lambda candidate: right[candidate])
    probe = Probe(x, y, max_iter)
    converged = probe.fit(strength)
    return LinearResult(probe.accuracy(xt, yt), strength, held_out, converged, probe.top5(xt, yt))


def held_out_part(y: np.ndarray, share: float, seed: int, repeat: int = 0) -> np.ndarray:
    """(N,) True for the samples held out: of each class with at least two samples `share`, rounded, at least one and never all."""
    key = ("linear-holdout", repeat) if repeat else ("linear-holdout",)
    order = torch.randperm(len(y), generator=generator(seed, *key)).numpy()
    held = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):
        members = order[y[order] == label]
        if len(members) > 1:
            held[members[: min(max(1, round(share * len(members))), len(members) - 1)]] = True
    return held


def labelled(x: Array, y: Array, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Features as float32 and labels, of the labelled samples alone; what can't be used is refused. `part`: "train" or "test"."""
    features = x.detach().cpu().float().numpy() if isinstance(x, Tensor) else np.asarray(x, dtype=np.float32)
    labels = y.cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(
            f"`{part}_x` (={features.shape}) and `{part}_y` (={labels.shape}) must have the shapes (samples, features), (samples,)"
        )
    known = labels >= 0
    if not known.any():
        raise KinfolkError(f"The {part} part has no labelled samples; a linear probe needs labels.")
    if not np.isfinite(features).all():
        raise KinfolkError(f"The features of the {part} part hold values that are not finite numbers.")
    return features[known], labels[known]
