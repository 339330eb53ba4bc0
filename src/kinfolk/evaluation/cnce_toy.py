"""The toy of appendix B of the CNCE paper: two correlated Gaussian variables whose mutual information is known, and a critic for them.

(X, Y) = Z + ε with Z ~ N(0, Σ_Z), ε ~ N(0, Σ_ε) is Gaussian with covariance Σ = Σ_Z + Σ_ε, hence

    I(X; Y) = −½ · log(1 − Σ_12² / (Σ_11 · Σ_22)) = 0.02041.

The critic is f(x, y) = ⟨g(x), h(y)⟩ / temperature: two perceptrons of five linear layers, ten units wide, with ReLU.

What the paper leaves open, and what is done here: two encoders, outputs of ten numbers (the hidden width) of unit norm (section 2),
temperature 0.07 (section 5). In place of a memory bank all points are embedded anew at each step, so that no embedding is stale and both
encoders have a gradient. A point's own partner is never among its negatives. Negatives are drawn with replacement: the theorem's are i.i.d.

Dimension key: N points, B batch, K negatives, D embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kinfolk.data.seeding import derive_seed, generator
from kinfolk.evaluation.cnce import bounds, log_ratio

SIGMA_Z = ((1.0, -0.5), (-0.5, 1.0))
SIGMA_EPSILON = ((1.0, 0.9), (0.9, 1.0))


@dataclass(frozen=True)
class Toy:
    """Settings of the toy; the defaults are the paper's, and for the temperature that of its other experiments."""

    num_points: int = 2000
    num_negatives: int = 100
    epochs: int = 100
    batch_size: int = 128
    lr: float = 0.03
    width: int = 10
    layers: int = 5
    temperature: float = 0.07

    def __post_init__(self) -> None:
        for name, least in (("num_points", 2), ("num_negatives", 1), ("epochs", 0), ("batch_size", 1), ("width", 1), ("layers", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` (={getattr(self, name)}) must be at least {least}")
        for name in ("lr", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` (={getattr(self, name)}) must be above 0")


def true_information() -> float:
    """I(X; Y) in nats, from the covariance."""
    sigma = torch.tensor(SIGMA_Z, dtype=torch.float64) + torch.tensor(SIGMA_EPSILON, dtype=torch.float64)
    return -0.5 * math.log(1 - float(sigma[0, 1] * sigma[1, 0] / (sigma[0, 0] * sigma[1, 1])))


def draw_points(num_points: int, seed: int, *key: int | str) -> tuple[Tensor, Tensor]:
    """(N,), (N,): x and y of `num_points` draws of Z + ε, a function of seed and key."""
    parts = []
    for name, sigma in (("z", SIGMA_Z), ("epsilon", SIGMA_EPSILON)):
        root = torch.linalg.cholesky(torch.tensor(sigma, dtype=torch.float64))
        parts.append(torch.randn(num_points, 2, dtype=torch.float64, generator=generator(seed, "toy", name, *key)) @ root.T)
    both_N2 = (parts[0] + parts[1]).float()
    return both_N2[:, 0].clone(), both_N2[:, 1].clone()


class Critic(nn.Module):
    """The two encoders. Their weights are a function of `seed`, whatever random numbers were drawn before."""

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
    """One number in, `width` numbers out, `layers` linear layers with ReLU between them."""
    parts: list[nn.Module] = [nn.Linear(1, width)]
    for _ in range(layers - 1):
        parts += [nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(*parts)


def train_critic(
    x_N: Tensor, y_N: Tensor, toy: Toy, seed: int, lower: float = 0.0, after_epoch: Callable[[], object] | None = None
) -> Critic:
    """A critic that maximises NCE on the points, or with `lower` CNCE with negatives above that percentile of its own scores."""
    critic = Critic(toy, seed)
    optimizer = torch.optim.Adam(
        critic.parameters(), lr=toy.lr, weight_decay=0.0, fused=True
    )  # one call in place of hundreds of small ones
    for epoch in range(toy.epochs):
        draws = generator(seed, "epoch", epoch)
        order_N = torch.randperm(len(x_N), generator=draws)
        for start in range(0, len(x_N), toy.batch_size):
            batch_B = order_N[start : start + toy.batch_size]
            u_BD, v_ND = critic.embed_x(x_N[batch_B]), critic.embed_y(y_N)
            negatives_BK = choose(u_BD.detach(), v_ND.detach(), batch_B, toy.num_negatives, lower, draws)
            positive_B = (u_BD * v_ND[batch_B]).sum(1) / toy.temperature
            negative_BK = torch.bmm(v_ND[negatives_BK], u_BD[:, :, None]).squeeze(2) / toy.temperature
            optimizer.zero_grad()
            torch.autograd.backward(-log_ratio(positive_B, negative_BK).mean())
            optimizer.step()
        if after_epoch is not None:
            after_epoch()
    return critic.requires_grad_(False)


def choose(u_BD: Tensor, v_ND: Tensor, own_B: Tensor, num_negatives: int, lower: float, draws: torch.Generator) -> Tensor:
    """(B, K) points drawn from those above the percentile `lower` of each anchor's scores, never the anchor's own."""
    first, end = bounds(len(v_ND) - 1, lower)
    if lower == 0:
        index_BK = torch.randint(end, (len(own_B), num_negatives), generator=draws)
        return index_BK + (index_BK >= own_B[:, None])  # the own point is left out by a step over it
    score_BN = u_BD @ v_ND.T
    score_BN[torch.arange(len(own_B)), own_B] = -torch.inf  # the lowest of all, hence rank 0
    order_BN = torch.from_numpy(np.argpartition(score_BN.numpy(), 1 + first, axis=1))  # several times faster than torch.topk on a CPU
    rank_BK = 1 + first + torch.randint(end - first, (len(own_B), num_negatives), generator=draws)
    return order_BN.gather(1, rank_BK)
