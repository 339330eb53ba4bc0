"""What every store holds, and what crosses ranks, by arithmetic: the tables of docs/scale.md. A
test compares them with the real stores.

    .venv/bin/python benchmarks/scale.py            # the computed tables
    .venv/bin/python benchmarks/scale.py measure    # what can be measured: memory and time at 10⁵, 10⁶ and 10⁷ samples, start-up, GradCache

Key: N samples of the data set, B of a step on all ranks together, D embedding, L levels of
clusters, K clusters in all of them, H levels of a hierarchy, Q places of a queue, P known pairs,
each counted in both directions.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from kinfolk.data.sample_table import Samples

D, L, H, Q = 128, 3, 3, 65_536
B = 4096
SIZES = (10**6, 10**8, 10**10)
MEASURED = (10**5, 10**6, 10**7)
PAIRS = 20
"""Known pairs a sample: ten listed, in both directions."""


def levels(N: int) -> tuple[int, ...]:
    return tuple(round(N / 500 * times) for times in (1, 3, 10))


def clusters(N: int) -> int:
    """K of three levels: N/500, three and ten times that."""
    return sum(levels(N))


@dataclass(frozen=True)
class Held:
    """A store: who has it, its bytes as a formula and as a function of N, and a small one to
    compare with."""

    name: str
    of: str
    formula: str
    bytes: Callable[[int], int]
    make: Callable[[int], nn.Module]


@dataclass(frozen=True)
class Sent:
    """What is joined over ranks: in a step as a function of B, or in a refresh as one of N."""

    name: str
    of: str
    formula: str
    bytes: Callable[[int], int]


def held() -> list[Held]:
    import torch

    import kinfolk as kf
    from kinfolk.clustering.labels import PseudoLabels
    from kinfolk.stores import Bank, Queue
    from kinfolk.stores.per_sample import Collected

    def collected(N: int) -> nn.Module:
        store = Collected(N)
        store.write(torch.zeros(1, dtype=torch.int64), torch.zeros(1, D))
        return store

    def tree(N: int) -> nn.Module:
        made = kf.Hierarchy(num_samples=N, levels=H)
        made.clusters.update(torch.zeros(1, dtype=torch.int64), torch.ones(1, D))
        return made

    def ifnd(N: int) -> nn.Module:
        made = kf.IFND(num_samples=N, num_clusters=levels(N))
        made.clusters.centroids = torch.zeros(sum(made.num_clusters), D)
        return made

    def labels(N: int) -> nn.Module:
        made = PseudoLabels(N, levels(N), seed=0)
        made.centroids = torch.zeros(sum(made.num_clusters), D)
        return made

    def known(N: int) -> nn.Module:
        anchor = torch.arange(N).repeat_interleave(PAIRS)
        return kf.Known(
            num_samples=N,
            pairs=torch.stack((anchor, (anchor + torch.arange(PAIRS).repeat(N) + 1) % N), 1),
            symmetric=False,
        )

    return [
        Held(
            "`PerSample`: u",
            "`sogclr`",
            "4·N",
            lambda N: 4 * N,
            lambda N: kf.SogCLRLoss(num_samples=N, temperature=0.1),
        ),
        Held(
            "the same, images and texts",
            "`sogclr-clip`, `fastclip`",
            "8·N",
            lambda N: 8 * N,
            lambda N: kf.BimodalSogCLRLoss(num_samples=N, temperature=0.1),
        ),
        Held(
            "thresholds, tracking",
            "`glofnd`",
            "16·N",
            lambda N: 16 * N,
            lambda N: kf.GloFND(num_samples=N, alpha=0.01),
        ),
        Held(
            "thresholds, Adam",
            "`glofnd`",
            "16·N",
            lambda N: 16 * N,
            lambda N: kf.GloFND(num_samples=N, alpha=0.01, rule="adam"),
        ),
        Held(
            "thresholds, SGD",
            "`glofnd`",
            "8·N",
            lambda N: 8 * N,
            lambda N: kf.GloFND(num_samples=N, alpha=0.01, rule="sgd"),
        ),
        Held(
            "one threshold for all",
            "`glofnd`, `shared`",
            "16",
            lambda N: 16,
            lambda N: kf.GloFND(num_samples=N, alpha=0.01, rule="adam", shared=True),
        ),
        Held(
            "`Bank`",
            "`ir`, `la`, `cmc`",
            "(4·D + 1)·N",
            lambda N: (4 * D + 1) * N,
            lambda N: Bank(N, D),
        ),
        Held(
            "`Collected`",
            "`ifnd`, `source=bank`",
            "(4·D + 1)·N",
            lambda N: (4 * D + 1) * N,
            collected,
        ),
        Held(
            "clusters",
            "`pcl`, `la`, `cave`",
            "8·L·N + 4·D·K",
            lambda N: 8 * L * N + 4 * D * clusters(N),
            labels,
        ),
        Held(
            "clusters, accepted labels, confidence",
            "`ifnd`",
            "13·L·N + 4·D·K",
            lambda N: 13 * L * N + 4 * D * clusters(N),
            ifnd,
        ),
        Held(
            "hierarchy",
            "`hierarchy`, `rcl`",
            "(56 + 4·D)·H·N",
            lambda N: (56 + 4 * D) * H * N,
            tree,
        ),
        Held(
            "labels",
            "`oracle`",
            "8·N",
            lambda N: 8 * N,
            lambda N: kf.Oracle(torch.zeros(N, dtype=torch.int64)),
        ),
        Held("known pairs", "`known`", "8·N + 8·P", lambda N: (8 + 8 * PAIRS) * N, known),
        Held(
            "`Queue`",
            "`moco`, `nnclr`, `rcl`, `pcl`",
            "(4·D + 8)·Q",
            lambda N: (4 * D + 8) * Q,
            lambda N: Queue(Q, D),
        ),
    ]


def steps() -> list[Sent]:
    return [
        Sent(
            "embeddings and ids",
            "`simclr`, `sogclr` and others without queue or bank",
            "8·B·(D + 2)",
            lambda b: 8 * b * (D + 2),
        ),
        Sent("their gradient", "the same", "8·B·D", lambda b: 8 * b * D),
        Sent("ids and u", "`sogclr`", "12·B", lambda b: 12 * b),
        Sent("ids and thresholds, tracking", "`glofnd`", "32·B", lambda b: 32 * b),
        Sent("rows of the queue", "`moco`, `pcl`", "B·(4·D + 8)", lambda b: b * (4 * D + 8)),
        Sent("rows of the bank", "`ir`, `la`", "B·(4·D + 8)", lambda b: b * (4 * D + 8)),
        Sent(
            "collected embeddings",
            "`ifnd`, `source=bank`; `hierarchy`",
            "B·(8·D + 8)",
            lambda b: b * (8 * D + 8),
        ),
    ]


def refreshes() -> list[Sent]:
    return [
        Sent(
            "features of all",
            "`ifnd`, `pcl`, `hierarchy`, where no bank has them",
            "4·D·N",
            lambda N: 4 * D * N,
        ),
        Sent(
            "clusters",
            "`pcl`, `la`, `cave`",
            "8·L·N + 4·D·K",
            lambda N: 8 * L * N + 4 * D * clusters(N),
        ),
        Sent(
            "clusters, accepted labels, confidence",
            "`ifnd`",
            "13·L·N + 4·D·K",
            lambda N: 13 * L * N + 4 * D * clusters(N),
        ),
    ]


def size(number: int) -> str:
    """Bytes in the largest unit that leaves a whole part, decimal."""
    for unit, power in (("PB", 15), ("TB", 12), ("GB", 9), ("MB", 6), ("kB", 3)):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {unit}"
    return f"{number} bytes"


def main() -> None:
    print("| store | of | bytes | N = 10⁶ | N = 10⁸ | N = 10¹⁰ |\n|---|---|---|---|---|---|")
    for store in held():
        print(
            f"| {store.name} | {store.of} | {store.formula} |"
            f" {' | '.join(size(store.bytes(N)) for N in SIZES)} |"
        )
    print(f"\n| in a step | of | bytes | B = {B:,} |\n|---|---|---|---|")
    for part in steps():
        print(f"| {part.name} | {part.of} | {part.formula} | {size(part.bytes(B))} |")
    print(
        "\n| in a refresh | of | bytes | N = 10⁶ | N = 10⁸ | N = 10¹⁰ |\n|---|---|---|---|---|---|"
    )
    for part in refreshes():
        print(
            f"| {part.name} | {part.of} | {part.formula} |"
            f" {' | '.join(size(part.bytes(N)) for N in SIZES)} |"
        )


def resident() -> dict[str, int]:
    """Bytes of this process that no other has (RssAnon) and that are mapped from files, which
    others share (RssFile), from Linux."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile")}


