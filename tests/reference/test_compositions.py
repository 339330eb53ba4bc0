"""Losses, gradients, counts and state of compositions are what they were; a change that means to change them records them anew."""

from __future__ import annotations

import json

import pytest

from tests.reference.compositions import DIGEST, attempt, digest, kept

RECORDED: dict[str, list[float]] = json.loads(DIGEST.read_text(encoding="utf-8"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", kept())
def test_nothing_has_changed(name: str) -> None:
    assert digest(attempt(name)) == pytest.approx(RECORDED[name], rel=1e-5, abs=1e-5), "see `compositions.py` for what a number stands for"
