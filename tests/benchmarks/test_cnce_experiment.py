"""The toy experiment: its data, its critic, and the two studies on small settings."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kinfolk.seeding import generator
from tests.benchmarks.loading import load

study = load("cnce")
SMALL = study.Toy(num_points=300, num_negatives=20, epochs=3)


def test_true_information_is_the_papers() -> None:
    assert study.true_information() == pytest.approx(0.02041, abs=5e-6)


def test_points_have_the_covariance() -> None:
    """Σ = Σ_Z + Σ_ε within 4 standard errors of a covariance: at most √(2·2·2/n)."""
    x, y = study.draw_points(40_000, 0)
    torch.testing.assert_close(
        torch.cov(torch.stack((x, y))),
        torch.tensor([[2.0, 0.4], [0.4, 2.0]]),
        rtol=0,
        atol=4 * math.sqrt(8 / 40_000),
    )


def test_points_and_critic_are_functions_of_the_seed() -> None:
    torch.manual_seed(1)
    before, state = study.Critic(SMALL, 0), torch.get_rng_state()
    torch.manual_seed(2)
    again, other = study.Critic(SMALL, 0), study.Critic(SMALL, 1)
    x, _ = study.draw_points(4, 0)
    assert torch.equal(before.embed_x(x), again.embed_x(x))
    assert not torch.equal(before.embed_x(x), other.embed_x(x))
    assert not torch.equal(x, study.draw_points(4, 0, "fresh")[0])
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())


def test_the_critic_is_the_papers() -> None:
    critic = study.Critic(study.Toy(), 0)
    shapes = [
        (layer.in_features, layer.out_features)
        for layer in critic.of_x
        if isinstance(layer, torch.nn.Linear)
    ]
    assert shapes == [(1, 10), (10, 10), (10, 10), (10, 10), (10, 10)]
    x, y = study.draw_points(6, 0)
    torch.testing.assert_close(critic.embed_y(y).norm(dim=1), torch.ones(6))
    assert not torch.equal(critic.embed_x(x), critic.embed_y(x))


@pytest.mark.parametrize("lower", [0, 50, 90])
def test_negatives_are_above_the_percentile_and_never_the_own(lower: float) -> None:
    u, v = torch.randn(2, 21, 4, generator=generator(0))
    chosen = study.choose_negatives(u[5:8], v, torch.tensor([5, 6, 7]), 500, lower, generator(1))
    for row, own in enumerate((5, 6, 7)):
        others = [j for j in range(21) if j != own]
        others.sort(key=lambda j: float(u[own] @ v[j]))
        assert set(chosen[row].tolist()) == set(others[int(20 * lower / 100) :])


def test_training_raises_what_it_maximises() -> None:
    x, y = study.draw_points(300, 0)
    y = x + 0.3 * y  # much to know, so that three epochs show it
    trained = study.train_critic(x, y, SMALL, 0)
    before, after = (
        study.by_negatives(c.embed_x(x), c.embed_y(y), 0.07, negatives=[20], omegas=[0])[0]
        for c in (study.Critic(SMALL, 0), trained)
    )
    assert after["mean"] > before["mean"] + 0.1


def test_the_table_has_every_critic_and_falls_with_omega() -> None:
    found = study.table_study(2, SMALL, train_each=True)
    rows = {(row["critic"], row["points"], row["omega"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 2 * 2 * len(study.PAPER)
    for part in ("train", "fresh"):
        by_nce = [rows["nce", part, omega]["values"] for omega in study.PAPER]
        assert all(
            later < earlier for run in zip(*by_nce, strict=True) for earlier, later in pairwise(run)
        )
        assert rows["own", part, 0] == {**rows["nce", part, 0], "critic": "own"}
        assert rows["own", part, 95]["values"] != rows["nce", part, 95]["values"]
    assert found["premise"]["0"] == 0.0
    assert found["premise"]["95"] > 0.9
    again = study.table_study(1, SMALL)["rows"]
    assert [row["values"][0] for row in again] == [
        rows[row["critic"], row["points"], row["omega"]]["values"][0] for row in again
    ]
    assert json.loads(json.dumps(found))["true"] == study.true_information()


def test_variance_falls_with_the_number_of_negatives_and_with_the_percentile() -> None:
    found = study.variance_study(1, SMALL, anchors=32, draws=16)
    rows = {(row["negatives"], row["omega"]): row for row in found["rows"]}
    assert {number for number, _ in rows} == set(study.NEGATIVES)
    for number in study.NEGATIVES:
        assert rows[number, 0]["mean"] > rows[number, 50]["mean"] > rows[number, 90]["mean"]
        assert rows[number, 0]["variance"] > rows[number, 90]["variance"]
    for omega in (0, 50, 90):  # as 1/k, to the accuracy of 16 draws for each of 32 anchors
        assert rows[16, omega]["variance"] / rows[1024, omega]["variance"] == pytest.approx(
            64, rel=0.5
        )


def test_one_seed_has_no_spread() -> None:
    assert all(
        row["stdev"] is None
        for row in study.table_study(1, study.Toy(num_points=20, epochs=0))["rows"]
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: study.table_study(0), r"`num_seeds` \(=0\)"),
        (lambda: study.variance_study(0), r"`num_seeds` \(=0\)"),
        (
            lambda: study.by_negatives(torch.ones(2, 2), torch.ones(2, 2), 1.0, draws=1),
            r"`draws` \(=1\)",
        ),
    ],
)
def test_wrong_settings_are_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_the_table_has_the_papers_figures_next_to_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, out = ["--points", "60", "--epochs", "1"], tmp_path / "table.json"
    study.main([*small, "--seeds", "2", "--train-each", "--out", str(out)])
    shown = capsys.readouterr().out
    assert "0.02041 nats" in shown
    assert shown.count("0.01345 ± 0.00100") == 4  # the paper's NCE, for both critics
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["settings"]["epochs"] == 1
    assert all(len(row["values"]) == 2 for row in found["rows"])
    study.main([*small, "--seeds", "1"])
    shown = capsys.readouterr().out
    assert "own " not in shown
    assert "None" not in shown


def test_the_variance_study_prints_every_number_of_negatives(
    capsys: pytest.CaptureFixture[str],
) -> None:
    study.main(["--study", "variance", "--points", "60", "--seeds", "1", "--epochs", "1"])
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("4,096", "  90  ", "0.02041", "anchors: 60"))
