"""The door: help without weight, one message for each error, the right exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from kinfolk.cli import app as application
from kinfolk.cli import main
from kinfolk.errors import InterruptedRunError, KinfolkError, KinfolkWarning, UsageError

# pydantic is typer's own
HEAVY = {
    "torch",
    "numpy",
    "lightning",
    "sklearn",
    "scipy",
    "faiss",
    "plotly",
    "pyarrow",
    "PIL",
    "pandas",
}
VERBS: tuple[str, ...] = (
    "train",
    "sweep",
    "eval",
    "embed",
    "report",
    "data",
    "methods",
    "recipes",
    "settings",
)
VERBS += ("audit", "advise", "compare", "export")


def left(*arguments: str) -> int:
    """The exit code of a command run in this process."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def test_help_imports_nothing_heavy() -> None:
    """One fresh process shows all help pages and names, for each, the heavy packages that are
    loaded by then."""
    commands = [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)]
    script = f"""
import contextlib, io, json, sys
from kinfolk.cli import main
heavy, shown = {{}}, {{}}
for arguments in {commands!r}:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main(arguments)
        except SystemExit as left:
            assert not left.code, left.code
    shown[" ".join(arguments)] = out.getvalue()
    heavy[" ".join(arguments)] = sorted({{name.partition(".")[0] for name in sys.modules}} & {HEAVY!r})
print(json.dumps([shown, heavy]))
"""  # noqa: E501
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    shown, heavy = json.loads(result.stdout)
    assert heavy == {" ".join(arguments): [] for arguments in commands}
    assert all(text.strip() for text in shown.values())
    assert all(f"Usage: kinfolk {verb}" in shown[f"{verb} --help"] for verb in VERBS)


def test_help_names_every_verb_and_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert left("--help") == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in VERBS)
    assert "Examples" in text


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["trian"], "train"),
        (["train", "--metod", "simclr", "--out", "x"], "--method"),
        (["train"], "--out"),
    ],
)
def test_wrong_options_exit_with_2_and_a_hint(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert left(*arguments) == 2
    assert hint in capsys.readouterr().err


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def app(*arguments: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr("kinfolk.cli.app", app)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            UsageError("`alpha` (=1.3) must be in [0, 1]"),
            2,
            "Error: `alpha` (=1.3) must be in [0, 1]",
        ),
        (
            KinfolkError("runs/[bold]x[/bold] :smile: has no model"),
            1,
            "Error: runs/[bold]x[/bold] :smile: has no model",
        ),
        (
            RuntimeError("out of memory.\nsecond line"),
            1,
            "Error: RuntimeError: out of memory. Run again with --debug to see the traceback.",
        ),
        (
            AssertionError(),
            1,
            "Error: AssertionError. Run again with --debug to see the traceback.",
        ),
        (KeyboardInterrupt(), 130, "Interrupted: ended by Ctrl-C."),
        (SystemExit(130), 130, "Interrupted: ended by Ctrl-C."),
    ],
)
def test_an_error_is_one_message(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    raising(monkeypatch, error)
    assert left("report") == code
    shown = capsys.readouterr()
    assert shown.err.strip() == message
    assert shown.out == ""


def test_a_warning_is_printed_once_per_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app(*arguments: Any, **settings: Any) -> None:
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn("the run is not finished", KinfolkWarning, stacklevel=1)

    monkeypatch.setattr("kinfolk.cli.app", app)
    for _ in range(2):
        monkeypatch.setattr("warnings.showwarning", warnings.showwarning)
        assert left("report") == 0
        assert capsys.readouterr().err == "Warning: the run is not finished\n"


def test_debug_shows_the_traceback_before_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, UsageError("wrong"))
    assert left("report", "--debug") == 2
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert text.rstrip().endswith("Error: wrong")


def test_every_command_is_known_to_these_tests() -> None:
    import typer

    commands = typer.main.get_command(application).commands  # type: ignore[attr-defined]
    assert set(commands) == set(VERBS)


@pytest.fixture
def own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_while_a_training_stops_changes_neither_message_nor_code(
    own_handler: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app(*arguments: Any, **settings: Any) -> None:
        before = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            raise InterruptedRunError("the training was ended by Ctrl-C", signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, before)  # as Lightning does at the end of a training
            press_ctrl_c()

    monkeypatch.setattr("kinfolk.cli.app", app)
    assert left("train") == 130
    assert capsys.readouterr().err.strip() == "Interrupted: the training was ended by Ctrl-C"


def test_an_interruption_that_became_another_error_is_still_one(
    own_handler: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app(*arguments: Any, **settings: Any) -> None:
        try:
            raise InterruptedRunError("the training was ended", signal.SIGTERM)
        except InterruptedRunError:
            raise RuntimeError("unexpected position in the file") from None

    monkeypatch.setattr("kinfolk.cli.app", app)
    assert left("train") == 143
    assert capsys.readouterr().err.strip() == "Interrupted: the training was ended"


def test_only_the_first_ctrl_c_counts(
    own_handler: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app(*arguments: Any, **settings: Any) -> None:
        try:
            press_ctrl_c()
        finally:
            press_ctrl_c()

    monkeypatch.setattr("kinfolk.cli.app", app)
    assert left("audit") == 130
    assert capsys.readouterr().err.strip() == "Interrupted: ended by Ctrl-C."
    press_ctrl_c()  # during Python's shutdown
