"""One training at a time in a folder."""

from __future__ import annotations

import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kinfolk.errors import UsageError
from kinfolk.training.run_folder import LOCK, lock_run_folder
from tests.ranks import start


def hold(folder: Path, held: Connection) -> None:
    """Keeps the lock until the process is killed."""
    with lock_run_folder(folder):
        held.send("locked")
        time.sleep(600)


def test_a_second_training_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with (
        lock_run_folder(tmp_path / "run"),
        pytest.raises(UsageError, match=r"another training .* give another folder"),
        lock_run_folder(tmp_path / "run"),
    ):
        pass


def test_a_killed_training_leaves_the_folder_free(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ours, theirs = Pipe()
    child = start(hold, folder, theirs)
    try:
        assert ours.poll(120)
        assert ours.recv() == "locked"
        with pytest.raises(UsageError, match="another training"), lock_run_folder(folder):
            pass
    finally:
        child.kill()
        child.join()
        ours.close()
        theirs.close()
    assert (folder / LOCK).exists()
    with lock_run_folder(folder):
        pass
    assert not (folder / LOCK).exists()


def test_what_came_to_nothing_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bad data"), lock_run_folder(tmp_path / "runs" / "first"):
        raise ValueError("bad data")
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_or_was_written_stays(tmp_path: Path) -> None:
    with lock_run_folder(tmp_path / "kept"):
        (tmp_path / "kept" / "config.yaml").write_text("x")
    assert [entry.name for entry in (tmp_path / "kept").iterdir()] == ["config.yaml"]
    (tmp_path / "empty").mkdir()
    with lock_run_folder(tmp_path / "empty"):
        pass
    assert (tmp_path / "empty").is_dir()


def test_other_ranks_hold_nothing(tmp_path: Path) -> None:
    with lock_run_folder(tmp_path / "run"), lock_run_folder(tmp_path / "run", rank=1):
        pass
