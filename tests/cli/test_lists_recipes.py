"""`kinfolk recipes` lists what there is and prints one."""

from __future__ import annotations

import pytest

from kinfolk.cli import main
from kinfolk.training.settings import recipe_names, recipe_path


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["recipes", *words])
    return int(left.value.code or 0)


def test_every_recipe_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in recipe_names())
    assert "SogCLR with GloFND on the bundled digits" in shown


def test_one_recipe_is_printed_with_its_header(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "demo-digits") == 0
    assert (
        capsys.readouterr().out.strip()
        == recipe_path("demo-digits").read_text(encoding="utf-8").strip()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show"], "kinfolk recipes show NAME"),
        (["print"], "kinfolk recipes show NAME"),
        (["show", "demo-digit"], "demo-digits?"),
    ],
)
def test_unknown_recipes_are_refused_in_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    assert message in capsys.readouterr().err
