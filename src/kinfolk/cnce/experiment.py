"""The toy experiment of appendix B of the CNCE paper, with its Table 5 and the variances of theorem
3.2.

The data are two correlated Gaussian variables whose mutual information is known:

(X, Y) = Z + ε with Z ~ N(0, Σ_Z), ε ~ N(0, Σ_ε) is Gaussian with covariance Σ = Σ_Z + Σ_ε, hence

    I(X; Y) = −½ · log(1 − Σ_12² / (Σ_11 · Σ_22)) = 0.02041.

The critic is f(x, y) = ⟨g(x), h(y)⟩ / temperature: two perceptrons of five linear layers, ten units
wide, with ReLU.

The paper does not specify everything. Here there are two encoders with unit-norm outputs (section
2) of ten numbers (the hidden width) and temperature 0.07 (section 5). Instead of a memory bank, all
points are embedded at each step, so that no embedding is stale and both encoders have a gradient.
The partner of a point is never among its negatives. Negatives are drawn with replacement, because
those of the theorem are i.i.d. The paper studies the variance for IR and MoCo on images; here it is
the toy, or any two arrays of view embeddings.

Dimension key: N points, B batch, A anchors, C candidates, M candidates in the support, K negatives,
D embedding, R draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kinfolk.cnce.estimator import bounds, draw, log_ratio, premise, scores, support
from kinfolk.errors import UsageError, show_progress
from kinfolk.seeding import derive_seed, generator

SIGMA_Z = ((1.0, -0.5), (-0.5, 1.0))
SIGMA_EPSILON = ((1.0, 0.9), (0.9, 1.0))


@dataclass(frozen=True)
class Toy:
    """Settings of the toy experiment. The defaults are those of the paper; the temperature is that
    of its other experiments."""

    num_points: int = 2000
    num_negatives: int = 100
    epochs: int = 100
    batch_size: int = 128
    lr: float = 0.03
    width: int = 10
    layers: int = 5
    temperature: float = 0.07

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = {"num_points": 2, "epochs": 0}.get(name, 1)
            if name in ("lr", "temperature"):
                if not value > 0:
                    raise ValueError(f"`{name}` (={value}) must be above 0")
            elif value < least:
                raise ValueError(f"`{name}` (={value}) must be at least {least}")


def true_information() -> float:
    """I(X; Y) in nats, from the covariance."""
    sigma = torch.tensor(SIGMA_Z, dtype=torch.float64) + torch.tensor(
        SIGMA_EPSILON, dtype=torch.float64
    )
    return -0.5 * math.log(1 - float(sigma[0, 1] * sigma[1, 0] / (sigma[0, 0] * sigma[1, 1])))


def draw_points(num_points: int, seed: int, *key: int | str) -> tuple[Tensor, Tensor]:
    """(N,), (N,): x and y of `num_points` draws of Z + ε, a function of seed and key."""
    parts = []
    for name, sigma in (("z", SIGMA_Z), ("epsilon", SIGMA_EPSILON)):
        root = torch.linalg.cholesky(torch.tensor(sigma, dtype=torch.float64))
        parts.append(
            torch.randn(
                num_points, 2, dtype=torch.float64, generator=generator(seed, "toy", name, *key)
            )
            @ root.T
        )
    both_N2 = (parts[0] + parts[1]).float()
    return both_N2[:, 0].clone(), both_N2[:, 1].clone()


class Critic(nn.Module):
    """The two encoders. Their initial weights depend only on `seed`."""

    def __init__(self, toy: Toy, seed: int) -> None:
        super().__init__()
        self.temperature = toy.temperature
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "critic"))
            self.of_x, self.of_y = (perceptron(toy.width, toy.layers) for _ in range(2))

    def embed_x(self, x_N: Tensor) -> Tensor:
        return functional.normalize(self.of_x(x_N[:, None]), dim=1)

    def embed_y(self, y_N: Tensor) -> Tensor:
        return functional.normalize(self.of_y(y_N[:, None]), dim=1)


def perceptron(width: int, layers: int) -> nn.Sequential:
    """A perceptron from 1 to `width` numbers with `layers` linear layers and ReLU between them."""
    parts: list[nn.Module] = [nn.Linear(1, width)]
    for _ in range(layers - 1):
        parts += [nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(*parts)


def train_critic(
    x_N: Tensor,
    y_N: Tensor,
    toy: Toy,
    seed: int,
    lower: float = 0.0,
    after_epoch: Callable[[], object] | None = None,
) -> Critic:
    """Trains a critic that maximises NCE on the points, or, with `lower`, CNCE with negatives above
    that percentile of its scores."""
    critic = Critic(toy, seed)
    # fused: one call per step
    optimizer = torch.optim.Adam(critic.parameters(), lr=toy.lr, weight_decay=0.0, fused=True)
    for epoch in range(toy.epochs):
        draws = generator(seed, "epoch", epoch)
        order_N = torch.randperm(len(x_N), generator=draws)
        for start in range(0, len(x_N), toy.batch_size):
            batch_B = order_N[start : start + toy.batch_size]
            u_BD, v_ND = critic.embed_x(x_N[batch_B]), critic.embed_y(y_N)
            negatives_BK = choose(
                u_BD.detach(), v_ND.detach(), batch_B, toy.num_negatives, lower, draws
            )
            positive_B = (u_BD * v_ND[batch_B]).sum(1) / toy.temperature
            negative_BK = (
                torch.bmm(v_ND[negatives_BK], u_BD[:, :, None]).squeeze(2) / toy.temperature
            )
            optimizer.zero_grad()
            torch.autograd.backward(-log_ratio(positive_B, negative_BK).mean())
            optimizer.step()
        if after_epoch is not None:
            after_epoch()
    return critic.requires_grad_(False)


def choose(
    u_BD: Tensor,
    v_ND: Tensor,
    own_B: Tensor,
    num_negatives: int,
    lower: float,
    draws: torch.Generator,
) -> Tensor:
    """(B, K) points drawn from those above the percentile `lower` of each anchor's scores, never
    the partner of the anchor."""
    first, end = bounds(len(v_ND) - 1, lower)
    if lower == 0:
        index_BK = torch.randint(end, (len(own_B), num_negatives), generator=draws)
        return index_BK + (index_BK >= own_B[:, None])  # skips the partner
    score_BN = u_BD @ v_ND.T
    score_BN[torch.arange(len(own_B)), own_B] = -torch.inf  # the partner gets rank 0
    # several times faster than torch.topk on a CPU
    order_BN = torch.from_numpy(np.argpartition(score_BN.numpy(), 1 + first, axis=1))
    rank_BK = 1 + first + torch.randint(end - first, (len(own_B), num_negatives), generator=draws)
    return order_BN.gather(1, rank_BK)


NEGATIVES = (16, 32, 64, 128, 256, 512, 1024, 4096)  # appendix C
OMEGAS = (0, 50, 90)


def variance_study(
    num_seeds: int,
    toy: Toy | None = None,
    *,
    anchors: int = 128,
    draws: int = 32,
    progress: bool = False,
) -> dict[str, Any]:
    """Mean and variance of NCE and CNCE on fresh points of the toy, with a critic trained by NCE,
    for each number of negatives.

    The variance is that of theorem 3.2: the variance of Z over draws of the negatives with (u, v_1)
    fixed, averaged over anchors and seeds.
    """
    if num_seeds < 1:
        raise ValueError(f"`num_seeds` (={num_seeds}) must be at least 1")
    toy = toy or Toy()
    rows: list[list[dict[str, Any]]] = []
    with count_epochs(num_seeds, toy, progress) as after_epoch:
        for seed in range(num_seeds):
            critic = train_critic(
                *draw_points(toy.num_points, seed, "train"), toy, seed, after_epoch=after_epoch
            )
            x_N, y_N = draw_points(toy.num_points, seed, "fresh")
            rows.append(
                against_negatives(
                    critic.embed_x(x_N[:anchors]),
                    critic.embed_y(y_N),
                    toy.temperature,
                    draws=draws,
                    seed=seed,
                )
            )
    joined = [
        {
            **same[0],
            "mean": fmean(row["mean"] for row in same),
            "variance": fmean(row["variance"] for row in same),
        }
        for same in zip(*rows, strict=True)
    ]
    settings = {
        **asdict(toy),
        "seeds": num_seeds,
        "anchors": min(anchors, toy.num_points),
        "draws": draws,
    }
    return {"study": "variance", "settings": settings, "true": true_information(), "rows": joined}


def views_study(
    first: Path, second: Path, temperature: float, *, anchors: int = 128, draws: int = 32
) -> dict[str, Any]:
    """The variance study for embeddings of two views: two .npy arrays of the same shape. The first
    `anchors` rows are the anchors."""
    views = [_read(path) for path in (first, second)]
    if views[0].ndim != 2 or views[0].shape != views[1].shape or len(views[0]) < 2:
        shapes = " and ".join(str(tuple(view.shape)) for view in views)
        raise UsageError(
            f"the two views have the shapes {shapes}; both must have the same shape, samples ×"
            " features, with at least two samples"
        )
    if not all(bool(view.isfinite().all()) for view in views):
        raise UsageError("the two views contain values that are not finite")
    rows = against_negatives(views[0][:anchors], views[1], temperature, draws=draws)
    settings = {
        "views": [str(first), str(second)],
        "temperature": temperature,
        "anchors": min(anchors, len(views[0])),
        "draws": draws,
    }
    return {"study": "variance", "settings": settings, "true": None, "rows": rows}


@torch.no_grad()
def against_negatives(
    u_AD: Tensor,
    v_ND: Tensor,
    temperature: float,
    *,
    draws: int = 32,
    seed: int = 0,
    negatives: Sequence[int] = NEGATIVES,
    omegas: Sequence[float] = OMEGAS,
) -> list[dict[str, Any]]:
    """Mean and variance over `draws` draws of the negatives. Row i of `u_AD` and row i of `v_ND`
    are two views of one sample."""
    if draws < 2:
        raise ValueError(f"`draws` (={draws}) must be at least 2")
    positive_A, others_AC = scores(u_AD, v_ND, temperature)
    ordered_AC = others_AC.sort(1).values
    rows = []
    for number in negatives:
        for omega in omegas:
            kept_AM = support(ordered_AC, omega)
            found_RA = torch.stack(
                [
                    log_ratio(positive_A, draw(kept_AM, number, generator(seed, "draw", number, r)))
                    for r in range(draws)
                ]
            )
            rows.append(
                {
                    "negatives": number,
                    "omega": omega,
                    "mean": float(found_RA.mean()),
                    "variance": float(found_RA.var(0).mean()),
                }
            )
    return rows


def _read(path: Path) -> Tensor:
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False).astype(np.float32))
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"{path} cannot be read as an array of numbers (.npy): {error}") from error


# Table 5: ω → mean and standard deviation over 5 runs. ω = 0 is NCE.
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
    num_seeds: int,
    toy: Toy | None = None,
    *,
    train_each: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Table 5: NCE and CNCE of the toy for each ω, mean and standard deviation over seeds.

    `critic` in the result is "nce" for the critic of each seed that is trained by NCE and measured
    by every estimator, and "own" (with `train_each`) for a critic per ω that is trained by that
    CNCE. Each is measured on its training points, as the paper seems to do, and on as many fresh
    points, for which the bound holds in expectation.

    Args:
        num_seeds: number of runs, at least 1.
        toy: settings. None means those of the paper.
        train_each: also train a critic for each ω.
        progress: whether to show a progress bar in a terminal.
    """
    if num_seeds < 1:
        raise ValueError(f"`num_seeds` (={num_seeds}) must be at least 1")
    toy = toy or Toy()
    found: dict[tuple[str, int, str], list[float]] = {}
    trainings = num_seeds * (len(PAPER) if train_each else 1)
    with count_epochs(trainings, toy, progress) as after_epoch:
        for seed in range(num_seeds):
            points = {part: draw_points(toy.num_points, seed, part) for part in ("train", "fresh")}
            for omega in PAPER if train_each else (0,):
                critic = train_critic(*points["train"], toy, seed, omega, after_epoch)
                for part, (x_N, y_N) in points.items():
                    for name, value in _measure(critic, x_N, y_N, toy, seed, omega):
                        found.setdefault((*name, part), []).append(value)
    return {
        "study": "table",
        "settings": {
            **asdict(toy),
            "seeds": num_seeds,
            "train_each": train_each,
        },
        "true": true_information(),
        "rows": [
            {
                "critic": critic,
                "omega": omega,
                "points": part,
                "mean": fmean(values),
                "stdev": _spread(values),
                "values": values,
            }
            for (critic, omega, part), values in found.items()
            if critic != "premise"
        ],
        "premise": {
            str(omega): fmean(values)
            for (kind, omega, part), values in found.items()
            if kind == "premise" and part == "fresh"
        },
        "paper": {
            str(omega): {"mean": mean, "stdev": spread} for omega, (mean, spread) in PAPER.items()
        },
    }


