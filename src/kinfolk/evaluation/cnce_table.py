"""Table 5 of the CNCE paper: how much looser the bound becomes as the negatives come from nearer the anchor.

Dimension key: A anchors, C candidates, K negatives, N points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from statistics import fmean, stdev
from typing import Any

from torch import Tensor

from kinfolk.data.progress import show_progress
from kinfolk.data.seeding import generator
from kinfolk.evaluation.cnce import draw, log_ratio, premise, scores, support
from kinfolk.evaluation.cnce_toy import Critic, Toy, draw_points, train_critic, true_information

# Table 5: ω -> mean and standard deviation over 5 runs; ω = 0 is NCE.
PAPER: dict[int, tuple[float, float]] = {
    0: (0.01345, 0.001),
    10: (0.01241, 3e-4),
    25: (0.00220, 1e-4),
    50: (7.29e-5, 9e-6),
    75: (1.67e-5, 2e-6),
    90: (5.87e-6, 1e-6),
    95: (1.97e-6, 4e-6),
}


def table_study(
    num_seeds: int, toy: Toy | None = None, *, train_each: bool = False, same_data: bool = False, progress: bool = False
) -> dict[str, Any]:
    """Table 5: NCE and CNCE of the toy for each ω, mean and standard deviation over seeds.

    `critic` in the result tells who scores. "nce": one critic a seed, trained by NCE, measured by every estimator; "own", with
    `train_each`: for each ω its own critic, trained by that CNCE. Each is measured on the points it was trained on, as the paper seems to
    do, and on as many fresh ones, for which the bound holds in expectation.

    Args:
        num_seeds: runs, at least 1.
        toy: the settings; without, the paper's.
        train_each: also train a critic for each ω.
        same_data: all runs on the same points, so that only weights, order and negatives differ between them.
        progress: show a bar where there is a terminal.
    """
    if num_seeds < 1:
        raise ValueError(f"`num_seeds` (={num_seeds}) must be at least 1")
    toy = toy or Toy()
    found: dict[tuple[str, int, str], list[float]] = {}
    trainings = num_seeds * (len(PAPER) if train_each else 1)
    with count_epochs(trainings, toy, progress) as after_epoch:
        for seed in range(num_seeds):
            points = {part: draw_points(toy.num_points, 0 if same_data else seed, part) for part in ("train", "fresh")}
            for omega in PAPER if train_each else (0,):
                critic = train_critic(*points["train"], toy, seed, omega, after_epoch)
                for part, (x_N, y_N) in points.items():
                    for name, value in _measure(critic, x_N, y_N, toy, seed, omega):
                        found.setdefault((*name, part), []).append(value)
    return {
        "study": "table",
        "settings": {**asdict(toy), "seeds": num_seeds, "train_each": train_each, "same_data": same_data},
        "true": true_information(),
        "rows": [
            {"critic": critic, "omega": omega, "points": part, "mean": fmean(values), "stdev": _spread(values), "values": values}
            for (critic, omega, part), values in found.items()
            if critic != "premise"
        ],
        "premise": {str(omega): fmean(values) for (kind, omega, part), values in found.items() if kind == "premise" and part == "fresh"},
        "paper": {str(omega): {"mean": mean, "stdev": spread} for omega, (mean, spread) in PAPER.items()},
    }


def _measure(critic: Critic, x_N: Tensor, y_N: Tensor, toy: Toy, seed: int, trained: int) -> Iterator[tuple[tuple[str, int], float]]:
    """Estimates by one critic. All use the same random numbers; see `cnce`."""
    positive_A, others_AC = scores(critic.embed_x(x_N), critic.embed_y(y_N), toy.temperature)
    ordered_AC = others_AC.sort(1).values
    for omega in PAPER:
        if trained in (0, omega):
            negatives_AK = draw(support(ordered_AC, omega), toy.num_negatives, generator(seed, "measure"))
            estimate = float(log_ratio(positive_A, negatives_AK).mean())
            if trained == omega:
                yield ("own", omega), estimate
            if trained == 0:
                yield ("nce", omega), estimate
                yield ("premise", omega), premise(ordered_AC, omega)


@contextmanager
def count_epochs(trainings: int, toy: Toy, progress: bool) -> Iterator[Callable[[], object]]:
    """A function to call after each epoch of all trainings; shows how many have passed."""
    total = trainings * toy.epochs
    passed = iter(show_progress(range(total), total, "Training critics", enabled=progress))
    next(passed, None)  # the bar is there before the first epoch is done
    try:
        yield lambda: next(passed, None)
    finally:
        for _ in passed:  # an interrupted bar goes as a finished one does
            pass


def _spread(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None
