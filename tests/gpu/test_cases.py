"""The cases of the GPU checks cover every loss, and their detectors have an effect."""

from __future__ import annotations

import pytest

import kinfolk as kf
from tests.gpu.cases import CASES, steps


def test_every_loss_has_a_case() -> None:
    losses = {name for name in dir(kf) if name.endswith("Loss")}
    assert len(losses) >= 8
    assert losses == {type(case.make(case.num_samples)).__name__ for case in CASES.values()}


@pytest.mark.parametrize("name", [name for name in CASES if "+" in name])
def test_the_detector_has_an_effect(name: str) -> None:
    found, _ = steps(CASES[name], compile=False)
    if name == "NTXent + Cave":  # removes negatives and flags nothing
        plain, _ = steps(CASES["NTXent"], compile=False)
        assert all(abs(a.loss - b.loss) > 0.01 for a, b in zip(found, plain, strict=True))
    else:
        assert all(step.flagged > 0 for step in found)
