from __future__ import annotations

import builtins
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kinfolk.data import prepare as prepare_module
from kinfolk.data import workers
from kinfolk.data.images import ImageData
from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import hand_over, prepare, take_over
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.files import read_sealed_text
from tests.data.images import noise, save, smooth
from tests.data.test_stream import crashing_program
from tests.ranks import exit_codes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 good images of several formats and sizes, and three bad ones among them."""
    root = tmp_path_factory.mktemp("folder")
    for n in range(80):
        save(
            root / f"{n:02d}.{('png', 'jpg', 'webp', 'gif')[n % 4]}",
            smooth(20 + n % 7, 30) if n % 2 else noise(16, 16, n),
        )
    (root / "05x.png").write_bytes(b"")
    (root / "40x.jpg").write_bytes(b"no image")
    (root / "70x.png").write_bytes((root / "00.png").read_bytes()[:200])
    return root


def pixels(data: ImageData) -> torch.Tensor:
    return data.pixels(torch.arange(len(data)))


def test_workers_make_no_difference(folder: Path) -> None:
    alone, two, many = (
        prepare(open_source(folder), image_size=16, workers=count) for count in (0, 2, None)
    )
    for other in (two, many):
        assert alone.samples.first_difference(other.samples) is None
        assert alone.samples.modified_ns.tolist() == other.samples.modified_ns.tolist()
        assert torch.equal(pixels(alone), pixels(other))
        assert alone.quarantine == other.quarantine
    assert len(alone) == 80
    assert [path for path, _ in alone.quarantine] == ["05x.png", "40x.jpg", "70x.png"]


def test_workers_are_really_used_and_gone_afterwards(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    original = subprocess.Popen

    def popen(*args: Any, **options: Any) -> Any:
        started.append(original(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(workers, "read_file", None)
    prepare(open_source(folder), image_size=16, workers=2)
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_a_worker_that_dies_costs_one_image(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that takes its process down must not take the pass down, nor the other
    images."""
    crashing_program(tmp_path / "decode.py", "33.jpg")
    monkeypatch.setattr(workers, "_PROGRAM", str(tmp_path / "decode.py"))
    data = prepare(open_source(folder), image_size=16, workers=2)
    assert ("33.jpg", "the decoder crashed on this file") in data.quarantine
    assert len(data.quarantine) == 4
    assert len(data) == 79


def test_a_worker_that_does_not_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "decode.py").write_text("raise ImportError('no numpy here')")
    monkeypatch.setattr(workers, "_PROGRAM", str(tmp_path / "decode.py"))
    with pytest.raises(
        KinfolkError,
        match=(
            "a decoding worker did not start: ImportError: no numpy here; use `workers=0` to decode"
            " in the main process"
        ),
    ):
        prepare(open_source(folder), image_size=16, workers=2)


