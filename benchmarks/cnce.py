"""NCE and CNCE, two lower bounds on mutual information, in an experiment where the truth is known.

    .venv/bin/python benchmarks/cnce.py [--train-each] [--seeds 5] [--epochs 100] [--out table.json]
    .venv/bin/python benchmarks/cnce.py --study variance

Wu, Mosse, Zhuang, Yamins, Goodman, Conditional Negative Sampling for Contrastive Learning of Visual
Representations, ICLR 2021, equation 1, theorems 3.1 and 3.2, appendix B. With critic scores f and k
candidates, one of which is the positive v_1,

    Z = log( e^f(u, v_1) / (1/k · Σ_j e^f(u, v_j)) ),
    NCE = E[Z] with v_2:k ~ p(v),     CNCE = E[Z] with v_2:k ~ p(v | S_B).

S_B contains the v whose score is between the ω_ℓ-th and the ω_u-th percentile of the anchor's
scores (section 4), so ω = 95 keeps the hardest 5 percent, and ω = 0 is NCE. In the experiment
(X, Y) = Z + ε with Z ~ N(0, Σ_Z), ε ~ N(0, Σ_ε) is Gaussian with covariance Σ = Σ_Z + Σ_ε, hence

    I(X; Y) = −½ · log(1 − Σ_12² / (Σ_11 · Σ_22)) = 0.02041.

The critic is f(x, y) = ⟨g(x), h(y)⟩ / temperature: two perceptrons of five linear layers, ten units
wide, with ReLU. What the paper does not state: docs/methods/cnce.md.

Dimension key: N points, B batch, A anchors, C candidates of an anchor other than its positive, M
candidates in the support, K negatives drawn, D embedding, R draws.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kinfolk.errors import require, show_progress
from kinfolk.seeding import derive_seed, generator

# ---- the estimators


def nce(
    positive_A: Tensor, others_AC: Tensor, num_negatives: int, generator: torch.Generator
) -> Tensor:
    """The NCE estimate (a scalar): `cnce` with negatives from all candidates."""
    return cnce(positive_A, others_AC, num_negatives, generator, lower=0.0)


def cnce(
    positive_A: Tensor,
    others_AC: Tensor,
    num_negatives: int,
    generator: torch.Generator,
    lower: float,
    upper: float = 100.0,
) -> Tensor:
    """The CNCE estimate (a scalar): the mean of Z with negatives from the candidates between two
    percentiles of each anchor's scores. Estimates with equal generators differ only by these; with
    `upper` = 100 they decrease with `lower` in every draw.

    Args:
        positive_A: (A,) scores f(u, v_1).
        others_AC: (A, C) scores of draws from p(v) that are independent of v_1.
        num_negatives: negatives per anchor, drawn with replacement; k − 1 in theorem 3.1.
        generator: random generator on the device of the scores.
        lower, upper: ω_ℓ and ω_u, percentiles in [0, 100].
    """
    kept_AM = support(others_AC.sort(1).values, lower, upper)
    return log_ratio(positive_A, draw_scores(kept_AM, num_negatives, generator)).mean()


def log_ratio(positive_A: Tensor, negatives_AK: Tensor) -> Tensor:
    """(A,) Z for each anchor. The positive is one of the k = K + 1 candidates."""
    if positive_A.ndim != 1 or negatives_AK.ndim != 2 or len(positive_A) != len(negatives_AK):
        raise ValueError(
            f"`positive_A` (={tuple(positive_A.shape)}) and `negatives_AK`"
            f" (={tuple(negatives_AK.shape)}) must have the shapes (A,), (A, K)"
        )
    every = torch.cat((positive_A[:, None], negatives_AK), 1)
    return positive_A - every.logsumexp(1) + math.log(every.shape[1])


def support(ordered_AC: Tensor, lower: float, upper: float = 100.0) -> Tensor:
    """(A, M) the scores between two percentiles of each row of ascending scores."""
    first, last = bounds(ordered_AC.shape[1], lower, upper)
    return ordered_AC[:, first:last]


def bounds(num_candidates: int, lower: float, upper: float = 100.0) -> tuple[int, int]:
    if not 0 <= lower < upper <= 100:
        raise ValueError(
            f"`lower` (={lower}) and `upper` (={upper}) must be percentiles, 0 <= lower < upper"
            " <= 100"
        )
    require(num_candidates >= 1, "num_candidates", num_candidates, "at least 1")
    first = min(math.floor(num_candidates * lower / 100), num_candidates - 1)
    return first, max(math.ceil(num_candidates * upper / 100), first + 1)


def draw_scores(kept_AM: Tensor, num_negatives: int, generator: torch.Generator) -> Tensor:
    """(A, K) scores drawn from each row with replacement. They are counted from the top, so that
    supports with the same upper end pick their largest score with the same random number."""
    require(num_negatives >= 1, "num_negatives", num_negatives, "at least 1")
    shape, size = (len(kept_AM), num_negatives), kept_AM.shape[1]
    share_AK = torch.rand(*shape, generator=generator, device=kept_AM.device, dtype=torch.float64)
    below_top_AK = (share_AK * size).long().clamp_(max=size - 1)
    return kept_AM.gather(1, size - 1 - below_top_AK)


def premise(ordered_AC: Tensor, lower: float) -> float:
    """Share of anchors (rows of ascending scores) for which theorem 3.1 applies."""
    mean_A = ordered_AC.logsumexp(1) - math.log(ordered_AC.shape[1])
    return float((support(ordered_AC, lower)[:, 0] > mean_A).double().mean())


def scores(u_AD: Tensor, v_ND: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Cosine similarities divided by the temperature: (A,) of row i with row i, (A, N − 1) with all
    other rows of `v_ND`, which may have more rows than `u_AD`."""
    matrices = u_AD.ndim == v_ND.ndim == 2 and u_AD.shape[1] == v_ND.shape[1]
    if not matrices or not 0 < len(u_AD) <= len(v_ND) or len(v_ND) < 2:
        raise ValueError(
            f"`u_AD` (={tuple(u_AD.shape)}) and `v_ND` (={tuple(v_ND.shape)}) must be (A, D) and"
            " (N, D) with A <= N and N at least 2"
        )
    require(temperature > 0, "temperature", temperature, "above 0")
    u_AD, v_ND = (functional.normalize(each.double(), dim=1) for each in (u_AD, v_ND))
    score_AN = u_AD @ v_ND.T / temperature
    others = torch.ones_like(score_AN, dtype=torch.bool).fill_diagonal_(False)
    return score_AN.diagonal().clone(), score_AN[others].view(len(u_AD), len(v_ND) - 1)


