"""Losses, gradients, counts and state of compositions are what they were; a change that means to
change them records them anew."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kinfolk.frameworks import FRAMEWORKS
from tests.reference.compositions import (
    DIGEST,
    SIZES,
    attempt,
    digest,
    kept,
    kept_on_ranks,
    on_ranks,
)

RECORDED: dict[str, list[float]] = json.loads(DIGEST.read_text(encoding="utf-8"))


def check(name: str, found: dict[str, Any]) -> None:
    """Up to the rounding of float64; see `compositions.py` for what a number stands for. A new
    detector, which has no record yet, has only to run or to be refused with a reason."""
    numbers = digest(found)
    assert numbers == pytest.approx(RECORDED.get(name, numbers), rel=1e-12, abs=1e-12), name


def test_there_is_a_record_for_nearly_all() -> None:
    assert len(RECORDED.keys() & set(kept())) > 0.9 * len(kept())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nothing_has_changed(framework: str) -> None:
    for name in kept():
        if re.split("[+ ,]", name)[0] == framework:
            check(name, attempt(name))


def test_every_recorded_composition_is_of_a_framework() -> None:
    others = set(FRAMEWORKS) - {"pairs"}  # its loss is that of clip
    assert {re.split("[+ ,]", name)[0] for name in kept()} == others


def test_nothing_has_changed_on_two_ranks() -> None:
    found = on_ranks(kept_on_ranks())
    assert len(found) == len(SIZES) * len(kept_on_ranks())
    for name, value in found.items():
        check(name, value)
