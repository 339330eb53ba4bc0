"""Loading, side by side: images per second from JPEG files and from shards (decoded at 224), and
from the cache of decoded pixels.

    make bench                                      # makes the environment with the peers and runs
                                                    every benchmark
    .venv-peers/bin/python benchmarks/loader.py     # this one alone

Every contender gives batches of uint8 images of one size, without augmentation: kinfolk's streaming
from shards and from a folder and its cache, plain Pillow in a torch `DataLoader`, lightly's data
set, webdataset. Each has `--workers` processes. "The decoder" is kinfolk's own decoding function in
a loop in one process: no loader that uses it can be faster per core.

Two figures for each: images per second on the clock, and images per second of processor time, of
all its processes together. The second is the speed per core; it is the one to compare on a machine
that others use too. Rounds are interleaved; the last column is the median of the ratios within a
round. A peer that is missing is skipped and named.

The second part streams an epoch of 10⁵ small images and prints the memory of the process on the
way.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))

from timing import memory

from kinfolk.data.decode import read_file, strict_pillow
from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare
from kinfolk.data.stream import open_stream, stream_images
from kinfolk.training.loader import BatchLoader

SIDE, BATCH, CAP = 224, 64, 50_000_000
WANTED = 0.9
Run = Callable[[], int]  # loads all images and says how many


def photo(seed: int, width: int) -> bytes:
    """A JPEG of 4 : 3 with the number of bytes of a photograph: about 85 kB at 500 × 375."""
    rng = np.random.default_rng(seed)
    height = width * 3 // 4
    coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    noisy = np.clip(np.asarray(coarse) + rng.normal(0, 12, (height, width, 3)), 0, 255).astype(
        np.uint8
    )
    buffer = io.BytesIO()
    Image.fromarray(noisy).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def write_data(root: Path, images: int, width: int, shards: int) -> None:
    """The same images as files and as shards."""
    (root / "files" / "all").mkdir(parents=True)
    (root / "shards").mkdir()
    contents = [photo(number, width) for number in range(images)]
    for number, content in enumerate(contents):
        (root / "files" / "all" / f"{number:06d}.jpg").write_bytes(content)
    for shard in range(shards):
        with tarfile.open(root / "shards" / f"{shard:03d}.tar", "w") as archive:
            for number in range(shard, images, shards):
                info = tarfile.TarInfo(f"{number:06d}.jpg")
                info.size = len(contents[number])
                archive.addfile(info, io.BytesIO(contents[number]))


def cpu_seconds() -> float:
    """Processor time of this process, its children and their children, living or ended, from
    Linux."""
    ticks, parents = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    family = {os.getpid()}
    while more := {
        child for child, parent in parents.items() if parent in family and child not in family
    }:
        family |= more
    return sum(ticks[each] for each in family) / os.sysconf("SC_CLK_TCK")


def decoder(root: Path) -> Run:
    paths = sorted(str(path) for path in (root / "files" / "all").iterdir())

    def run() -> int:
        with strict_pillow():
            return sum(
                read_file(path, SIDE, SIDE, CAP, with_digest=False).pixels is not None
                for path in paths
            )

    return run


def epochs(data: Any) -> Run:
    loader = BatchLoader(data, BATCH, seed=0)

    def run() -> int:
        loader.set_epoch(loader.epoch + 1)
        return sum(len(batch["pixels"]) for batch in loader)

    return run


def streamed(root: Path, kind: str, workers: int) -> Run:
    source = open_stream(root / kind, root / "index")
    return epochs(
        stream_images(source, image_size=SIDE, workers=workers, pixel_cap=CAP, window=10_000)
    )


def cached(root: Path) -> Run:
    return epochs(
        prepare(open_source(root / "files"), image_size=SIDE, cache_dir=root / "cache", shared=True)
    )


def squash(image: Image.Image) -> torch.Tensor:
    """What a careful user writes: RGB, resized, as bytes."""
    return torch.from_numpy(
        np.array(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC))
    )


class Files(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, root: Path) -> None:
        self.paths = sorted((root / "files" / "all").iterdir())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return squash(Image.open(self.paths[index]))


def torch_loader(
    dataset: Any, workers: int, first: Callable[[Any], Any] = lambda batch: batch, **more: Any
) -> Run:
    loader = torch.utils.data.DataLoader(
        dataset, BATCH, num_workers=workers, persistent_workers=workers > 0, **more
    )
    return lambda: sum(len(first(batch)) for batch in loader)


def lightly(root: Path, workers: int) -> Run:
    import torchvision_stub  # noqa: F401

    data = import_module("lightly.data").LightlyDataset(str(root / "files"), transform=squash)
    return torch_loader(data, workers, lambda batch: batch[0], shuffle=True)


def webdataset(root: Path, workers: int) -> Run:
    wds = import_module("webdataset")
    names = sorted(str(path) for path in (root / "shards").glob("*.tar"))
    data = (
        wds.WebDataset(names, shardshuffle=len(names))
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg")
        .map_tuple(squash)
    )
    return torch_loader(data, workers, lambda batch: batch[0])


def contenders(root: Path, workers: int) -> Iterator[tuple[str, Callable[[], Run]]]:
    yield "the decoder, one process", lambda: decoder(root)
    yield "kinfolk, streaming shards", lambda: streamed(root, "shards", workers)
    yield "kinfolk, streaming files", lambda: streamed(root, "files", workers)
    yield (
        "Pillow in a torch DataLoader, files",
        lambda: torch_loader(Files(root), workers, shuffle=True),
    )
    yield "lightly, files", lambda: lightly(root, workers)
    yield "webdataset, shards", lambda: webdataset(root, workers)
    yield "kinfolk, cache", lambda: cached(root)


def compare(images: int, width: int, workers: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_data(root, images, width, shards=8)
        runs: dict[str, Run] = {}
        for name, make in contenders(root, workers):
            try:
                runs[name] = make()
            except (ImportError, RuntimeError) as error:  # noqa: PERF203
                print(f"{name}: skipped, {error}")
        wall: dict[str, list[float]] = {name: [] for name in runs}
        cpu: dict[str, list[float]] = {name: [] for name in runs}
        # the first warms up: processes start, files come into memory
        for turn in range(rounds + 1):
            for name, run in runs.items():
                clock, used = time.perf_counter(), cpu_seconds()
                number = run()
                if turn:
                    wall[name].append(number / (time.perf_counter() - clock))
                    cpu[name].append(number / max(cpu_seconds() - used, 0.01))
    print(
        f"\n{images} JPEGs of {width} × {width * 3 // 4} at {SIDE}, {workers} worker processes,"
        f" median of {rounds} rounds\n"
    )
    print(
        "| loader | images/s | images per second of processor time | of the decoder's"
        " |\n|---|---|---|---|"
    )
    own = cpu["the decoder, one process"]
    ratios = {
        name: statistics.median(a / b for a, b in zip(values, own, strict=True))
        for name, values in cpu.items()
    }
    for name in runs:
        print(
            f"| {name} | {statistics.median(wall[name]):,.0f} | {statistics.median(cpu[name]):,.0f}"
            f" | {ratios[name]:.2f} |"
        )
    for kind in ("shards", "files"):
        ratio = ratios[f"kinfolk, streaming {kind}"]
        print(
            f"streaming {kind} ÷ the decoder, per core: {ratio:.2f}, wanted ≥ {WANTED}:"
            f" {'reached' if ratio >= WANTED else 'MISSED'}"
        )


def flat(samples: int, workers: int) -> None:
    """Memory over an epoch of many small images."""
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(
        buffer, "PNG"
    )
    content = buffer.getvalue()
    with tempfile.TemporaryDirectory() as folder:
        shards = Path(folder) / "shards"
        shards.mkdir()
        for shard in range(max(1, samples // 1000)):
            with tarfile.open(shards / f"{shard:05d}.tar", "w") as archive:
                for number in range(1000):
                    info = tarfile.TarInfo(f"{number:04d}.png")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
        clock = time.perf_counter()
        source = open_stream(shards, Path(folder) / "index")
        cold = time.perf_counter() - clock
        clock = time.perf_counter()
        source = open_stream(shards, Path(folder) / "index")
        warm = time.perf_counter() - clock
        data = stream_images(source, image_size=16, workers=workers, pixel_cap=CAP, window=10_000)
        seen = torch.zeros(len(data), dtype=torch.int64)
        loader = BatchLoader(data, 250, seed=0)
        marks: list[int] = []
        for batch in loader:
            seen[batch["ids"]] += 1
            if (batch["step"] + 1) % max(1, len(loader) // 10) == 0:
                marks.append(memory("VmRSS"))
    print(
        f"\nan epoch of {len(seen):,} samples from {samples // 1000} shards: index made in"
        f" {cold:.1f} s, mapped in {warm:.2f} s"
    )
    print(f"every sample once: {'yes' if bool((seen == 1).all()) else 'NO'}")
    print(f"resident memory at each tenth, MB: {', '.join(str(mark // 1000) for mark in marks)}")
    growth = (marks[-1] - marks[1]) / 1000 if len(marks) > 2 else 0.0
    print(
        f"growth from the second tenth to the last: {growth:.1f} MB,"
        f" {growth * 1e6 / (0.8 * len(seen)):.0f} bytes a sample"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--samples", type=int, default=100_000, help="of the epoch whose memory is watched; 0: none"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    compare(chosen.images, 500, chosen.workers, chosen.rounds)
    # where decoding at reduced scale shows
    compare(chosen.images // 4, 1280, chosen.workers, chosen.rounds)
    if chosen.samples:
        flat(chosen.samples, chosen.workers)


if __name__ == "__main__":
    main()