def test_a_script_without_main_guard_is_not_run_again(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        open({str(tmp_path / "runs")!r}, "a").write("x")
        from kinfolk.data.prepare import prepare
        from kinfolk.data.open_source import open_source
        assert len(prepare(open_source({str(folder)!r}), image_size=16, workers=2)) == 80
        """)
    )
    subprocess.run([sys.executable, str(script)], check=True, timeout=120)
    assert (tmp_path / "runs").read_text() == "x"


def test_no_file_is_opened_after_the_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = prepare(open_source(folder), image_size=16, workers=0)

    def never(*_: object, **__: object) -> Any:
        raise AssertionError("a file was opened")

    monkeypatch.setattr(builtins, "open", never)
    monkeypatch.setattr(io, "open", never)
    monkeypatch.setattr(Image, "open", never)
    assert pixels(data).shape == (80, 16, 16, 3)


def test_pixels_are_gathered_by_ids_as_a_copy(folder: Path) -> None:
    data = prepare(open_source(folder), image_size=16)
    ids = torch.tensor([7, 3, 3, 79])
    batch = data.pixels(ids)
    assert batch.dtype == torch.uint8
    assert batch.is_contiguous()
    assert torch.equal(batch[1], batch[2])
    assert torch.equal(batch[0], pixels(data)[7])
    batch.zero_()
    assert data.pixels(ids).any(), "a batch is a copy"
    with pytest.raises(IndexError):
        data.pixels(torch.tensor([80]))


def test_aspect_is_of_the_original(tmp_path: Path) -> None:
    save(tmp_path / "a.png", noise(10, 30))
    save(tmp_path / "b.png", noise(40, 20))
    data = prepare(open_source(tmp_path), image_size=8)
    assert data.aspect(torch.tensor([1, 0])).tolist() == [0.5, 3.0]
    assert (data.height, data.width) == (8, 8)
    assert repr(data) == "<ImageData of 2 images (2 for training), 8 × 8, 0 refused>"


def test_file_and_memory_agree(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = prepare(open_source(folder), image_size=16)
    shared = prepare(open_source(folder), image_size=16, cache_dir=tmp_path, shared=True)
    monkeypatch.setattr(prepare_module, "available_memory", lambda: 1000)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    temporary = prepare(open_source(folder), image_size=16)
    assert list((tmp_path / "temporary").iterdir()) == [], "a temporary cache leaves nothing behind"
    for other in (shared, temporary):
        assert torch.equal(pixels(memory), pixels(other))
        assert memory.samples.first_difference(other.samples) is None
        assert memory.quarantine == other.quarantine
    assert len(list(tmp_path.glob("*/*.u8"))) == 1


def test_small_stays_in_memory_unless_shared(folder: Path, tmp_path: Path) -> None:
    prepare(open_source(folder), image_size=16, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="`shared` needs a `cache_dir`"):
        prepare(open_source(folder), image_size=16, shared=True)


class Decoding:
    """Counts passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes = 0
        original = prepare_module._read_all

        def read_all(*args: Any) -> Any:
            self.passes += 1
            return original(*args)

        monkeypatch.setattr(prepare_module, "_read_all", read_all)


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Decoding:
    return Decoding(monkeypatch)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    for n in range(5):
        save(tmp_path / "small" / "cats" / f"{n}.png", noise(8, 8, n))
    (tmp_path / "small" / "cats" / "bad.png").write_bytes(b"x")
    return tmp_path / "small"


def cached(root: Path, cache: Path, **options: Any) -> ImageData:
    return prepare(open_source(root, **options), image_size=8, cache_dir=cache, shared=True)


def test_a_complete_cache_is_used_again(small: Path, tmp_path: Path, decoding: Decoding) -> None:
    first = cached(small, tmp_path / "cache")
    again = cached(small, tmp_path / "cache")
    assert decoding.passes == 1
    assert torch.equal(pixels(first), pixels(again))
    assert first.samples.first_difference(again.samples) is None
    assert (
        first.quarantine == again.quarantine == [("cats/bad.png", "not an image in a known format")]
    )
    labelled = cached(small, tmp_path / "cache", labels_from_folders=True)
    assert decoding.passes == 1, "labels are not the cache's matter"
    assert labelled.classes == ["cats"]


def test_a_cache_of_something_else_is_not_used(
    small: Path, tmp_path: Path, decoding: Decoding
) -> None:
    cache = tmp_path / "cache"
    cached(small, cache)
    prepare(open_source(small), image_size=9, cache_dir=cache, shared=True)
    assert decoding.passes == 2
    save(small / "cats" / "2.png", noise(8, 8, 99))
    assert torch.equal(
        cached(small, cache).pixels(torch.tensor([2]))[0], torch.from_numpy(noise(8, 8, 99))
    )
    assert decoding.passes == 3
    save(small / "cats" / "bad.png", noise(8, 8, 7))
    assert len(cached(small, cache)) == 6, "a mended file is read"
    save(small / "cats" / "new.png", noise(8, 8, 7))
    assert len(cached(small, cache)) == 7
    assert decoding.passes == 5
    os.utime(small / "cats" / "new.png", ns=(1, 1))
    cached(small, cache)
    assert decoding.passes == 6, "a touched file may have changed"
    assert len(list(cache.glob("*/*.u8"))) == 2, "what is replaced is removed"


@pytest.mark.parametrize(
    "harm",
    ["pixels gone", "pixels short", "index gone", "index half", "samples gone", "samples half"],
)
def test_a_damaged_cache_is_made_again(
    small: Path, tmp_path: Path, decoding: Decoding, harm: str
) -> None:
    cache = tmp_path / "cache"
    expected = pixels(cached(small, cache)).clone()
    kind, how = harm.split()
    (path,) = cache.glob(
        {"pixels": "*/*.u8", "index": "*/index.json", "samples": "*/*.arrow"}[kind]
    )
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert torch.equal(pixels(cached(small, cache)), expected)
    assert decoding.passes == 2
    cached(small, cache)
    assert decoding.passes == 2


def kill_in_the_middle(folder: Path, cache: Path) -> None:
    """Ends its own process after fifty images."""
    original = prepare_module._read_all

    def killing(*args: Any) -> Any:
        for count, read in enumerate(original(*args)):
            if count == 50:
                os.kill(os.getpid(), signal.SIGKILL)
            yield read

    setattr(prepare_module, "_read_all", killing)  # noqa: B010
    prepare(open_source(folder), image_size=16, cache_dir=cache, shared=True, workers=0)


def test_a_killed_pass_leaves_nothing_to_the_next(
    folder: Path, tmp_path: Path, decoding: Decoding
) -> None:
    cache = tmp_path / "cache"
    assert exit_codes(kill_in_the_middle, [(folder, cache)]) == [-signal.SIGKILL]
    assert len(list(cache.glob("*/*.part"))) == 1
    data = prepare(open_source(folder), image_size=16, cache_dir=cache, shared=True)
    assert decoding.passes == 1
    assert torch.equal(pixels(data), pixels(prepare(open_source(folder), image_size=16)))
    assert not list(cache.glob("*/*.part")), "what the killed process left is removed"


def test_an_interrupted_pass_leaves_nothing(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> Any:
        yield from ()
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module, "_read_all", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cached(small, tmp_path / "cache")
    assert {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()} == {
        "writer.lock"
    }


def test_a_full_disk_is_a_clear_error(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(
        KinfolkError, match=r"needs 0.0 GB and .* has 0.0 GB; give another `cache_dir`"
    ):
        cached(small, tmp_path / "cache")


def write_sum(small: Path, cache: Path, out: Path) -> None:
    out.write_text(str(int(pixels(cached(small, cache)).long().sum())))


def test_two_processes_map_the_same_file(small: Path, tmp_path: Path) -> None:
    first = cached(small, tmp_path / "cache")
    started = time.time_ns()
    assert exit_codes(write_sum, [(small, tmp_path / "cache", tmp_path / "sum")]) == [0]
    assert int((tmp_path / "sum").read_text()) == int(pixels(first).long().sum())
    assert all(path.stat().st_mtime_ns < started for path in (tmp_path / "cache").rglob("*.u8"))


def test_the_index_names_what_was_refused(small: Path, tmp_path: Path) -> None:
    cached(small, tmp_path / "cache")
    (index,) = (tmp_path / "cache").glob("*/index.json")
    assert json.loads(read_sealed_text(index))["refused"][0][:2] == [
        "cats/bad.png",
        "not an image in a known format",
    ]


def test_no_progress_bar_without_a_terminal(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prepare(open_source(small), image_size=8, progress=True)
    assert capfd.readouterr() == ("", "")


def test_progress_bar_on_a_terminal(
    small: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    prepare(open_source(small), image_size=8, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "Reading images" in err
    assert "6/6" in err


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"image_size": 0}, r"`image_size` \(=0\)"),
        ({"image_size": 8, "workers": -1}, r"`workers` \(=-1\)"),
    ],
)
def test_wrong_arguments_are_refused_with_name_value_and_rule(
    small: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        prepare(open_source(small), **options)


def test_pixel_cap_reaches_workers(folder: Path) -> None:
    data = prepare(open_source(folder), image_size=16, pixel_cap=16 * 16, workers=2)
    assert len(data) == 40
    assert sum("above the cap" in reason for _, reason in data.quarantine) == 40
    array = prepare(
        open_source(np.zeros((2, 70, 70, 3), np.uint8)), image_size=16, pixel_cap=70 * 70
    )
    assert len(array) == 2


def prepare_slowly(small: Path, cache: Path, out: Path) -> None:
    """Writes whether this process decoded, how many images it has and where they are."""
    original, decoded = prepare_module._read_all, []

    def counted(*args: Any) -> Any:
        decoded.append(True)
        time.sleep(1)
        yield from original(*args)

    setattr(prepare_module, "_read_all", counted)  # noqa: B010
    data = prepare(open_source(small), image_size=8, cache_dir=cache, shared=True, workers=0)
    assert data.samples.file is not None
    out.write_text(json.dumps([len(decoded), len(data), Path(data.samples.file.name).name]))


def test_processes_that_prepare_one_cache_have_one_writer(small: Path, tmp_path: Path) -> None:
    """Four processes at once, the first of which is slow: it decodes, the others wait and map."""
    notes = [tmp_path / f"{n}.json" for n in range(4)]
    assert (
        exit_codes(prepare_slowly, [(small, tmp_path / "cache", note) for note in notes]) == [0] * 4
    )
    answers = [json.loads(note.read_text()) for note in notes]
    assert sum(decoded for decoded, *_ in answers) == 1
    assert len({tuple(rest) for _, *rest in answers}) == 1
    assert len(list((tmp_path / "cache").rglob("*.u8"))) == 1


def test_data_is_handed_over_without_the_source(small: Path, tmp_path: Path) -> None:
    data, note = cached(small, tmp_path / "cache"), tmp_path / "note.json"
    hand_over(data, note)
    other = take_over(note)
    assert other is not None
    assert torch.equal(pixels(other), pixels(data))
    assert other.samples.file == data.samples.file, "which is named by its content"
    shared = ImageData(data.samples, data._cache, torch.arange(len(data)) // 2, [])
    shared.folder = data.folder
    hand_over(shared, note)
    again = take_over(note)
    assert again is not None
    assert torch.equal(pixels(again), pixels(shared))
    next((tmp_path / "cache").rglob("*.u8")).unlink()
    assert take_over(note) is None
    hand_over(prepare(open_source(small), image_size=8), note)
    assert not note.exists()
