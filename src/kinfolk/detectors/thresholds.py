"""Step rules that learn one similarity threshold λ per sample, and the exact quantile of a batch.

A share α of all negatives of the sample exceeds λ. A visit shows n of them.

    sgd       λ ← λ − lr (α − p)     p: the share of the n negatives that exceeds λ
    adam      the same gradient with Adam; the bias correction uses the sample's number of updates
    tracking  a first visit (σ = 0) sets μ and σ; π starts as in a normal distribution.
      1. v, s: mean v of the similarities and their spread, the mean of (similarity − v)₊
         μ ← v + (1 − w) [μ − v],  σ ← s + (1 − w) [σ − s]     [ ]: limited to ± kσ / √n
      2. Candidates above the level μ + σ (π + cβ) are flagged: f of them; αn are expected.
      3. π ← π + β (step(f, αn) + ηc)     β: mean excess over the quantile in a normal distribution
         λ is the level of step 2 plus σβ step(f, αn): all of the drift, of which π keeps a part
      4. c ← c + η step(Σf, Σαn)          sums over the batch: a drift that all samples share

step(f, e) = m / (m + 6) · (f / e − 1), at most 1.5, with m = max(1, e). Steps cancel where f is e
on average, for any distribution. π, β and c are in units of σ, so λ moves with a shift or scaling
of all similarities. A visit's count does not move its own level, which with αn < 1 would rise just
when there is something to flag.

Dimension key: b samples, V views, C candidates, M similarities, F fields of the state.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Moments = tuple[Tensor, Tensor, Tensor]
Rule = Literal["tracking", "adam", "sgd"]
Init = Literal["one", "quantile"]
FIELDS: dict[Rule, tuple[str, ...]] = {  # state of a sample
    "tracking": ("threshold", "place", "mean", "spread"),
    "adam": ("threshold", "visits", "m", "v"),
    "sgd": ("threshold", "visits"),
}

_RATE = 0.02  # w: a mean over some 50 visits; larger real changes exceed the limit k anyway
_MEAN_NOISE, _SPREAD_NOISE = 10.0, 4.0  # k: at least four standard errors; more is a real change
_EVIDENCE = 6.0  # flags that past visits count for: fewer follow faster, more leave less noise
_LARGEST = 1.5  # step up: steps down are at most 1, so a larger one would take long to undo
_DRIFT = 0.3  # η: a larger one oscillates, a smaller one lags behind an encoder that moves fast
_COLUMNS = 4096  # similarities suffice for mean and spread; of twice as many, every few are read


def normal(alpha: float) -> tuple[float, float]:
    """π and β of a normal distribution, whose spread is 1 / √(2π) of its standard deviation."""
    share = torch.tensor(alpha).double().clamp(1e-30, 0.999)
    level, root = -torch.special.ndtri(share), math.sqrt(2 * math.pi)
    return float(root * level), float(torch.exp(-level.square() / 2) / share - root * level)


def descend(
    state_bF: Tensor,
    share_b: Tensor,
    alpha: float,
    lr: float,
    betas: tuple[float, ...] | None,
    first_b: Tensor | None,
) -> Tensor:
    """(b, F) the state after one step of "adam", or of "sgd" without `betas`. `first_b`: λ after a
    first visit, which then does not learn."""
    visits_b, gradient_b = state_bF[:, 1] + 1, alpha - share_b
    step_b, averages = lr * gradient_b, []
    if betas is not None:
        updates_b = visits_b if first_b is None else (visits_b - 1).clamp(min=1)
        (one, two), (_, _, m_b, v_b) = betas, state_bF.unbind(1)
        m_b = one * m_b + (1 - one) * gradient_b
        v_b = two * v_b + (1 - two) * gradient_b.square()
        scale_b = (v_b / (1 - two**updates_b)).sqrt() + 1e-8
        step_b, averages = lr * (m_b / (1 - one**updates_b)) / scale_b, [m_b, v_b]
    new_bF = torch.stack([(state_bF[:, 0] - step_b).clamp(-1, 1), visits_b, *averages], 1)
    if first_b is None:
        return new_bF
    first = (first_b, visits_b, *state_bF.unbind(1)[2:])
    return torch.stack(first, 1).where(visits_b.unsqueeze(1) == 1, new_bF)


def moments(sim_bVC: Tensor, n_b: Tensor) -> Moments:
    """(b,) mean, spread and number of the similarities above −2; others are not negatives."""
    if (columns := sim_bVC.shape[1] * sim_bVC.shape[2]) >= 2 * _COLUMNS:
        sim_bVC = sim_bVC[..., :: columns // _COLUMNS]
        n_b = (sim_bVC > -2).sum((1, 2))
    sim_bVC = sim_bVC.clamp(min=-2)  # a copy, in which the others are −2
    others_b = sim_bVC.shape[1] * sim_bVC.shape[2] - n_b
    mean_b = (sim_bVC.sum((1, 2)) + 2 * others_b) / n_b
    spread_b = sim_bVC.sub_(mean_b.view(-1, 1, 1)).relu_().sum((1, 2)) / n_b
    return mean_b, spread_b, n_b


def exceeds(sim_bVC: Tensor, level_b: Tensor) -> Tensor:
    """(b, V, C); nothing exceeds a level of 1, although rounding makes similarities of
    1.0000001."""
    level_b = level_b.masked_fill(level_b >= 1, torch.inf)
    return sim_bVC > level_b.to(sim_bVC.dtype).view(-1, 1, 1)


def share_above(sim_bVC: Tensor, n_b: Tensor, level_b: Tensor) -> Tensor:
    over_b = exceeds(sim_bVC, level_b).sum((1, 2), dtype=torch.int32)
    return over_b.to(level_b.dtype) / n_b


def follow(mean_b: Tensor, spread_b: Tensor, now: Moments) -> tuple[Tensor, Tensor]:
    """Step 1: the new μ and σ."""
    now_mean_b, now_spread_b, n_b = (x.to(mean_b.dtype) for x in now)
    error_b, found = spread_b / n_b.sqrt(), []
    for old_b, now_b, noise in (
        (mean_b, now_mean_b, _MEAN_NOISE),
        (spread_b, now_spread_b, _SPREAD_NOISE),
    ):
        far_b = noise * error_b
        found.append(now_b.lerp(old_b.clamp(now_b - far_b, now_b + far_b), 1 - _RATE))
    return found[0], found[1]


def step(flags: Tensor, expected: Tensor) -> Tensor:
    """The rise of a level in units of β; NaN if nothing is flagged or expected."""
    m = expected.clamp(min=1)
    return (m / (m + _EVIDENCE) * (flags / expected - 1)).clamp(max=_LARGEST)


def track(
    sim_bVC: Tensor, n_b: Tensor, state_b4: Tensor, drift: Tensor, alpha: float, tail: float
) -> tuple[Tensor, Tensor]:
    """Steps 1 to 3: (b, V, C) the candidates above the level, and (b, 6) the new state, flags and
    expected flags (0 at a first visit, which does not move c). NaN without negatives."""
    _, place_b, mean_b, spread_b = state_b4.unbind(1)
    shift, was_visited_b = drift * tail, spread_b > 0
    mean_b, spread_b = follow(mean_b, spread_b, moments(sim_bVC, n_b))
    level_b = mean_b + spread_b * (place_b + shift)
    over_bVC, expected_b = exceeds(sim_bVC, level_b), alpha * n_b.to(level_b.dtype)
    flags_b = over_bVC.sum((1, 2), dtype=torch.int32).to(level_b.dtype)
    rise_b = tail * step(flags_b, expected_b)
    new = [level_b + spread_b * rise_b, place_b + rise_b + _DRIFT * shift, mean_b, spread_b]
    new += [flags_b * was_visited_b, expected_b * was_visited_b]
    return over_bVC, torch.stack(new, 1)


def next_drift(drift: Tensor, counts_b2: Tensor) -> Tensor:
    """Step 4."""
    return drift + _DRIFT * step(*counts_b2.nansum(0)).nan_to_num(0.0)


def batch_quantile(sim_bM: Tensor, n_b: Tensor, alpha: float) -> Tensor:
    """(b,) the (1 − α) quantile of the n finite entries of each row, interpolated as
    `torch.quantile` does; 1 where there are none."""
    last_b, width = (n_b.long() - 1).clamp(min=0), sim_bM.shape[1]
    place_b = alpha * last_b.double()
    first_b = place_b.floor().long()
    top_bK = sim_bM.topk(min(int(alpha * (width - 1)) + 2, width), dim=1).values.double()
    places_b2 = torch.stack((first_b, torch.minimum(first_b + 1, last_b)), 1)
    upper_b, lower_b = top_bK.gather(1, places_b2).unbind(1)
    return torch.lerp(upper_b, lower_b, place_b - first_b).where(n_b > 0, 1.0)
