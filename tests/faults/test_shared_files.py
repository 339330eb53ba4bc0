"""The files that processes and runs share: the table of samples, the index of streamed data, and
what rank zero hands over."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kinfolk.data import shards
from kinfolk.data.images import ImageData
from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import add_to_quarantine, hand_over, prepare, read_quarantine, take_over
from kinfolk.data.sample_table import Samples, samples_digest
from kinfolk.data.stream import open_stream
from kinfolk.errors import KinfolkError
from kinfolk.training.train import train
from tests.data.images import noise, save
from tests.data.test_sample_table import samples
from tests.data.test_shards import shard
from tests.data.test_stream import jpg
from tests.faults.inject import as_ranks, flipped, in_children
from tests.faults.methods import TINY
from tests.faults.test_identity import interrupted
from tests.faults.test_names import NAMES


def listed(folder: Path) -> Samples:
    samples = open_stream(folder / "data", folder / "cache").samples
    assert samples is not None
    return samples


def flip(path: Path, bit: int) -> None:
    path.write_bytes(flipped(path.read_bytes(), bit))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"labels": None, "classes": None},
        {"captions": [("a", "é"), None, ("",), ("b", "c")]},
        {"digests": [f"{n:016x}" for n in range(4)]},
    ],
)
def test_the_digest_of_the_samples_does_not_depend_on_how_they_are_kept(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    plain = samples(**changes)
    plain.to_parquet(tmp_path / "samples.parquet")
    kept = [
        plain,
        plain.map_from_file(tmp_path),
        Samples.read(tmp_path / "samples.parquet"),
    ]
    assert len({samples_digest(each) for each in kept}) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"keys": ["a", "b", "c", "de"]},
        {"captions": [None, None, None, None]},
        {"captions": [("a",), ("b", "c"), None, None]},
        {"captions": [("a", "b"), ("c",), None, None]},
        {"splits": ["train"] * 4},
        {"labels": None},
        {"classes": ["x", "y"]},
        {"sizes_bytes": np.arange(4)},
    ],
)
def test_other_samples_have_another_digest(changes: dict[str, Any]) -> None:
    assert samples_digest(samples(**changes)) != samples_digest(samples())


def test_a_damaged_table_is_refused_and_written_anew(tmp_path: Path) -> None:
    file = samples().map_from_file(tmp_path).file
    assert file is not None
    whole = file.read_bytes()
    for bit in range(0, 8 * len(whole), 8 * len(whole) // 50):
        file.write_bytes(flipped(whole, bit))
        with pytest.raises(KinfolkError, match="do not match the digest in its name"):
            Samples.open(file)
    assert samples().map_from_file(tmp_path).file == file
    assert file.read_bytes() == whole


@pytest.fixture
def handed(tmp_path: Path) -> Path:
    """The note of six images of which two share one."""
    for n in range(6):
        save(tmp_path / "data" / f"{n}.png", noise(8, 8, n))
    data = prepare(
        open_source(tmp_path / "data"),
        image_size=8,
        workers=0,
        cache_dir=tmp_path / "cache",
        shared=True,
    )
    shared = ImageData(data.samples, data._cache, torch.tensor([0, 1, 2, 3, 4, 4]), [])
    shared.folder = data.folder
    (tmp_path / "run").mkdir()
    hand_over(shared, tmp_path / "run" / "handover.json")
    return tmp_path / "run" / "handover.json"


@pytest.mark.parametrize("name", ["handover.json", "index.json", "*.crc32", "samples-*.arrow"])
def test_damage_of_what_is_handed_over_is_noticed(handed: Path, name: str) -> None:
    (file,) = handed.parent.parent.rglob(name)
    whole = file.read_bytes()
    for bit in range(0, 8 * len(whole), max(1, 8 * len(whole) // 40)):
        file.write_bytes(flipped(whole, bit))
        assert take_over(handed) is None
    file.write_bytes(whole)
    assert take_over(handed) is not None


def test_pixels_that_are_handed_over_are_verified(handed: Path) -> None:
    data = take_over(handed)
    assert data is not None
    data.pixels(torch.arange(6))
    (file,) = handed.parent.parent.rglob("*.u8")
    flip(file, 777)
    again = take_over(handed)
    assert again is not None
    with pytest.raises(KinfolkError, match="is damaged at image"):
        again.pixels(torch.arange(6))


def make_shards(folder: Path, size: int) -> Path:
    for number in range(2):
        shard(
            folder / f"{number}.tar",
            {f"{n:03d}.png": jpg(100 * number + n, size, size) for n in range(12)},
        )
    return folder


def test_a_damaged_index_of_streamed_data_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_shards(tmp_path / "data", 8)
    before = listed(tmp_path).file  # named by its content
    files = [
        file
        for file in (tmp_path / "cache" / "streams").iterdir()
        if file.suffix in (".json", ".arrow")
    ]
    assert len(files) == 2
    for file in files:
        flip(file, 8 * file.stat().st_size // 2)
        assert listed(tmp_path).file == before
    monkeypatch.setattr(shards, "read_shard", None)
    assert listed(tmp_path).file == before, "all of it is whole again"


def test_a_folder_that_can_be_read_again_is_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("good", "closed"):
        save(tmp_path / "data" / name / "a.png", noise(8, 8))
    scan, access = os.scandir, os.access

    def refuse(path: Any = ".") -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    with monkeypatch.context() as closed:
        closed.setattr(os, "scandir", refuse)
        closed.setattr(
            os, "access", lambda path, mode: not str(path).endswith("closed") and access(path, mode)
        )
        for _ in range(2):
            source = open_stream(tmp_path / "data", tmp_path / "cache")
            assert source.samples is not None
            assert source.samples.keys == ["good/a.png"]
            assert source.refused == [("closed/", "the folder can't be read: Permission denied")]
    assert listed(tmp_path).keys == [
        "closed/a.png",
        "good/a.png",
    ]


def test_names_that_are_met_while_streaming_are_escaped(tmp_path: Path) -> None:
    for name in (*NAMES, *NAMES):
        add_to_quarantine(name, f"reason {name}", tmp_path / "quarantine.csv")
    assert read_quarantine(tmp_path / "quarantine.csv") == [
        (name, f"reason {name}") for name in NAMES
    ]
    lines = (tmp_path / "quarantine.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(NAMES) + 1
    assert all(line.isprintable() for line in lines)


def test_a_checkpoint_of_other_shards_with_the_same_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.faults import test_identity

    monkeypatch.setattr(
        test_identity,
        "SETTINGS",
        {**TINY, "data.streaming": True, "detector.alpha": 0.1},
    )
    runs = [
        interrupted(
            make_shards(tmp_path / f"data{number}", 8 + 8 * number), tmp_path / f"run{number}"
        )
        for number in (0, 1)
    ]
    shutil.copy(runs[1].checkpoint, runs[0].checkpoint)
    with pytest.raises(
        KinfolkError,
        match=r"last\.ckpt belongs to another run: it was saved for 24 training samples of .*data1",
    ):
        train(out=runs[0].path, resume=True, progress=False)


def missing_data(out: str) -> None:
    train(
        Path(out).parent / "missing",
        out,
        batch_size=12,
        epochs=1,
        settings={"trainer.devices": 2},
        progress=False,
    )


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_ranks_that_do_not_read_the_data_report_that_it_is_missing(
    tmp_path: Path, launcher: str
) -> None:
    calls = [
        (missing_data, (str(tmp_path / "run"),), environment)
        for environment in as_ranks(2, launcher)
    ]
    assert in_children(calls, patience=60) == [1, 1]
