"""The estimators equal the paper's equations, keep their order draw by draw, and bound the mutual
information in expectation."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, stdev

import pytest
import torch
from torch import Tensor

from kinfolk.seeding import generator
from tests.benchmarks.loading import load
from tests.reference import cnce as reference

study = load("cnce")

OMEGAS = (0, 10, 25, 50, 75, 90, 95)


def some_scores(anchors: int = 40, candidates: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    draws = generator(seed, "scores")
    return tuple(
        torch.randn(*shape, generator=draws, dtype=torch.float64)
        for shape in ((anchors,), (anchors, candidates))
    )  # type: ignore[return-value]


def test_z_equals_the_equation() -> None:
    positive, others = some_scores(5, 7)
    expected = [
        reference.z(float(p), row.tolist()) for p, row in zip(positive, others, strict=True)
    ]
    assert study.log_ratio(positive, others).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("lower", [0, 30, 50, 80])
def test_the_estimate_tends_to_the_expectation_over_all_draws(lower: float) -> None:
    positive, others = some_scores(3, 6)
    expected = reference.expectation(positive.tolist(), others.tolist(), 2, lower)
    drawn = [float(study.cnce(positive, others, 2, generator(seed), lower)) for seed in range(1000)]
    assert abs(fmean(drawn) - expected) <= 4 * stdev(drawn) / math.sqrt(len(drawn)) + 1e-12


def test_nce_is_cnce_from_the_lowest_percentile() -> None:
    positive, others = some_scores()
    assert float(study.nce(positive, others, 20, generator(1))) == float(
        study.cnce(positive, others, 20, generator(1), 0.0)
    )
    assert float(study.nce(positive, others, 20, generator(1))) != float(
        study.nce(positive, others, 20, generator(2))
    )


def test_the_order_of_candidates_is_of_no_consequence() -> None:
    positive, others = some_scores()
    mixed = others[:, torch.randperm(others.shape[1], generator=generator(3))]
    assert float(study.cnce(positive, mixed, 20, generator(1), 50)) == float(
        study.cnce(positive, others, 20, generator(1), 50)
    )


def test_a_constant_critic_knows_nothing() -> None:
    assert float(
        study.cnce(torch.full((4,), 3.0), torch.full((4, 9), 3.0), 5, generator(0), 50)
    ) == pytest.approx(0, abs=1e-6)


def test_large_scores_stay_finite_and_z_stays_below_log_k() -> None:
    ratio = study.log_ratio(torch.tensor([1e4, -1e4]), torch.zeros(2, 9))
    assert ratio.tolist() == pytest.approx([math.log(10), -1e4 + math.log(10 / 9)])


@pytest.mark.parametrize("seed", range(5))
def test_cnce_falls_with_the_percentile_in_every_draw(seed: int) -> None:
    positive, others = some_scores(seed=seed)
    estimates = [
        float(study.cnce(positive, others, 30, generator(seed), omega)) for omega in OMEGAS
    ]
    assert all(later < earlier for earlier, later in pairwise(estimates))


def test_cnce_below_the_mean_is_no_bound() -> None:
    """What theorem 3.1 excludes: a ring of easy negatives, which claims more than there is."""
    # independent: there is nothing to know
    x, y = torch.randn(2, 400, generator=generator(0), dtype=torch.float64)
    positive, others = off_diagonal(3 * x[:, None] * y[None, :])
    assert float(study.nce(positive, others, 50, generator(1))) < 0
    assert float(study.cnce(positive, others, 50, generator(1), 0, 20)) > 0.1


def off_diagonal(score_NN: Tensor) -> tuple[Tensor, Tensor]:
    own = torch.eye(len(score_NN), dtype=torch.bool)
    return score_NN[own], score_NN[~own].view(len(score_NN), -1)


@pytest.fixture(scope="module")
def best_critic() -> dict[int, list[float]]:
    """ω -> estimates by the best critic on 30 independent draws of 300 points of the toy."""
    found: dict[int, list[float]] = {omega: [] for omega in OMEGAS}
    for seed in range(30):
        x, y = (part.double() for part in study.draw_points(300, seed, "test"))
        positive, others = off_diagonal(reference.log_density_ratio(x[:, None], y[None, :]))
        ordered = others.sort(1).values
        for omega in OMEGAS:
            found[omega].append(
                float(
                    study.log_ratio(
                        positive,
                        study.draw_scores(study.support(ordered, omega), 100, generator(seed)),
                    ).mean()
                )
            )
    return found


def test_nce_reaches_the_information_with_the_best_critic(
    best_critic: dict[int, list[float]],
) -> None:
    """Within 4 standard errors, which are less than half of I: neither 0 nor a normaliser off by
    one would pass."""
    error = stdev(best_critic[0]) / math.sqrt(len(best_critic[0]))
    assert 4 * error < study.true_information() / 2
    assert abs(fmean(best_critic[0]) - study.true_information()) < 4 * error


def test_bounds_fall_as_omega_grows(best_critic: dict[int, list[float]]) -> None:
    means = [fmean(best_critic[omega]) for omega in OMEGAS]
    error = stdev(best_critic[0]) / math.sqrt(len(best_critic[0]))
    assert means[0] <= study.true_information() + 4 * error
    assert all(later < earlier for earlier, later in pairwise(means))
    assert means[-1] < 0  # with one critic for all, CNCE is no estimate of I, only a bound


def test_the_premise_counts_critics_above_the_mean() -> None:
    ordered = torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0]]).double()
    mean = math.log(sum(math.exp(score) for score in range(4)) / 4)
    assert 1 < mean < 3
    # equal scores are never strictly above their mean
    assert [study.premise(ordered, omega) for omega in (0, 25, 75)] == [0.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("size", "lower", "upper", "expected"),
    [
        (10, 0, 100, (0, 10)),
        (10, 95, 100, (9, 10)),
        (10, 99.9, 100, (9, 10)),
        (10, 25, 75, (2, 8)),
        (1, 50, 60, (0, 1)),
        (3, 1, 2, (0, 1)),
    ],
)
def test_ranks_between_percentiles(
    size: int, lower: float, upper: float, expected: tuple[int, int]
) -> None:
    assert study.bounds(size, lower, upper) == expected
    assert (
        study.support(torch.arange(float(size))[None], lower, upper).shape[1]
        == expected[1] - expected[0]
    )


def test_draws_are_uniform_over_what_is_kept() -> None:
    drawn = study.draw_scores(torch.arange(4.0)[None], 40_000, generator(0)).long().flatten()
    counts = torch.bincount(drawn, minlength=4).double()
    # chi square, 3 degrees of freedom, 0.1 %
    assert float(((counts - 10_000) ** 2 / 10_000).sum()) < 16.3


def test_scores_are_cosines_over_the_temperature() -> None:
    u, v = torch.randn(2, 5, 3, generator=generator(0))
    positive, others = study.scores(u[:2], v, 0.5)
    cosine = (
        torch.nn.functional.cosine_similarity(u[:2, None].double(), v[None].double(), dim=2) / 0.5
    )
    torch.testing.assert_close(positive, cosine.diagonal())
    torch.testing.assert_close(
        others, torch.stack((cosine[0, [1, 2, 3, 4]], cosine[1, [0, 2, 3, 4]]))
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: study.bounds(10, 60, 50), r"`lower` \(=60\) and `upper` \(=50\)"),
        (lambda: study.bounds(10, 100), "percentiles"),
        (lambda: study.bounds(0, 10), r"`num_candidates` \(=0\)"),
        (lambda: study.draw_scores(torch.zeros(1, 2), 0, generator(0)), r"`num_negatives` \(=0\)"),
        (lambda: study.log_ratio(torch.zeros(2), torch.zeros(3, 2)), "shapes"),
        (lambda: study.scores(torch.zeros(3, 2), torch.zeros(2, 2), 1.0), "A <= N"),
        (
            lambda: study.scores(torch.zeros(2, 2), torch.zeros(2, 2), 0.0),
            r"`temperature` \(=0.0\)",
        ),
    ],
)
def test_wrong_arguments_are_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
