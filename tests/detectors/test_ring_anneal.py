"""The bounds of a ring: every policy follows its formula, is exact on resume, moves at every step,
and stays between its ends."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kinfolk.detectors import Ring, StartAt
from kinfolk.detectors.ring import Anneal, Policy
from kinfolk.objectives import NTXentLoss


def lowers(
    policy: Policy, epochs: int | None, num_epochs: int, jumps: int = 4, steps: int = 1
) -> list[float]:
    loss_fn, seen = (
        NTXentLoss(
            temperature=0.1,
            detector=Ring(
                lower=0.9, upper=0.99, anneal=policy, anneal_epochs=epochs, anneal_jumps=jumps
            ),
        ),
        [],
    )
    for step in range(num_epochs * steps):
        loss_fn.set_progress(step / steps, num_epochs)
        assert isinstance(loss_fn.detector, Ring)
        seen.append(loss_fn.detector.lower)
    return seen


def test_linear_is_the_paper_s_schedule() -> None:
    kept = [1 - lower for lower in lowers("linear", 100, 300)]
    assert kept[0] == 1.0
    assert kept[50] == pytest.approx(0.55)
    assert kept[100:] == pytest.approx([0.1] * 200)
    assert lowers("linear", None, 300) == lowers("linear", 100, 300)  # a third of the training
    assert lowers("none", None, 3) == [0.9] * 3


def test_it_moves_at_every_step() -> None:
    assert lowers("linear", 3, 5, steps=4) == pytest.approx(
        [min(0.9, 0.9 * step / 12) for step in range(20)]
    )
    assert lowers("step", 3, 5, jumps=2, steps=2) == pytest.approx(
        [0, 0, 0, 0.45, 0.45, 0.45, 0.9, 0.9, 0.9, 0.9]
    )
    assert lowers("none", None, 2, steps=2) == [0.9] * 4


@pytest.mark.parametrize("policy", ["linear", "step", "knn", "loss"])
def test_the_upper_bound_moves_with_the_lower_one(policy: Policy) -> None:
    """From 90 to 99 %: the closest tenth of what is above `lower` is excluded at all times,
    whatever drives the bounds."""
    ring = Ring(lower=0.9, upper=0.99, anneal=policy, start_upper=0.9, anneal_epochs=8)
    seen = set()
    for epoch in range(12):
        ring.set_progress(epoch, 12)
        for step in range(3):
            done = epoch + step / 3
            ring.on_metric(policy, -done if policy == "loss" else done)
        assert ring.upper == pytest.approx(1 - 0.1 * (1 - ring.lower))
        seen.add(round(ring.upper, 3))
    assert len(seen) > 2
    assert max(seen) == 0.99
    assert ring.metrics == {"ring_lower": ring.lower, "ring_upper": ring.upper}
    assert Ring(lower=0.0, upper=0.9, anneal="linear", start_upper=1.0).upper == 1.0, (
        "with a lower bound that stays at 0"
    )


def test_a_fixed_upper_bound_stays() -> None:
    ring = Ring(lower=0.9, upper=0.99, anneal="linear", anneal_epochs=4)
    for epoch in (0.0, 1.5, 9.0):
        ring.on_metric("epoch", epoch)
        assert ring.upper == 0.99


def test_a_late_ring_begins_at_its_beginning() -> None:
    loss_fn = NTXentLoss(
        temperature=0.1,
        detector=StartAt(
            Ring(
                lower=0.8,
                upper=0.9,
                anneal="linear",
                start_lower=0.2,
                start_upper=0.5,
                anneal_epochs=4,
            ),
            epoch=6,
        ),
    )
    assert isinstance(loss_fn.detector, StartAt)
    ring, seen = loss_fn.detector.detector, list[tuple[float, float]]()
    assert isinstance(ring, Ring)
    for half in range(24):
        loss_fn.set_progress(half / 2, 12)
        seen.append((ring.lower, ring.upper))
    assert seen[:13] == [(0.2, 0.5)] * 13
    assert [lower for lower, _ in seen[12:20]] == pytest.approx(
        [0.2 + 0.6 * half / 8 for half in range(8)]
    )
    assert seen[20:] == [(0.8, 0.9)] * 4


def test_steps_are_of_one_size_and_length() -> None:
    assert lowers("step", 8, 10, jumps=4) == pytest.approx(
        [0, 0, 0.225, 0.225, 0.45, 0.45, 0.675, 0.675, 0.9, 0.9]
    )
    assert lowers("step", 3, 4, jumps=3) == pytest.approx([0, 0.3, 0.6, 0.9])


def test_accuracy_drives_it_up_and_down() -> None:
    anneal = Anneal("knn", 0.1, 0.5, 4, 1)
    seen = []
    for accuracy in (0.2, 0.3, 0.4, 0.35, 0.35, 0.36, 0.1, 0.0, 0.0):
        anneal.on_metric(accuracy)
        seen.append(anneal.between(anneal.start, anneal.final))
    assert seen == pytest.approx([0.1, 0.2, 0.3, 0.2, 0.1, 0.2, 0.1, 0.1, 0.1])


def test_a_rarer_measurement_moves_it_as_far() -> None:
    anneal, seen = Anneal("knn", 0.0, 0.8, 8, 1), []
    for epoch in range(12):
        anneal.set_progress(epoch, 12)
        if epoch % 2 == 1:
            anneal.on_metric(0.1 * epoch)
            seen.append(anneal.between(anneal.start, anneal.final))
    # all the way in eight epochs, whether measured in each or in every other
    assert seen == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 0.8])


def test_a_falling_loss_drives_it_up_in_the_time_given() -> None:
    anneal = Anneal("loss", 0.0, 0.8, 4, 1)
    seen = []
    for epoch in range(7):
        anneal.set_progress(epoch, 7)
        for step in range(10):
            anneal.on_metric(5 - 0.1 * epoch - 0.01 * step)
        seen.append(anneal.between(anneal.start, anneal.final))
    # the first epoch only counts its steps
    assert seen == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    anneal.on_metric(9.0)
    assert anneal.between(anneal.start, anneal.final) == pytest.approx(0.8 - 0.8 / 40)


@given(policy=st.sampled_from(["knn", "loss"]), figures=st.lists(st.floats(0, 10), max_size=40))
def test_it_stays_between_its_ends(policy: Policy, figures: list[float]) -> None:
    anneal = Anneal(policy, 0.2, 0.6, 2, 1)
    for i, figure in enumerate(figures):
        anneal.set_progress(i // 5, 10)
        anneal.on_metric(figure)
        assert 0.2 <= anneal.between(anneal.start, anneal.final) <= 0.6


@pytest.mark.parametrize("policy", ["none", "linear", "step", "knn", "loss"])
def test_save_load_continue_is_uninterrupted(policy: Policy) -> None:
    start = None if policy == "none" else 0.7

    def made() -> NTXentLoss:
        return NTXentLoss(
            temperature=0.2,
            detector=Ring(
                lower=0.6,
                upper=0.9,
                num_samples=16,
                anneal=policy,
                start_upper=start,
                anneal_epochs=3,
            ),
        )

    def steps(loss_fn: NTXentLoss, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            loss_fn.set_progress(step / 4, 4)
            z = torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(step))
            losses.append(loss_fn(z[0], z[1], torch.arange(12) + step % 4).item())
            if (
                step % 4 == 3
                and loss_fn.detector is not None
                and "knn" in loss_fn.detector.needed_metrics
            ):
                loss_fn.detector.on_metric("knn", math.sin(step))
        return losses

    whole, before, after = made(), made(), made()
    wanted = steps(whole, 0, 14)
    got = steps(before, 0, 6)
    after.load_state_dict(before.state_dict())
    got += steps(after, 6, 14)
    assert got == wanted
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(after.state_dict()[name], value, rtol=0, atol=0, equal_nan=True)
    assert any("done" in name for name in whole.state_dict())


def test_a_warm_up_keeps_it_waiting() -> None:
    detector = StartAt(Ring(lower=0.6, upper=0.9, anneal="knn", anneal_epochs=2), epoch=2)
    assert detector.needed_metrics == {"knn"}
    for epoch, accuracy in enumerate((0.1, 0.2, 0.3, 0.4)):
        detector.set_progress(epoch, 4)
        detector.on_metric("knn", accuracy)
    assert isinstance(detector.detector, Ring)
    assert detector.detector.lower == pytest.approx(0.3)
