"""`kinfolk methods` lists all parts of a method."""

from __future__ import annotations

import pytest

from kinfolk.cli import main
from kinfolk.cli.lists import ACTIONS
from kinfolk.detectors import DETECTORS
from kinfolk.frameworks import FRAMEWORKS
from kinfolk.pairs import ACTIONS as KNOWN


def test_everything_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["methods"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    variants = [
        f"{name}:{variant}" for name, kind in DETECTORS.items() for variant in kind.variants
    ]
    assert "positive_margin:absolute" in variants
    for name in (*FRAMEWORKS, *DETECTORS, *variants, *KNOWN):
        assert name in text
    assert "framework[+detector[:variant][:action]]" in text


def test_every_action_is_explained() -> None:
    assert tuple(ACTIONS) == KNOWN