def sample_list(N: int) -> Samples:
    """A table as of ImageNet's files, made without a Python object for each sample."""
    import numpy as np
    import pyarrow as pa

    from kinfolk.data.sample_table import Samples, TextColumn

    parts = [
        pa.array(
            [
                f"train/n{row // 1300:08d}/n{row // 1300:08d}_{row % 1300:05d}.JPEG"
                for row in range(start, min(start + 100_000, N))
            ]
        )
        for start in range(0, N, 100_000)
    ]
    digits = np.char.zfill(np.arange(100_000).astype("U5"), 16)
    digests = pa.concat_arrays(
        [pa.array(digits[: min(100_000, N - at)]) for at in range(0, N, 100_000)]
    )
    return Samples(
        ids=np.arange(N),
        keys=TextColumn(pa.concat_arrays(parts)),
        widths=np.full(N, 500),
        heights=np.full(N, 375),
        labels=np.arange(N) // 1300,
        classes=None,
        splits=TextColumn(pa.repeat("train", N)),
        sizes_bytes=np.full(N, 110_000),
        modified_ns=np.full(N, 1_700_000_000_000_000_000),
        digests=TextColumn(digests),
    )


def open_list(file: str) -> dict[str, int]:
    """In a process of its own: what mapping the list, and reading all of it, adds to the
    process."""
    import numpy as np

    from kinfolk.data.sample_table import Samples, TextColumn

    # what the libraries load when they are first used is not of the list
    with tempfile.TemporaryDirectory() as folder:
        assert sample_list(1000).map_from_file(folder).keys[999]
    before = resident()
    start = time.perf_counter()
    samples = Samples.open(file)
    seconds = time.perf_counter() - start
    opened = resident()
    for numbers in (
        samples.widths,
        samples.heights,
        samples.sizes_bytes,
        samples.modified_ns,
        samples.ids,
    ):
        np.asarray(numbers).sum()
    for column in (samples.keys, samples.splits, samples.digests):
        assert isinstance(column, TextColumn)
        _ = [
            buffer is None or np.frombuffer(buffer, dtype=np.uint8).max()
            for buffer in column.array.buffers()
        ]
    assert samples.keys[len(samples) - 1]
    read = resident()
    return {
        "private": opened["RssAnon"] - before["RssAnon"],
        "private_read": read["RssAnon"] - before["RssAnon"],
        "shared": read["RssFile"] - before["RssFile"],
        "microseconds": round(seconds * 1e6),
    }


