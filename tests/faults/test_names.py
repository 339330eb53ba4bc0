"""Names that others chose: line breaks, escape sequences of a terminal, beginnings of formulas."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from kinfolk.cli import main
from kinfolk.data.prepare import read_quarantine, write_quarantine
from kinfolk.errors import (
    InterruptedRunError,
    KinfolkError,
    csv_text,
    escape_cell,
    printable,
    short,
    unescape_cell,
)
from kinfolk.report import write_report
from kinfolk.training.checkpoint import CheckpointSaver
from kinfolk.training.train import train
from tests.faults.methods import TINY

NAMES = (
    "a\rb",
    "\x1b[2J\x1b]0;title\x07",
    "=1+1",
    "@SUM(A1)",
    "-2",
    "tab\there",
    "new\nline",
    'quote"',
    "‮right",
    "\\back",
)
texts = st.text(st.characters(exclude_categories=()), max_size=20)


@given(texts)
def test_a_cell_gives_its_text_back_and_is_no_formula(text: str) -> None:
    cell = escape_cell(text)
    assert unescape_cell(cell) == text
    assert cell.isprintable()
    assert cell[:1] not in ("=", "+", "-", "@")


@given(texts, texts)
def test_no_two_texts_have_one_cell(one: str, other: str) -> None:
    assert (escape_cell(one) == escape_cell(other)) == (one == other)


@given(st.lists(st.tuples(texts, texts), max_size=5))
def test_a_csv_file_has_a_line_for_each_row(rows: list[tuple[str, str]]) -> None:
    text = csv_text(("path", "reason"), rows)
    assert text.count("\n") == len(rows) + 1
    assert [
        tuple(map(unescape_cell, row)) for row in list(csv.reader(io.StringIO(text)))[1:]
    ] == rows


@given(texts)
def test_what_is_shown_is_printable_and_short(text: str) -> None:
    assert short(text).isprintable()
    assert len(short(text * 40)) <= 160
    assert printable(str(KinfolkError(text))) == str(KinfolkError(text))


def test_a_quarantine_gives_names_back(tmp_path: Path) -> None:
    rows = [(name, f"reason {name}") for name in NAMES]
    write_quarantine(rows, tmp_path / "quarantine.csv")
    assert read_quarantine(tmp_path / "quarantine.csv") == rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight good images and a bad one for each name, which is the name of a file and of a
    folder."""
    random = np.random.default_rng(0)
    for number, name in enumerate(NAMES):
        place = tmp_path / "images" / name
        place.mkdir(parents=True)
        Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(
            place / f"{number}.png"
        )
        (place / f"bad {name}.png").write_bytes(b"no image")
    return tmp_path / "images"


def test_a_run_with_such_names_is_resumed(folder: Path, tmp_path: Path) -> None:
    settings = {**TINY, "data.labels_from_folders": True, "knn.every": 0}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CheckpointSaver, "_agreed_action", lambda self, device: 2)
        with pytest.raises(InterruptedRunError):
            train(
                str(folder),
                tmp_path / "run",
                epochs=2,
                batch_size=4,
                settings=settings,
                progress=False,
            )
    run = train(out=tmp_path / "run", resume=True, progress=False)
    assert len(run.epochs()) == 2
    assert len(read_quarantine(run.quarantine)) == len(NAMES)
    lines = run.quarantine.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(NAMES) + 1
    assert all(
        line.isprintable() and line.lstrip('"')[:1] not in ("=", "@", "-", "+") for line in lines
    )


def test_nothing_of_it_reaches_the_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["data", str(folder), "--labels-from-folders"])
    assert left.value.code == 0
    shown_text = capsys.readouterr().out
    assert "\x1b" not in shown_text
    assert "\r" not in shown_text
    assert "\\x1b[2J" in shown_text
    with pytest.raises(SystemExit):
        main(["data", "none\x1b[2J\r"])
    assert "\x1b[2J" not in capsys.readouterr().err


def test_a_page_shows_control_characters_as_escapes(folder: Path, tmp_path: Path) -> None:
    settings = {**TINY, "data.labels_from_folders": True, "knn.every": 0}
    run = train(
        str(folder), tmp_path / "run", epochs=1, batch_size=4, settings=settings, progress=False
    )
    page = write_report(run.path).read_text(encoding="utf-8")
    assert "\\x1b[2J" in page
    assert "\x1b[" not in page
