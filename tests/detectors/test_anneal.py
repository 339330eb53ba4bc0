"""The lower bound of a ring: every policy follows its formula, is exact on resume, and stays between its ends."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kinfolk.detectors import Ring, StartAt
from kinfolk.detectors.anneal import Anneal, Policy
from kinfolk.objectives import NTXent


def lowers(policy: Policy, epochs: int | None, num_epochs: int, jumps: int = 4) -> list[float]:
    anneal, seen = Anneal(policy, 0.0, 0.9, epochs, jumps), []
    for epoch in range(num_epochs):
        anneal.set_progress(epoch, num_epochs)
        seen.append(float(anneal.lower))
    return seen


def test_linear_is_the_paper_s_schedule() -> None:
    kept = [1 - lower for lower in lowers("linear", 100, 300)]
    assert kept[0] == 1.0
    assert kept[50] == pytest.approx(0.55)
    assert kept[100:] == pytest.approx([0.1] * 200)
    assert lowers("linear", None, 300) == lowers("linear", 100, 300)  # a third of the training
    assert lowers("none", None, 3) == [0.9] * 3


def test_steps_are_of_one_size_and_length() -> None:
    assert lowers("step", 8, 10, jumps=4) == pytest.approx([0, 0, 0.225, 0.225, 0.45, 0.45, 0.675, 0.675, 0.9, 0.9])
    assert lowers("step", 3, 4, jumps=3) == pytest.approx([0, 0.3, 0.6, 0.9])


def test_accuracy_drives_it_up_and_down() -> None:
    anneal = Anneal("knn", 0.1, 0.5, 4, 1)
    seen = []
    for accuracy in (0.2, 0.3, 0.4, 0.35, 0.35, 0.36, 0.1, 0.0, 0.0):
        anneal.hear(accuracy)
        seen.append(float(anneal.lower))
    assert seen == pytest.approx([0.1, 0.2, 0.3, 0.2, 0.1, 0.2, 0.1, 0.1, 0.1])


def test_a_rarer_measurement_moves_it_as_far() -> None:
    anneal, seen = Anneal("knn", 0.0, 0.8, 8, 1), []
    for epoch in range(12):
        anneal.set_progress(epoch, 12)
        if epoch % 2 == 1:
            anneal.hear(0.1 * epoch)
            seen.append(float(anneal.lower))
    assert seen == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 0.8])  # all the way in eight epochs, whether measured in each or in every other


def test_a_falling_loss_drives_it_up_in_the_time_given() -> None:
    anneal = Anneal("loss", 0.0, 0.8, 4, 1)
    seen = []
    for epoch in range(7):
        anneal.set_progress(epoch, 7)
        for step in range(10):
            anneal.hear(5 - 0.1 * epoch - 0.01 * step)
        seen.append(float(anneal.lower))
    assert seen == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 0.8, 0.8])  # the first epoch only counts its steps
    anneal.hear(9.0)
    assert float(anneal.lower) == pytest.approx(0.8 - 0.8 / 40)


@given(policy=st.sampled_from(["knn", "loss"]), figures=st.lists(st.floats(0, 10), max_size=40))
def test_it_stays_between_its_ends(policy: Policy, figures: list[float]) -> None:
    anneal = Anneal(policy, 0.2, 0.6, 2, 1)
    for i, figure in enumerate(figures):
        anneal.set_progress(i // 5, 10)
        anneal.hear(figure)
        assert 0.2 <= float(anneal.lower) <= 0.6


@pytest.mark.parametrize("policy", ["none", "linear", "step", "knn", "loss"])
@pytest.mark.parametrize("boundaries", ["exact", "learned"])
def test_save_load_continue_is_uninterrupted(policy: Policy, boundaries: str) -> None:
    def made() -> NTXent:
        return NTXent(0.2, Ring(0.6, 0.9, 16, anneal=policy, anneal_epochs=3, boundaries=boundaries))  # type: ignore[arg-type]

    def steps(loss_fn: NTXent, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            loss_fn.set_progress(step // 4, 4)
            z = torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(step))
            losses.append(loss_fn(z[0], z[1], torch.arange(12) + step % 4).item())
            if step % 4 == 3 and loss_fn.detector is not None and "knn" in loss_fn.detector.hears:
                loss_fn.detector.hear("knn", math.sin(step))
        return losses

    whole, before, after = made(), made(), made()
    wanted = steps(whole, 0, 14)
    got = steps(before, 0, 6)
    after.load_state_dict(before.state_dict())
    got += steps(after, 6, 14)
    assert got == wanted
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(after.state_dict()[name], value, rtol=0, atol=0, equal_nan=True)
    assert any("lower" in name for name in whole.state_dict())


def test_a_warm_up_keeps_it_waiting() -> None:
    detector = StartAt(Ring(0.6, 0.9, anneal="knn", anneal_epochs=2), epoch=2)
    assert detector.hears == {"knn"}
    for epoch, accuracy in enumerate((0.1, 0.2, 0.3, 0.4)):
        detector.set_progress(epoch, 4)
        detector.hear("knn", accuracy)
    assert detector.detector.lower == pytest.approx(0.3)