# ---- the toy: its data and its critic

SIGMA_Z = ((1.0, -0.5), (-0.5, 1.0))
SIGMA_EPSILON = ((1.0, 0.9), (0.9, 1.0))


@dataclass(frozen=True)
class Toy:
    """Settings of the experiment; the defaults are those of the paper."""

    num_points: int = 2000
    num_negatives: int = 100
    epochs: int = 100
    batch_size: int = 128
    lr: float = 0.03
    width: int = 10
    layers: int = 5
    temperature: float = 0.07


def true_information() -> float:
    sigma = np.asarray(SIGMA_Z) + np.asarray(SIGMA_EPSILON)
    return -0.5 * math.log(1 - float(sigma[0, 1] ** 2 / (sigma[0, 0] * sigma[1, 1])))


def draw_points(num_points: int, seed: int, *key: int | str) -> tuple[Tensor, Tensor]:

    def normal(name: str, sigma: tuple[tuple[float, float], ...]) -> Tensor:
        draws = generator(seed, "toy", name, *key)
        root = torch.linalg.cholesky(torch.tensor(sigma, dtype=torch.float64))
        points: Tensor = torch.randn(num_points, 2, dtype=torch.float64, generator=draws) @ root.T
        return points

    both_N2 = (normal("z", SIGMA_Z) + normal("epsilon", SIGMA_EPSILON)).float()
    return both_N2[:, 0].clone(), both_N2[:, 1].clone()


