"""Checkpoints: complete or absent, no code is run on loading, damage is reported in one
sentence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kinfolk.errors import KinfolkError
from kinfolk.files import write_atomically
from kinfolk.training.checkpoint import AtomicCheckpointIO, read_checkpoint

CHECKPOINT: dict[str, Any] = {
    "state_dict": {"w": torch.arange(50_000.0)},
    "loops": {},
    "kinfolk": dict.fromkeys(("samples", "settings", "num_samples", "epoch", "step"), 1),
}


def test_a_checkpoint_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, tmp_path / "sub" / "last.ckpt")
    torch.testing.assert_close(
        read_checkpoint(tmp_path / "sub" / "last.ckpt")["state_dict"], CHECKPOINT["state_dict"]
    )
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["last.ckpt"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, path)
    before = path.read_bytes()

    def half(file: Any) -> None:
        file.write(b"half")
        raise OSError("no space left on device")

    with pytest.raises(
        KinfolkError,
        match=(
            r"last\.ckpt cannot be written: no space left on device; what was there before is kept"
        ),
    ):
        write_atomically(path, half)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kinfolk.files.secrets.token_hex", lambda number: "x")
    (tmp_path / "last.x.unfinished.ckpt").symlink_to("/dev/full")
    with pytest.raises(KinfolkError, match="cannot be written: the disk is full; make room"):
        AtomicCheckpointIO().save_checkpoint(CHECKPOINT, tmp_path / "last.ckpt")
    assert not (tmp_path / "last.ckpt").exists()


@pytest.mark.parametrize("damage", ["empty", "half", "noise", "tail", "flipped"])
def test_a_damaged_file_is_refused_with_its_path(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, path)
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :]
    path.write_bytes(
        {
            "empty": b"",
            "half": whole[:middle],
            "noise": os.urandom(1000),
            "tail": whole[:-1],
            "flipped": flipped,
        }[damage]
    )
    with pytest.raises(KinfolkError, match=r"last\.ckpt.* is damaged") as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("evil",))


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({**CHECKPOINT, "more": Evil()}, "last.ckpt")
    with pytest.raises(KinfolkError):
        AtomicCheckpointIO().load_checkpoint("last.ckpt", weights_only=False)
    assert not Path("evil").exists()


def test_foreign_and_missing_checkpoints_are_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(KinfolkError, match="was not written by this version of kinfolk"):
        read_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(KinfolkError, match="there is no checkpoint"):
        read_checkpoint(tmp_path / "none.ckpt")