def child(*arguments: str) -> Any:
    """In a process that gives freed memory back at once, so that what is resident is what is
    held."""
    malloc = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    out = subprocess.run(
        [sys.executable, __file__, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **malloc},
    )
    return json.loads(out.stdout)


def measure_lists(sizes: tuple[int, ...]) -> None:
    print(
        "| samples | file, bytes a sample | mapped by a process, shared | of its own | opened in"
        " |\n|---|---|---|---|---|"
    )
    for N in sizes:
        with tempfile.TemporaryDirectory() as folder:
            file = sample_list(N).map_from_file(folder).file
            assert file is not None
            found = child("list", str(file))
            print(
                f"| {N:,} | {file.stat().st_size / N:.1f} | {found['shared'] / N:.1f} |"
                f" {found['private_read'] / N:.1f} | {found['microseconds'] / 1000:.1f} ms |"
            )


def store_memory(name: str, N: int) -> dict[str, int]:
    """In a process of its own: what a store adds to the process once all of it was written to."""
    made = next(store for store in held() if store.name == name)
    made.make(1000)
    before = resident()["RssAnon"]
    store = made.make(N)
    for buffer in store.buffers():
        buffer.copy_(buffer.clone())
    return {"bytes": resident()["RssAnon"] - before}


def measure_stores(sizes: tuple[int, ...], most: int) -> None:
    print(
        "\n| store | computed, bytes a sample |"
        f" {' | '.join(f'measured, N = {N:,}' for N in sizes)} |\n|---|---|{'---|' * len(sizes)}"
    )
    for store in held():
        if store.formula in ("24", "(4·D + 8)·Q"):
            continue
        found = [
            (
                f"{child('store', store.name, str(N))['bytes'] / N:.1f}"
                if store.bytes(N) < most
                else "not run"
            )
            for N in sizes
        ]
        print(
            f"| {store.name} of {store.of} | {store.bytes(10**6) / 10**6:.1f} |"
            f" {' | '.join(found)} |"
        )