class Critic(nn.Module):
    """The two encoders. Their initial weights depend only on `seed`."""

    def __init__(self, toy: Toy, seed: int) -> None:
        super().__init__()
        self.temperature = toy.temperature
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "critic"))
            self.of_x, self.of_y = (_perceptron(toy.width, toy.layers) for _ in range(2))

    def embed_x(self, x_N: Tensor) -> Tensor:
        return functional.normalize(self.of_x(x_N[:, None]), dim=1)

    def embed_y(self, y_N: Tensor) -> Tensor:
        return functional.normalize(self.of_y(y_N[:, None]), dim=1)


def _perceptron(width: int, layers: int) -> nn.Sequential:
    parts: list[nn.Module] = [nn.Linear(1, width)]
    for _ in range(layers - 1):
        parts += [nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(*parts)


def train_critic(x_N: Tensor, y_N: Tensor, toy: Toy, seed: int, lower: float = 0.0) -> Critic:
    """Trains a critic that maximises NCE, or CNCE with negatives above the percentile `lower`."""
    critic = Critic(toy, seed)
    # fused: one call per step
    optimizer = torch.optim.Adam(critic.parameters(), lr=toy.lr, weight_decay=0.0, fused=True)
    for epoch in range(toy.epochs):
        draws = generator(seed, "epoch", epoch)
        order_N = torch.randperm(len(x_N), generator=draws)
        for start in range(0, len(x_N), toy.batch_size):
            batch_B = order_N[start : start + toy.batch_size]
            u_BD, v_ND = critic.embed_x(x_N[batch_B]), critic.embed_y(y_N)
            chosen_BK = choose_negatives(
                u_BD.detach(), v_ND.detach(), batch_B, toy.num_negatives, lower, draws
            )
            positive_B = (u_BD * v_ND[batch_B]).sum(1)
            negative_BK = torch.bmm(v_ND[chosen_BK], u_BD[:, :, None]).squeeze(2)
            ratio_B = log_ratio(positive_B / toy.temperature, negative_BK / toy.temperature)
            optimizer.zero_grad()
            torch.autograd.backward(-ratio_B.mean())
            optimizer.step()
    return critic.requires_grad_(False)


def choose_negatives(
    u_BD: Tensor,
    v_ND: Tensor,
    partner_B: Tensor,
    num_negatives: int,
    lower: float,
    draws: torch.Generator,
) -> Tensor:
    """(B, K) points drawn from those above the percentile `lower` of each anchor's scores, never
    its partner."""
    shape = (len(partner_B), num_negatives)
    first, end = bounds(len(v_ND) - 1, lower)
    if lower == 0:
        index_BK = torch.randint(end, shape, generator=draws)
        return index_BK + (index_BK >= partner_B[:, None])  # skips the partner
    score_BN = u_BD @ v_ND.T
    score_BN[torch.arange(len(partner_B)), partner_B] = -torch.inf  # the partner gets rank 0
    # several times faster than torch.topk on a CPU
    order_BN = torch.from_numpy(np.argpartition(score_BN.numpy(), 1 + first, axis=1))
    return order_BN.gather(1, 1 + first + torch.randint(end - first, shape, generator=draws))


# ---- the studies

NEGATIVES = (16, 32, 64, 128, 256, 512, 1024, 4096)  # appendix C
OMEGAS = (0, 50, 90)
PAPER: dict[int, tuple[float, float]] = {
    0: (0.01345, 0.001),
    10: (0.01241, 3e-4),
    25: (0.00220, 1e-4),
    50: (7.29e-5, 9e-6),
    75: (1.67e-5, 2e-6),
    90: (5.87e-6, 1e-6),
    95: (1.97e-6, 4e-6),
}
"""Table 5: ω → mean and standard deviation over 5 runs; ω = 0 is NCE."""


def variance_study(
    num_seeds: int,
    toy: Toy | None = None,
    *,
    anchors: int = 128,
    draws: int = 32,
    progress: bool = False,
) -> dict[str, Any]:
    """Mean and variance of NCE and CNCE on fresh points, with a critic trained by NCE. The variance
    is that of theorem 3.2: of Z over draws of the negatives with (u, v_1) fixed, averaged over
    anchors and seeds."""
    toy = toy or Toy()
    rows: list[list[dict[str, Any]]] = []
    require(num_seeds >= 1, "num_seeds", num_seeds, "at least 1")
    seeds = range(num_seeds)
    for seed in show_progress(seeds, num_seeds, "Training critics", enabled=progress):
        critic = train_critic(*draw_points(toy.num_points, seed, "train"), toy, seed)
        x_N, y_N = draw_points(toy.num_points, seed, "fresh")
        u_AD, v_ND = critic.embed_x(x_N[:anchors]), critic.embed_y(y_N)
        rows.append(by_negatives(u_AD, v_ND, toy.temperature, draws=draws, seed=seed))
    means = [
        same[0] | {key: fmean(row[key] for row in same) for key in ("mean", "variance")}
        for same in zip(*rows, strict=True)
    ]
    sizes = {"seeds": num_seeds, "anchors": min(anchors, toy.num_points), "draws": draws}
    return {"settings": asdict(toy) | sizes, "true": true_information(), "rows": means}


@torch.no_grad()
def by_negatives(
    u_AD: Tensor,
    v_ND: Tensor,
    temperature: float,
    *,
    draws: int = 32,
    seed: int = 0,
    negatives: Sequence[int] = NEGATIVES,
    omegas: Sequence[float] = OMEGAS,
) -> list[dict[str, Any]]:
    """Mean and variance over draws of the negatives. Row i of both are two views of one sample."""
    require(draws >= 2, "draws", draws, "at least 2")
    positive_A, others_AC = scores(u_AD, v_ND, temperature)
    ordered_AC = others_AC.sort(1).values
    rows = []
    for number in negatives:
        for omega in omegas:
            kept_AM = support(ordered_AC, omega)
            draw_of = (generator(seed, "draw", number, r) for r in range(draws))
            drawn = (draw_scores(kept_AM, number, each) for each in draw_of)
            ratio_RA = torch.stack([log_ratio(positive_A, negatives_AK) for negatives_AK in drawn])
            mean, variance = float(ratio_RA.mean()), float(ratio_RA.var(0).mean())
            rows.append({"negatives": number, "omega": omega, "mean": mean, "variance": variance})
    return rows


def table_study(
    num_seeds: int,
    toy: Toy | None = None,
    *,
    train_each: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Table 5: NCE and CNCE of the toy for each ω, on training points and on fresh points. `critic`
    in the result is "nce" for the critic of a seed that is trained by NCE and measured by every
    estimator, and "own" (with `train_each`) for one per ω, trained by that CNCE."""
    toy = toy or Toy()
    found: dict[tuple[str, int, str], list[float]] = {}
    trained = tuple(PAPER) if train_each else (0,)
    require(num_seeds >= 1, "num_seeds", num_seeds, "at least 1")
    plan = [(seed, omega) for seed in range(num_seeds) for omega in trained]
    for seed, omega in show_progress(plan, len(plan), "Training critics", enabled=progress):
        points = {part: draw_points(toy.num_points, seed, part) for part in ("train", "fresh")}
        critic = train_critic(*points["train"], toy, seed, omega)
        for part, (x_N, y_N) in points.items():
            for name, value in _measure(critic, x_N, y_N, toy, seed, omega):
                found.setdefault((*name, part), []).append(value)
    rows = []
    for (kind, omega, part), values in found.items():
        if kind != "premise":
            spread = stdev(values) if len(values) > 1 else None
            row = {"critic": kind, "omega": omega, "points": part, "mean": fmean(values)}
            rows.append({**row, "stdev": spread, "values": values})
    return {
        "settings": asdict(toy) | {"seeds": num_seeds, "train_each": train_each},
        "true": true_information(),
        "rows": rows,
        "premise": {str(omega): fmean(found["premise", omega, "fresh"]) for omega in PAPER},
        "paper": {str(omega): {"mean": m, "stdev": s} for omega, (m, s) in PAPER.items()},
    }


def _measure(
    critic: Critic, x_N: Tensor, y_N: Tensor, toy: Toy, seed: int, trained: int
) -> Iterator[tuple[tuple[str, int], float]]:
    """Estimates of one critic. All use the same random numbers, see `cnce`."""
    positive_A, others_AC = scores(critic.embed_x(x_N), critic.embed_y(y_N), toy.temperature)
    ordered_AC = others_AC.sort(1).values
    for omega in PAPER if trained == 0 else (trained,):
        kept_AM, draws = support(ordered_AC, omega), generator(seed, "measure")
        estimate = float(
            log_ratio(positive_A, draw_scores(kept_AM, toy.num_negatives, draws)).mean()
        )
        if trained == omega:
            yield ("own", omega), estimate
        if trained == 0:
            yield ("nce", omega), estimate
            yield ("premise", omega), premise(ordered_AC, omega)


# ---- the command


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--study",
        choices=("table", "variance"),
        default="table",
        help="table: estimates for each ω (Table 5); variance: for each number of negatives",
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of runs")
    parser.add_argument("--epochs", type=int, default=100, help="epochs of each critic")
    parser.add_argument(
        "--train-each",
        action="store_true",
        help="table: also train a critic for each ω with its own CNCE (slower)",
    )
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="JSON file for all results")
    options = parser.parse_args(arguments)
    if options.train_each and options.study != "table":
        parser.error("--train-each belongs to --study table")
    toy = Toy(epochs=options.epochs, num_points=options.points)
    if options.study == "table":
        found = table_study(options.seeds, toy, train_each=options.train_each, progress=True)
    else:
        found = variance_study(options.seeds, toy, progress=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"True mutual information: {found['true']:.5f} nats")
    (_print_table if options.study == "table" else _print_variance)(found)


def _print_table(found: dict[str, Any]) -> None:
    settings = found["settings"]
    heads = ("critic", "points", "ω", "paper", "estimate", "premise")
    line = "{:<8}{:<7}{:>4}{:>20}{:>22}{:>9}"
    print(line.format(*heads))
    shown = [row for row in found["rows"] if settings["train_each"] or row["critic"] == "nce"]
    for row in sorted(shown, key=lambda row: str(row["critic"])):
        omega = str(row["omega"])
        holds = omega != "0" and (row["critic"], row["points"]) == ("nce", "fresh")
        print(
            line.format(
                "shared" if row["critic"] == "nce" else "own",
                row["points"],
                "NCE" if omega == "0" else omega,
                _mean_and_deviation(found["paper"][omega]),
                _mean_and_deviation(row),
                f"{found['premise'][omega]:.0%}" if holds else "–",
            )
        )
    print(
        f"Mean ± standard deviation over {settings['seeds']} runs; {settings['num_points']:,}"
        f" points, {settings['num_negatives']} negatives, epochs: {settings['epochs']}.\n"
        "The shared critic is trained by NCE, others by the estimator of the row. Premise: share of"
        " fresh anchors\nwhose negatives all have e^f above its mean, as theorem 3.1 requires."
    )


def _mean_and_deviation(row: dict[str, Any]) -> str:
    digits = ".5f" if abs(row["mean"]) >= 1e-3 else ".1e"
    values = (row["mean"], row["stdev"])
    return " ± ".join(format(value, digits) for value in values if value is not None)


def _print_variance(found: dict[str, Any]) -> None:
    print(f"{'k':>6}{'ω (0: NCE)':>12}{'mean':>10}{'variance':>10}")
    for row in found["rows"]:
        number, omega, mean = row["negatives"], row["omega"], row["mean"]
        print(f"{number:>6,}{omega:>12}{mean:>10.4f}{row['variance']:>10.1e}")
    settings = found["settings"]
    print(
        f"k: number of negatives. Variance over {settings['draws']} draws of the negatives, with"
        f" anchor and positive fixed,\naveraged over anchors: {settings['anchors']}, critics:"
        f" {settings['seeds']}."
    )


if __name__ == "__main__":
    main()
