"""The toy experiment: its data, its critic, and the two studies on small settings."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from kinfolk.cnce import (
    NEGATIVES,
    PAPER,
    Critic,
    Toy,
    by_negatives,
    choose_negatives,
    draw_points,
    table_study,
    train_critic,
    true_information,
    variance_study,
    views_study,
)
from kinfolk.errors import KinfolkError
from kinfolk.seeding import generator

SMALL = Toy(num_points=300, num_negatives=20, epochs=3)


def test_true_information_is_the_papers() -> None:
    assert true_information() == pytest.approx(0.02041, abs=5e-6)


def test_points_have_the_covariance() -> None:
    """Σ = Σ_Z + Σ_ε within 4 standard errors of a covariance: at most √(2·2·2/n)."""
    x, y = draw_points(40_000, 0)
    torch.testing.assert_close(
        torch.cov(torch.stack((x, y))),
        torch.tensor([[2.0, 0.4], [0.4, 2.0]]),
        rtol=0,
        atol=4 * math.sqrt(8 / 40_000),
    )


def test_points_and_critic_are_functions_of_the_seed() -> None:
    torch.manual_seed(1)
    before, state = Critic(SMALL, 0), torch.get_rng_state()
    torch.manual_seed(2)
    again, other = Critic(SMALL, 0), Critic(SMALL, 1)
    x, _ = draw_points(4, 0)
    assert torch.equal(before.embed_x(x), again.embed_x(x))
    assert not torch.equal(before.embed_x(x), other.embed_x(x))
    assert not torch.equal(x, draw_points(4, 0, "fresh")[0])
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())


def test_the_critic_is_the_papers() -> None:
    critic = Critic(Toy(), 0)
    shapes = [
        (layer.in_features, layer.out_features)
        for layer in critic.of_x
        if isinstance(layer, torch.nn.Linear)
    ]
    assert shapes == [(1, 10), (10, 10), (10, 10), (10, 10), (10, 10)]
    x, y = draw_points(6, 0)
    torch.testing.assert_close(critic.embed_y(y).norm(dim=1), torch.ones(6))
    assert not torch.equal(critic.embed_x(x), critic.embed_y(x))


@pytest.mark.parametrize("lower", [0, 50, 90])
def test_negatives_are_above_the_percentile_and_never_the_own(lower: float) -> None:
    u, v = torch.randn(2, 21, 4, generator=generator(0))
    chosen = choose_negatives(u[5:8], v, torch.tensor([5, 6, 7]), 500, lower, generator(1))
    for row, own in enumerate((5, 6, 7)):
        others = [j for j in range(21) if j != own]
        others.sort(key=lambda j: float(u[own] @ v[j]))
        assert set(chosen[row].tolist()) == set(others[int(20 * lower / 100) :])


def test_training_raises_what_it_maximises() -> None:
    x, y = draw_points(300, 0)
    y = x + 0.3 * y  # much to know, so that three epochs show it
    trained = train_critic(x, y, SMALL, 0)
    before, after = (
        by_negatives(c.embed_x(x), c.embed_y(y), 0.07, negatives=[20], omegas=[0])[0]
        for c in (Critic(SMALL, 0), trained)
    )
    assert after["mean"] > before["mean"] + 0.1


def test_the_table_has_every_critic_and_falls_with_omega() -> None:
    found = table_study(2, SMALL, train_each=True)
    rows = {(row["critic"], row["points"], row["omega"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 2 * 2 * len(PAPER)
    for part in ("train", "fresh"):
        by_nce = [rows["nce", part, omega]["values"] for omega in PAPER]
        assert all(
            later < earlier for run in zip(*by_nce, strict=True) for earlier, later in pairwise(run)
        )
        assert rows["own", part, 0] == {**rows["nce", part, 0], "critic": "own"}
        assert rows["own", part, 95]["values"] != rows["nce", part, 95]["values"]
    assert found["premise"]["0"] == 0.0
    assert found["premise"]["95"] > 0.9
    again = table_study(1, SMALL)["rows"]
    assert [row["values"][0] for row in again] == [
        rows[row["critic"], row["points"], row["omega"]]["values"][0] for row in again
    ]
    assert json.loads(json.dumps(found))["true"] == true_information()


def test_variance_falls_with_the_number_of_negatives_and_with_the_percentile() -> None:
    found = variance_study(1, SMALL, anchors=32, draws=16)
    rows = {(row["negatives"], row["omega"]): row for row in found["rows"]}
    assert {number for number, _ in rows} == set(NEGATIVES)
    for number in NEGATIVES:
        assert rows[number, 0]["mean"] > rows[number, 50]["mean"] > rows[number, 90]["mean"]
        assert rows[number, 0]["variance"] > rows[number, 90]["variance"]
    for omega in (0, 50, 90):  # as 1/k, to the accuracy of 16 draws for each of 32 anchors
        assert rows[16, omega]["variance"] / rows[1024, omega]["variance"] == pytest.approx(
            64, rel=0.5
        )


def test_views_of_two_files_equal_views_in_memory(tmp_path: Path) -> None:
    u, v = torch.randn(2, 200, 8, generator=generator(0))
    for name, array in (("u", u), ("v", u + 0.1 * v)):
        np.save(tmp_path / f"{name}.npy", array.numpy())
    found = views_study(tmp_path / "u.npy", tmp_path / "v.npy", 0.5, anchors=20, draws=4)
    assert found["rows"] == by_negatives(u[:20], u + 0.1 * v, 0.5, draws=4)
    assert found["rows"][0]["mean"] > 0.5  # the views are nearly the same: much is known


def test_arrays_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 2)))
    np.save(tmp_path / "b.npy", np.zeros((4, 2)))
    np.save(tmp_path / "c.npy", np.full((3, 2), np.nan))
    (tmp_path / "d.npy").write_text("no array")
    for other, message in (
        ("b", r"shapes \(3, 2\) and \(4, 2\)"),
        ("c", "not finite"),
        ("d", "is not a readable"),
        ("e", "there is no file"),
    ):
        with pytest.raises(KinfolkError, match=message):
            views_study(tmp_path / "a.npy", tmp_path / f"{other}.npy", 0.5)


def test_one_seed_has_no_spread() -> None:
    assert all(row["stdev"] is None for row in table_study(1, Toy(num_points=20, epochs=0))["rows"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: table_study(0), r"`num_seeds` \(=0\)"),
        (lambda: variance_study(0), r"`num_seeds` \(=0\)"),
        (
            lambda: by_negatives(torch.ones(2, 2), torch.ones(2, 2), 1.0, draws=1),
            r"`draws` \(=1\)",
        ),
    ],
)
def test_wrong_settings_are_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
