"""The run folder: who may use it, what is removed, which lines of metrics survive a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kinfolk.errors import UsageError
from kinfolk.training.run_folder import Run


def test_a_new_or_empty_folder_is_free(tmp_path: Path) -> None:
    Run(tmp_path / "new").require_unused()
    Run(tmp_path).require_unused()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "cache").mkdir()  # what a start that failed has read
    Run(tmp_path).require_unused()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(
        UsageError,
        match=r"already holds a run; resume it \(--resume\), overwrite it \(--overwrite\)",
    ):
        Run(tmp_path).require_unused()
    (tmp_path / "config.yaml").rename(tmp_path / "thesis.tex")
    with pytest.raises(UsageError, match="is not empty"):
        Run(tmp_path).require_unused()
    with pytest.raises(UsageError, match="is a file"):
        Run(tmp_path / "thesis.tex").require_unused()


def test_clear_removes_only_what_a_run_wrote(tmp_path: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl", "notes.txt", "model.safetensors.partial"):
        (tmp_path / name).touch()
    for name in ("checkpoints", "eval", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    (tmp_path / "tensorboard").symlink_to(tmp_path / "elsewhere")
    Run(tmp_path).clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "mine", "notes.txt"]
    assert (tmp_path / "elsewhere" / "file").exists(), "a link is removed, not what it points to"
    Run(tmp_path / "new").clear()
    assert (tmp_path / "new").is_dir()


def test_metrics_after_the_checkpoint_are_cut(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.truncate_metrics(5)
    assert run.epochs() == []
    run.metrics.write_text(
        "".join(json.dumps({"epoch": n, "step": 10 * n}) + "\n" for n in (1, 2, 3))
        + '{"epoch": 4, "st'
    )
    run.truncate_metrics(20)
    assert [row["epoch"] for row in run.epochs()] == [1, 2]
    run.truncate_metrics(0)
    assert run.epochs() == []