def _measure(
    critic: Critic, x_N: Tensor, y_N: Tensor, toy: Toy, seed: int, trained: int
) -> Iterator[tuple[tuple[str, int], float]]:
    """Estimates of one critic. All use the same random numbers, see `cnce`."""
    positive_A, others_AC = scores(critic.embed_x(x_N), critic.embed_y(y_N), toy.temperature)
    ordered_AC = others_AC.sort(1).values
    for omega in PAPER:
        if trained in (0, omega):
            negatives_AK = draw(
                support(ordered_AC, omega), toy.num_negatives, generator(seed, "measure")
            )
            estimate = float(log_ratio(positive_A, negatives_AK).mean())
            if trained == omega:
                yield ("own", omega), estimate
            if trained == 0:
                yield ("nce", omega), estimate
                yield ("premise", omega), premise(ordered_AC, omega)


@contextmanager
def count_epochs(trainings: int, toy: Toy, progress: bool) -> Iterator[Callable[[], object]]:
    """Yields a function to call after each epoch, which advances a progress bar over all
    trainings."""
    total = trainings * toy.epochs
    passed = iter(show_progress(range(total), total, "Training critics", enabled=progress))
    next(passed, None)  # shows the bar before the first epoch ends
    try:
        yield lambda: next(passed, None)
    finally:
        for _ in passed:  # finishes the bar after an interrupt too
            pass


def _spread(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None
