from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from kinfolk.data import shards
from kinfolk.data.images import ImageData
from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare
from kinfolk.data.shards import expand
from kinfolk.errors import KinfolkError
from tests.data.images import noise


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(noise(8, 8, seed)).save(buffer, "png")
    return buffer.getvalue()


def shard(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def captioned(first: int, count: int) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for n in range(first, first + count):
        files |= {f"{n:04d}.png": png(n), f"{n:04d}.txt": f"image {n}\n".encode()}
    return files


def prepared(spec: object) -> ImageData:
    return prepare(open_source(spec), image_size=8, workers=0)


def test_images_captions_and_labels_in_the_order_of_the_archives(tmp_path: Path) -> None:
    shard(
        tmp_path / "s" / "00001.tar",
        {
            **captioned(3, 1),
            "0004.png": png(4),
            "0004.txt": b"with a label",
            "0004.json": b'{"caption": "not read"}',
            "0004.cls": b"7",
        },
    )
    shard(tmp_path / "s" / "00000.tar", captioned(0, 3))
    (tmp_path / "s" / "00000_stats.json").write_text("{}")
    data = prepared(tmp_path / "s")
    assert data.samples.keys == [
        "00000.tar/0000",
        "00000.tar/0001",
        "00000.tar/0002",
        "00001.tar/0003",
        "00001.tar/0004",
    ]
    assert data.samples.captions == ["image 0", "image 1", "image 2", "image 3", "with a label"]
    assert data.labels is not None
    assert data.labels.tolist() == [-1, -1, -1, -1, 7]
    for n in range(5):
        assert torch.equal(data.pixels(torch.tensor([n]))[0], torch.from_numpy(noise(8, 8, n)))
    assert data.quarantine == []
    pattern = prepared(str(tmp_path / "s" / "{00000..00001}.tar"))
    assert data.samples.first_difference(pattern.samples) is None
    assert data.samples.first_difference(prepared(str(tmp_path / "s" / "*.tar")).samples) is None


def test_worker_processes_read_parts_of_archives(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", captioned(0, 70))
    data = prepare(open_source(path), image_size=8, workers=1)
    assert torch.equal(data.pixels(torch.tensor([69]))[0], torch.from_numpy(noise(8, 8, 69)))
    assert data.samples.first_difference(prepared(path).samples) is None


def test_folders_of_shards_are_splits(tmp_path: Path) -> None:
    shard(tmp_path / "train" / "a.tar", captioned(0, 2))
    shard(tmp_path / "val" / "a.tar", captioned(2, 1))
    data = prepared(tmp_path)
    assert data.samples.splits == ["train", "train", "val"]
    assert data.samples.keys == ["train/a.tar/0000", "train/a.tar/0001", "val/a.tar/0002"]


def test_what_can_t_be_used_is_named_and_shifts_nothing(tmp_path: Path) -> None:
    files = captioned(0, 2) | {
        "empty.png": png(2),
        "empty.txt": b" \n",
        "long.png": png(3),
        "long.txt": b"x" * 10_000,
        "longer.png": png(3),
        "longer.txt": b"x" * (2 << 20),
        "latin.png": png(4),
        "latin.txt": b"caf\xe9",
        "alone.png": png(5),
        "lost.txt": b"no image",
        "broken.png": png(6)[:-30],
        "broken.txt": b"half an image",
        "two.png": png(7),
        "two.jpg": png(7),
        "two.txt": b"x",
        "twice.png": png(8),
        "./twice.txt": b"one",
        "twice.txt": b"two",
        "last.png": png(9),
        "last.txt": b"the last",
    }
    path = shard(tmp_path / "s" / "a.tar", files)
    (tmp_path / "s" / "b.tar").write_bytes(b"no archive")
    data = prepared(path.parent)
    assert data.samples.keys == ["a.tar/0000", "a.tar/0001", "a.tar/last"]
    assert data.samples.captions == ["image 0", "image 1", "the last"]
    assert torch.equal(data.pixels(torch.tensor([2]))[0], torch.from_numpy(noise(8, 8, 9)))
    reasons = {path.removeprefix("a.tar/"): reason for path, reason in data.quarantine}
    assert reasons.pop("broken").startswith(("truncated", "can't be decoded"))
    assert reasons.pop("b.tar").startswith("not a readable archive")
    assert (
        reasons.pop("long") == "the caption has 10,000 characters; it must have fewer than 10,000"
    )
    assert "fewer than 10,000" in reasons.pop("longer")
    assert reasons == {
        "empty": "the caption is empty",
        "latin": "the caption is not valid UTF-8",
        "alone": "the caption is empty",
        "lost": "there is no image",
        "two": "it has two images",
        "twice": "it has two .txt",
    }


def test_links_and_devices_are_not_followed(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, kind in (
            ("link.png", tarfile.SYMTYPE),
            ("hard.png", tarfile.LNKTYPE),
            ("device.png", tarfile.CHRTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
        info = tarfile.TarInfo("../../up.png")
        info.size = len(png(0))
        archive.addfile(info, io.BytesIO(png(0)))
    before = sorted(tmp_path.parent.iterdir())
    data = prepared(tmp_path / "a.tar")
    assert data.samples.keys == ["a.tar/../../up"]
    assert {reason for _, reason in data.quarantine} == {"its .png is not a regular file"}
    assert sorted(tmp_path.parent.iterdir()) == before


def test_a_shard_that_is_cut_short_or_changed(tmp_path: Path) -> None:
    path = shard(tmp_path / "s" / "a.tar", captioned(0, 3))
    data = prepared(path)
    assert data.samples.first_difference(prepared(path).samples) is None
    shard(path, captioned(0, 2) | {"0002.png": png(5), "0002.txt": b"image 2"})
    found = data.samples.first_difference(prepared(path).samples)
    assert "of sample 2 (a.tar/0002) was" in str(found)
    with tarfile.open(path) as archive:
        end = archive.getmember("0002.png").offset_data + 20
    path.write_bytes(path.read_bytes()[:end])
    cut = prepared(path.parent)
    assert prepared(path).samples.keys == cut.samples.keys
    assert cut.samples.keys == ["a.tar/0000", "a.tar/0001"]
    assert cut.quarantine[0] == ("a.tar", "cut short or damaged: unexpected end of data")
    assert "a.tar/0002" in dict(cut.quarantine)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shard(tmp_path / "0.tar", captioned(0, 1))
    data = prepared(str(tmp_path / "{0..1}.tar"))
    assert [path for path, _ in data.quarantine] == ["1.tar"]


def test_images_without_captions(tmp_path: Path) -> None:
    data = prepared(shard(tmp_path / "a.tar", {"a.png": png(0), "b.png": png(1), "b.xml": b"?"}))
    assert (data.samples.captions, data.quarantine, data.groups) == (None, [], None)


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz"):
        pass
    with pytest.raises(KinfolkError, match=r"unpack other archives"):
        open_source(tmp_path / "a.tar.gz")


def test_a_range_in_a_pattern_names_every_shard() -> None:
    assert [path.as_posix() for path in expand("a/{08..10}-{0..1}.tar")] == [
        f"a/{n}-{m}.tar" for n in ("08", "09", "10") for m in (0, 1)
    ]
    assert expand("a/b.tar") == expand("photos/{1..2}") == []


def test_a_second_opening_reads_no_shard_if_none_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {
        "latin.png": png(5),
        "latin.txt": b"caf\xe9",
        "lost.txt": b"no image",
        "list.png": png(6),
        "list.json": b'{"captions": ["a", ""]}',
    }
    first, second = (
        shard(tmp_path / "s" / "0.tar", captioned(0, 2) | bad),
        shard(tmp_path / "s" / "1.tar", captioned(2, 2)),
    )
    read: list[str] = []
    reader = shards.read_shard

    def noted(path: Path) -> tuple[dict[str, shards.Entry], str | None]:
        read.append(path.name)
        return reader(path)

    monkeypatch.setattr(shards, "read_shard", noted)

    def opened() -> ImageData:
        return prepare(
            open_source(tmp_path / "s", index_dir=tmp_path / "cache"),
            image_size=8,
            workers=0,
            cache_dir=tmp_path / "cache",
        )

    data = opened()
    assert read == ["0.tar", "1.tar"]
    again = opened()
    assert read == ["0.tar", "1.tar"], "nothing was read again"
    assert data.samples.first_difference(again.samples) is None
    assert (again.quarantine, len(again.quarantine)) == (data.quarantine, 3)
    os.utime(second, ns=(0, second.stat().st_mtime_ns + 1))
    assert opened().samples.first_difference(data.samples) is None
    assert read[2:] == ["0.tar", "1.tar"], "all are read again if one has another time"
    shard(first, captioned(0, 1))
    assert opened().samples.keys == ["0.tar/0000", "1.tar/0002", "1.tar/0003"]
    assert read[4:] == ["0.tar", "1.tar"], "and if one has another size"
    for file in (tmp_path / "cache" / "streams").glob("*.json"):
        file.write_text(file.read_text()[:-7])
    assert len(opened().samples) == 3
    assert read[6:] == ["0.tar", "1.tar"], "a damaged index is not used"


@pytest.mark.parametrize("format_", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_archives_of_every_format_are_read_in_place(tmp_path: Path, format_: int) -> None:
    names = ["a/b.png", "./c.png", ".hidden.png", "f/" * 60 + "g.png", "ä/ö.png"]
    with tarfile.open(tmp_path / "a.tar", "w", format=format_) as archive:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(png(number)), 1700000000.25
            archive.addfile(info, io.BytesIO(png(number)))
    entries, fault = shards.read_shard(tmp_path / "a.tar")
    assert fault is None
    assert list(entries) == ["a/b", "c", "f/" * 60 + "g", "ä/ö"]
    data = (tmp_path / "a.tar").read_bytes()
    for entry, number in zip(entries.values(), (0, 1, 3, 4), strict=True):
        assert entry.image is not None
        offset, length = entry.image
        assert data[offset : offset + length] == png(number)