def measure_step(sizes: tuple[int, ...]) -> None:
    """Loss, gradient with respect to the embeddings, and state of `sogclr+glofnd`: all of a step
    that might depend on N."""
    import torch

    import kinfolk as kf

    sys.path.insert(0, str(Path(__file__).parent))
    from timing import interleaved, median

    torch.set_num_threads(1)
    batch = 256
    z1, z2 = (torch.randn(batch, D, requires_grad=True) for _ in range(2))

    def step(N: int) -> Callable[[], None]:
        loss, draw = (
            kf.SogCLRLoss(
                num_samples=N, temperature=0.1, detector=kf.GloFND(num_samples=N, alpha=0.01)
            ),
            torch.Generator().manual_seed(0),
        )

        def run() -> None:
            loss(z1, z2, torch.randint(N, (batch,), generator=draw)).backward()

        return run

    times = interleaved({f"{N:,}": step(N) for N in sizes}, repetitions=15, seconds=0.1)
    first = times[f"{sizes[0]:,}"]
    print(
        f"\n| samples | step without encoder, batch {batch} | of that at {sizes[0]:,}"
        " |\n|---|---|---|"
    )
    for name, taken in times.items():
        ratio = median([a / b for a, b in zip(taken, first, strict=True)])
        print(f"| {name} | {1000 * median(taken):.2f} ms | {ratio:.2f} |")


def measure_start(files: int) -> None:
    """A folder of many files (hard links to a few): its listing, and its start with the index that
    the first has left."""
    import io

    from PIL import Image

    from kinfolk.data.open_source import open_folder
    from kinfolk.data.stream import open_stream

    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    with tempfile.TemporaryDirectory() as folder:
        root, image = Path(folder) / "files", Path(folder) / "image"
        for number in range(files):
            if number % 50_000 == 0:
                image = Path(folder) / f"image{number}"
                image.write_bytes(buffer.getvalue())
            if number % 1000 == 0:
                (root / "train" / f"n{number // 1000:08d}").mkdir(parents=True)
            os.link(image, root / "train" / f"n{number // 1000:08d}" / f"{number:09d}.jpg")
        times = []
        for _ in range(2):
            start = time.perf_counter()
            found = len(open_stream(root, Path(folder) / "index", labels_from_folders=True).items())
            times.append(time.perf_counter() - start)
        start = time.perf_counter()
        open_folder(root, labels_from_folders=True)
        listed = time.perf_counter() - start
    print(
        f"\n{found:,} files in {files // 1000:,} folders: index made in {times[0]:.1f} s, mapped by"
        f" a later start in {times[1]:.3f} s"
    )
    print(f"listing alone, which the cached mode does at each start: {listed:.1f} s")


