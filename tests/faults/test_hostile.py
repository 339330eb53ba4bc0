"""Files that others wrote: read, or refused in one printable sentence, whatever is in them; nothing
of theirs is run."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kinfolk.errors import KinfolkWarning, UsageError
from kinfolk.training.config import TrainConfig
from kinfolk.training.documents import read_rows
from kinfolk.training.run_folder import Run
from tests.faults.campaign import Tally
from tests.faults.hostile import (
    Reader,
    _features,
    _held,
    _images,
    _labels,
    _npy,
    _source,
    hostile_files,
    made,
)

few = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Code in a file would make a folder here."""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_files_made_to_harm_end_in_one_sentence(tmp_path: Path) -> None:
    for name, data, read in made():
        held, what = _held(tmp_path / name, data, read)
        assert held, what


@pytest.mark.parametrize("read", [_features, _images])
def test_a_shape_beyond_all_memory_is_one_sentence(tmp_path: Path, read: Reader) -> None:
    """numpy's own warning of an overflow would stand before it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        held, what = _held(tmp_path / "beyond.npy", _npy((1 << 40, 1 << 30, 32, 3)), read)
    assert held, what
    assert "overflow" not in what


def test_mutated_files_are_read_or_refused_in_one_sentence(tmp_path: Path) -> None:
    tally = Tally()
    hostile_files(60, random.Random(0), tmp_path, tally)
    assert tally.all_held


@few
@given(st.sampled_from([".npy", ".npz", ".parquet", ".safetensors"]), st.binary(max_size=300))
def test_features_of_any_bytes_are_read_or_refused(
    tmp_path: Path, suffix: str, data: bytes
) -> None:
    held, what = _held(tmp_path / f"a{suffix}", data, _features)
    assert held, what


@few
@given(st.sampled_from([".csv", ".tsv", ".parquet", ".tar", ".npz"]), st.binary(max_size=300))
def test_tables_and_archives_of_any_bytes(tmp_path: Path, suffix: str, data: bytes) -> None:
    held, what = _held(tmp_path / f"a{suffix}", data, _source)
    assert held, what


@few
@given(st.lists(st.lists(st.text(max_size=8), min_size=2, max_size=3), max_size=5))
def test_tables_of_any_cells_are_read_or_refused(tmp_path: Path, rows: list[list[str]]) -> None:
    text = "image,label\n" + "\n".join(",".join(row) for row in rows)
    held, what = _held(tmp_path / "a.csv", text.encode("utf-8", "surrogatepass"), _source)
    assert held, what
    held, what = _held(tmp_path / "labels.txt", text.encode("utf-8", "surrogatepass"), _labels)
    assert held, what


def test_aliases_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("seed: &x 3\nepochs: *x\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"a\.yaml is not YAML: aliases"):
        TrainConfig.load(tmp_path / "a.yaml")


@pytest.mark.parametrize("content", [None, b"\x80\xff\x00", b'{"epoch": 1, "st'])
def test_lost_lines_of_epochs_that_are_done_are_reported(
    tmp_path: Path, content: bytes | None
) -> None:
    run = Run(tmp_path)
    if content is not None:
        run.metrics.write_bytes(content)
    with pytest.warns(
        KinfolkWarning, match="has readable lines of 0 of the 2 epochs that are done"
    ):
        run.truncate_metrics(12, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.truncate_metrics(4, 0)


def test_torn_lines_are_reported_and_nothing_else_is_lost(tmp_path: Path) -> None:
    run = Run(tmp_path)
    lines = [
        '{"epoch": 1, "step": 4}',
        '{"epoch": 2, "st',
        '{"epoch": 3, "step": 12}',
        "[1]",
        '{"epoch": 4, "step": 16}',
        '{"ep',
    ]
    run.metrics.write_bytes("\n".join(lines).encode() + b"\xff\xfe")
    assert [row["epoch"] for row in read_rows(run.metrics)[0]] == [1, 3, 4]
    with pytest.warns(
        UserWarning, match=r"metrics\.jsonl has incomplete lines, which are left out: 2, 4, 6"
    ):
        assert len(run.epochs()) == 3
    with pytest.warns(UserWarning, match="torn"):
        run.truncate_metrics(12)
    assert [row["epoch"] for row in run.epochs()] == [1, 3]
