"""Streaming: every sample once an epoch in an order by seed and epoch, exact positions, corrupt
images refused, missing shards named."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from kinfolk.data import decode, workers
from kinfolk.data.images import ImageData
from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import add_to_quarantine, prepare, read_quarantine
from kinfolk.data.stream import StreamOrder, open_stream, stream_images
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.training.loader import BatchLoader
from tests.data.images import noise, save
from tests.data.test_shards import captioned, png, shard


def jpg(seed: int, height: int = 24, width: int = 36) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(noise(height, width, seed)).save(buffer, "jpeg")
    return buffer.getvalue()


def make_shards(folder: Path, *sizes: int, bad: tuple[int, ...] = ()) -> Path:
    first = 0
    for number, size in enumerate(sizes):
        names = range(first, first + size)
        files = {f"{n:04d}.jpg": b"\xff\xd8\xff broken" if n in bad else jpg(n) for n in names}
        shard(
            folder / f"{number:03d}.tar",
            {**files, **{f"{n:04d}.cls": str(n % 3).encode() for n in names}},
        )
        first += size
    return folder


def streamed(
    spec: Path | str, cache: Path, *, window: int = 8, processes: int = 0, **more: Any
) -> ImageData:
    return stream_images(
        open_stream(spec, cache, **more),
        image_size=16,
        workers=processes,
        pixel_cap=10**7,
        window=window,
    )


def batches(
    data: ImageData, size: int, *, epoch: int = 0, position: int = 0, rank: int = 0, world: int = 1
) -> list[dict[str, Any]]:
    loader = BatchLoader(data, size, seed=1, rank=rank, world_size=world)
    loader.load_state_dict({"epoch": epoch, "position": position})
    return list(loader)


@pytest.mark.parametrize(
    ("sizes", "window"), [((5, 3, 7, 1), 4), ((5, 3, 7, 1), 100), ((16,), 1), ((2,) * 8, 5)]
)
def test_every_sample_once_an_epoch_in_another_order_each_time(
    sizes: tuple[int, ...], window: int
) -> None:
    starts = np.cumsum([0, *sizes])
    orders = [StreamOrder(starts, window, seed=3, epoch=epoch) for epoch in (0, 0, 1)]
    whole = [order[0 : len(order)] for order in orders]
    for ids in whole:
        assert ids.sort().values.tolist() == list(range(16))
    assert torch.equal(whole[0], whole[1])
    assert not torch.equal(whole[0], whole[2]) or len(sizes) * window == 1
    assert torch.equal(
        torch.cat([orders[0][start : start + 3] for start in range(0, 16, 3)]), whole[0]
    )


@pytest.mark.parametrize("kind", ["shards", "folder"])
def test_files_of_an_interrupted_index_go_away(tmp_path: Path, kind: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    if kind == "shards":
        make_shards(data, 3, 2)
    else:
        (data / "a.jpg").write_bytes(jpg(0))
    (tmp_path / "cache" / "streams").mkdir(parents=True)
    left = [
        tmp_path / "cache" / "streams" / name
        for name in ("0a.1b2c3d.unfinished.json", "samples-0.1b2c3d.unfinished.arrow")
    ]
    for path in left:
        path.write_text("half")
    streamed(data, tmp_path / "cache")
    assert [path for path in left if path.exists()] == []


def test_a_single_shard_has_another_order_in_each_epoch() -> None:
    orders = [
        StreamOrder(np.array([0, 40]), window, seed=0, epoch=epoch)[0:40].tolist()
        for window in (40, 20)
        for epoch in (0, 1)
    ]
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert orders[0] != orders[1]
    assert orders[2] != orders[3]


def test_reads_stay_within_a_window_of_shards() -> None:
    order = StreamOrder(np.arange(0, 1001, 10), window=50, seed=0, epoch=0)
    for start in range(0, 1000, 50):
        assert len({int(id_) // 10 for id_ in order[start : start + 50]}) == 5


def test_pixels_are_those_of_the_cached_mode(tmp_path: Path) -> None:
    folder = make_shards(tmp_path / "shards", 5, 3)
    data, cached = (
        streamed(folder, tmp_path / "cache"),
        prepare(open_source(folder), image_size=16, workers=0),
    )
    ids = torch.tensor([7, 0, 3, 3])
    assert torch.equal(data.aspect(ids), cached.aspect(ids))
    assert torch.equal(data.pixels(ids), cached.pixels(ids))
    assert data.samples.keys == cached.samples.keys
    assert data.labels is not None
    assert cached.labels is not None
    assert torch.equal(data.labels, cached.labels)
    assert (data.num_train, data.quarantine, len(data.once(ids))) == (8, [], 4)


def test_workers_give_the_same_pixels(tmp_path: Path) -> None:
    folder = make_shards(tmp_path / "shards", 40, bad=(7,))
    alone, pool = (
        streamed(folder, tmp_path / "cache"),
        streamed(folder, tmp_path / "cache", processes=2),
    )
    ids = torch.arange(40)
    for _ in range(2):  # the second time with the same workers
        for a, b in zip(alone.stream.read(ids), pool.stream.read(ids), strict=True):  # type: ignore[union-attr]
            assert torch.equal(a, b)
        ids = ids.flip(0)
    assert pool.stream is not None
    pool.stream.pool.close()


def test_a_decoder_that_takes_its_process_down_costs_one_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashing_program(tmp_path / "decode.py", "07.png")
    for n in range(20):
        save(tmp_path / "data" / f"{n:02d}.png", noise(8, 8, n))
    alone = streamed(tmp_path / "data", tmp_path / "cache")
    monkeypatch.setattr(workers, "_PROGRAM", str(tmp_path / "decode.py"))
    data = streamed(tmp_path / "data", tmp_path / "cache", processes=1)
    assert data.stream is not None
    pixels, _, kept = data.stream.read(torch.arange(20))
    assert kept.tolist() == [n for n in range(20) if n != 7]
    assert torch.equal(pixels, alone.pixels(kept))
    assert data.stream.quarantine == [("07.png", "the decoder crashed on this file")]
    data.stream.pool.close()


def crashing_program(path: Path, name: str) -> None:
    """Writes a program of decoding workers that ends its process at the file `name`."""
    source, start, end = Path(decode.__file__).read_text().partition("if __name__")
    source += "_read_file = read_file\n\n\ndef read_file(path, *rest, **more):\n"
    source += f"    if path.endswith({name!r}):\n        os.kill(os.getpid(), 9)\n"
    source += "    return _read_file(path, *rest, **more)\n\n\n"
    path.write_text(source + start + end)


def joined(found: list[dict[str, Any]], name: str) -> Tensor:
    return torch.cat([batch[name] for batch in found])


def test_resumed_anywhere_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    folder = make_shards(tmp_path / "shards", 7, 9, 4, bad=(3, 12))
    whole = batches(streamed(folder, tmp_path / "cache"), 4, epoch=2)
    for position in range(5):
        rest = batches(streamed(folder, tmp_path / "cache"), 4, epoch=2, position=position)
        assert len(rest) == 5 - position
        for a, b in zip(whole[position:], rest, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in ("ids", "pixels", "aspect"))
            assert (a["epoch"], a["step"]) == (b["epoch"], b["step"])


def test_ranks_hold_disjoint_parts_that_are_one_processs_batches(tmp_path: Path) -> None:
    folder = make_shards(tmp_path / "shards", 7, 9)
    ranks = [
        batches(streamed(folder, tmp_path / "cache"), 8, rank=rank, world=2) for rank in range(2)
    ]
    one = batches(streamed(folder, tmp_path / "cache"), 8)
    assert not set(joined(ranks[0], "ids").tolist()) & set(joined(ranks[1], "ids").tolist())
    assert sorted(joined(ranks[0] + ranks[1], "ids").tolist()) == list(range(16))
    for step, batch in enumerate(one):
        assert torch.equal(torch.cat([rank[step]["pixels"] for rank in ranks]), batch["pixels"])


def test_a_corrupt_image_is_left_out_and_named_once(tmp_path: Path) -> None:
    data = streamed(make_shards(tmp_path / "shards", 6, 6, bad=(2, 9)), tmp_path / "cache")
    assert data.stream is not None
    data.stream.note = tmp_path / "quarantine.csv"
    add_to_quarantine("000.tar/0002", "found by another rank", data.stream.note)
    for epoch in range(2):
        found = batches(data, 4, epoch=epoch)
        assert sorted(joined(found, "ids").tolist()) == [n for n in range(12) if n not in (2, 9)]
        assert sum(map(len, (batch["pixels"] for batch in found))) == 10
    assert sorted(key for key, _ in data.stream.quarantine) == ["000.tar/0002", "001.tar/0009"]
    assert [key for key, _ in read_quarantine(data.stream.note)] == ["000.tar/0002", "001.tar/0009"]
    assert not data.pixels(torch.tensor([2])).any(), "black, for evaluation"
    assert data.aspect(torch.tensor([2, 3])).tolist() == [1.0, 1.5]


def test_a_batch_without_a_good_image_ends_with_a_sentence(tmp_path: Path) -> None:
    data = streamed(make_shards(tmp_path / "shards", 4, bad=(0, 1, 2, 3)), tmp_path / "cache")
    with pytest.raises(KinfolkError, match="all 2 images of batch 1 of epoch 1 were refused"):
        batches(data, 2)


def test_a_shard_that_is_missing_or_cut_is_named(tmp_path: Path) -> None:
    folder = make_shards(tmp_path / "shards", 3, 3, 3)
    data = streamed(folder, tmp_path / "cache")
    whole = (folder / "001.tar").read_bytes()
    (folder / "001.tar").write_bytes(whole[:3000])
    with pytest.raises(
        KinfolkError,
        match=r"the shard `.*001.tar` is missing or has been truncated since it was indexed",
    ):
        batches(data, 3)
    (folder / "001.tar").unlink()
    with pytest.raises(KinfolkError, match=r"the shard `.*001.tar` is missing"):
        batches(streamed_again(data), 3)
    pattern = f"{folder}/{{000..002}}.tar"
    named = streamed(pattern, tmp_path / "cache")
    assert [(key, reason.partition(":")[0]) for key, reason in named.quarantine] == [
        ("001.tar", "not a readable archive")
    ]
    (folder / "001.tar").write_bytes(whole[:3000])
    named = streamed(pattern, tmp_path / "cache")
    assert [(key, reason.partition(":")[0]) for key, reason in named.quarantine] == [
        ("001.tar", "cut short or damaged"),
        ("001.tar/0004", "truncated"),
    ]
    assert len(joined(batches(named, 1), "ids")) == 7, "what stands before the damage is used"


def streamed_again(data: ImageData) -> ImageData:
    return ImageData(data.samples, data.stream, None, [])  # type: ignore[arg-type]


def test_a_folder_has_splits_and_labels_and_is_listed_at_each_start(tmp_path: Path) -> None:
    for split, kind, name in (
        ("train", "cats", "a"),
        ("train", "dogs", "b"),
        ("test", "cats", "c"),
    ):
        save(tmp_path / "data" / split / kind / f"{name}.png", noise(8, 8, ord(name)))
    files: list[str] = []
    for _ in range(2):
        data = streamed(tmp_path / "data", tmp_path / "cache", labels_from_folders=True)
        assert data.samples.keys == ["train/cats/a.png", "train/dogs/b.png", "test/cats/c.png"]
        assert data.samples.splits == ["train", "train", "test"]
        assert (data.classes, data.num_train) == (["cats", "dogs"], 2)
        files.append(str(data.samples.file))
    assert files[0] == files[1], "both starts map the same table"
    cached = prepare(open_source(tmp_path / "data"), image_size=16, workers=0)
    assert torch.equal(data.pixels(torch.arange(3)), cached.pixels(torch.arange(3)))
    save(tmp_path / "data" / "train" / "dogs" / "d.png", noise(8, 8, 4))
    assert len(streamed(tmp_path / "data", tmp_path / "cache", labels_from_folders=True)) == 4
    assert sorted(joined(batches(data, 1), "ids").tolist()) == [0, 1]


def test_links_that_lead_back_up_are_not_followed(tmp_path: Path) -> None:
    for name in "abcd":
        save(tmp_path / "data" / name / "x.png", noise(8, 8, ord(name)))
        (tmp_path / "data" / name / "up").symlink_to("..")
    assert streamed(tmp_path / "data", tmp_path / "cache").samples.keys == [
        f"{name}/x.png" for name in "abcd"
    ]
    save(tmp_path / "elsewhere" / "y.png", noise(8, 8, 1))
    (tmp_path / "data" / "link").symlink_to("../elsewhere")
    assert len(streamed(tmp_path / "data", tmp_path / "cache")) == 5
    save(tmp_path / "elsewhere" / "z.png", noise(8, 8, 2))
    assert len(streamed(tmp_path / "data", tmp_path / "cache")) == 6, (
        "a folder behind a link is watched too"
    )


def test_a_name_that_is_not_utf8_and_a_folder_without_images_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "data" / "a.png", noise(8, 8))
    os.rename(tmp_path / "data" / "a.png", os.fsencode(tmp_path / "data") + b"/caf\xe9.png")
    with pytest.raises(KinfolkError, match="has a name that is not UTF-8"):
        streamed(tmp_path / "data", tmp_path / "cache")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "b.png").symlink_to("nowhere")
    with pytest.raises(
        KinfolkError,
        match=r"all 1 images of .* were refused; the first is b.png: not a readable file",
    ):
        streamed(tmp_path / "links", tmp_path / "cache")


def test_captions_and_known_groups_come_from_the_shards(tmp_path: Path) -> None:
    files = captioned(0, 4) | {"0009.png": png(9), "0008.png": png(8), "0008.txt": b"Image  2"}
    shard(tmp_path / "shards" / "a.tar", files)
    data = streamed(tmp_path / "shards", tmp_path / "cache")
    cached = prepare(open_source(tmp_path / "shards"), image_size=16, workers=0)
    assert data.samples.captions == cached.samples.captions
    assert data.quarantine == cached.quarantine == [("a.tar/0009", "the caption is empty")]
    assert data.groups is not None
    assert cached.groups is not None
    assert torch.equal(data.groups, cached.groups)


def test_what_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", noise(4, 4)[None])
    for spec in (tmp_path / "a.npy", "digits"):
        with pytest.raises(
            UsageError, match=r"needs webdataset shards \(.tar\) or a folder of images"
        ):
            open_stream(spec, tmp_path / "cache")
    for classes in (False, True):
        with pytest.raises(UsageError, match=r"there is no file or folder `.*gone`"):
            open_stream(tmp_path / "gone", tmp_path / "cache", labels_from_folders=classes)
    with pytest.raises(UsageError, match=r"needs a folder of images, not `.*shards`"):
        open_stream(
            make_shards(tmp_path / "shards", 2), tmp_path / "cache", labels_from_folders=True
        )
