"""Samples left out by a list of keys, and what is wrong with the list in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kinfolk as kf
from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare
from kinfolk.data.sample_table import Samples
from kinfolk.data.source import exclude, read_excluded
from kinfolk.errors import KinfolkError, UsageError, csv_text
from kinfolk.training.load_run import open_run
from tests.data.images import noise, save
from tests.training.small import BARE

NAMES = ["-1.png", "a b.png", "c,d.png", "e.png", "f.png"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for at, name in enumerate(NAMES):
        save(tmp_path / "photos" / name, noise(8, 8, at))
    return tmp_path / "photos"


def listed(path: Path, keys: list[str]) -> str:
    path.write_text(csv_text(["id", "key"], [[9, key] for key in keys]), encoding="utf-8")
    return str(path)


def test_listed_samples_are_left_out_and_the_others_are_unchanged(folder: Path) -> None:
    source = open_source(folder)
    assert exclude(source, None) is source
    kept = exclude(source, listed(folder.parent / "out.csv", ["-1.png", "c,d.png", "unknown.png"]))
    assert [item.key for item in kept.items()] == ["a b.png", "e.png", "f.png"]
    whole, part = prepare(source, image_size=8), prepare(kept, image_size=8)
    assert part.samples.keys == ["a b.png", "e.png", "f.png"]
    rows = torch.tensor([whole.samples.keys.index(key) for key in part.samples.keys])
    assert torch.equal(part.pixels(torch.arange(3)), whole.pixels(rows))


def test_an_image_takes_all_its_captions_with_it(folder: Path) -> None:
    table = folder / "captions.csv"
    lines = [f"{name},{text}" for name in ("e.png", "f.png") for text in ("one", "two")]
    table.write_text("image,caption\n" + "\n".join(lines) + "\n")
    source = open_source(table)
    assert [item.same_as for item in source.items()] == [None, 0, None, 2]
    kept = exclude(source, listed(folder.parent / "out.csv", [source.items()[0].key]))
    assert [item.same_as for item in kept.items()] == [None, 0]
    assert kept.items()[0].key == source.items()[2].key


def test_what_is_wrong_is_named(folder: Path) -> None:
    with pytest.raises(UsageError, match="has no samples to exclude; give a table"):
        exclude(open_source(folder), str(folder / "none.csv"))
    with pytest.raises(UsageError, match=r"none of the 1 samples .* it has x.png, the data has"):
        exclude(open_source(folder), listed(folder.parent / "out.csv", ["x.png"]))
    (folder.parent / "ids.csv").write_text("id,sample\n1,2\n")
    with pytest.raises(UsageError, match=r"give a table \(.csv\) with the column `key`"):
        read_excluded(folder.parent / "ids.csv")
    (folder.parent / "bytes.csv").write_bytes(b'key\n"\xff\xfe\n')
    with pytest.raises(KinfolkError, match="is not a readable table"):
        read_excluded(folder.parent / "bytes.csv")


def test_a_run_keeps_its_list_when_it_is_resumed_and_not_for_other_data(folder: Path) -> None:
    out, marked = folder.parent / "run", listed(folder.parent / "out.csv", ["e.png"])
    settings = {**BARE, "data.exclude": marked}
    kf.train(folder, out, epochs=1, batch_size=2, settings=settings, report=False)
    samples = Samples.read(out / "samples.parquet")
    assert sorted(samples.keys) == sorted(set(NAMES) - {"e.png"})
    kf.train(out=out, resume=True, epochs=2, report=False)
    assert len(open_run(out).data(str(folder))) == len(NAMES)
    with pytest.raises(UsageError, match=r"`data.exclude` is not available with `data.streaming`"):
        kf.train(
            folder,
            folder.parent / "other",
            epochs=1,
            settings={**settings, "data.streaming": True},
            report=False,
        )