def grad_cache_step(batch: int, chunks: int) -> dict[str, float]:
    """In a process of its own: seconds and memory of a step of `simclr+glofnd` on a small
    convolutional network."""
    import torch

    from kinfolk.frameworks.registry import Context, build, parse
    from kinfolk.models import build_encoder, projection_head
    from kinfolk.training.module import encoders_of, in_chunks

    torch.set_num_threads(1)
    torch.manual_seed(0)
    encoder = build_encoder("resnet10", stem="cifar", width=8)
    head = projection_head(encoder.output_size, 64, 64)
    framework = build(parse("simclr+glofnd"), encoder, head, Context(10_000), {}, {"alpha": 0.01})
    framework.set_progress(5, 10)
    views, ids = torch.randn(2, batch, 3, 32, 32), torch.arange(batch)
    before = resident()["RssAnon"]
    Path("/proc/self/clear_refs").write_text("5")  # the highest memory so far is forgotten
    start = time.process_time()
    with in_chunks(encoders_of(framework), chunks):
        loss = framework(views, ids)
    loss.backward()
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(lines["VmHWM"].split()[0]) * 1024 - resident()["RssFile"]
    return {"seconds": time.process_time() - start, "peak": peak - before, "loss": float(loss)}


def measure_grad_cache(batch: int, chunk: int) -> None:
    found = {
        f"{chunk}, whole": child("grad-cache", str(chunk), "1"),
        f"{batch:,}, whole": child("grad-cache", str(batch), "1"),
        f"{batch:,} in chunks of {chunk}": child("grad-cache", str(batch), str(batch // chunk)),
    }
    print("\n| batch | processor time | memory of the step, at most |\n|---|---|---|")
    for name, each in found.items():
        print(f"| {name} | {each['seconds']:.1f} s | {each['peak'] / 1e6:.0f} MB |")
    cost = (
        found[f"{batch:,} in chunks of {chunk}"]["seconds"] / found[f"{batch:,}, whole"]["seconds"]
    )
    print(f"cost of the second forward pass: {cost:.2f} times the step of the whole batch")


def measure(sizes: tuple[int, ...], most: int, files: int) -> None:
    measure_lists(sizes)
    measure_stores(sizes, most)
    measure_step(sizes)
    measure_start(files)
    measure_grad_cache(4096, 256)


def command() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "what",
        nargs="?",
        default="tables",
        choices=["tables", "measure", "list", "store", "grad-cache"],
    )
    parser.add_argument("values", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument(
        "--files", type=int, default=10**6, help="of the folder whose start is timed"
    )
    parser.add_argument(
        "--most", type=float, default=1e9, help="stores above so many bytes are not made"
    )
    parser.add_argument(
        "--largest", type=int, default=MEASURED[-1], help="samples of the largest list and store"
    )
    chosen = parser.parse_args()
    if chosen.what == "tables":
        main()
    elif chosen.what == "measure":
        measure(tuple(N for N in MEASURED if chosen.largest >= N), int(chosen.most), chosen.files)
    elif chosen.what == "list":
        print(json.dumps(open_list(chosen.values[0])))
    elif chosen.what == "store":
        print(json.dumps(store_memory(chosen.values[0], int(chosen.values[1]))))
    else:
        print(json.dumps(grad_cache_step(*map(int, chosen.values))))


if __name__ == "__main__":
    command()
