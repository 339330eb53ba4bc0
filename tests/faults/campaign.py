"""The long round of faults, `make faults`: as many of each kind as are asked for, and a table of
what was tried and held.

Everything random comes from the seed that is printed first; `--seed` repeats a round.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.faults.hostile import hostile_files
from tests.faults.inject import (
    arm,
    as_ranks,
    differences,
    flipped,
    full_disk,
    in_children,
    mutated,
    replaced,
)
from tests.faults.methods import METHODS, arguments, write_data

RANKED = ("sogclr+glofnd", "moco+glofnd", "clip+glofnd")


class Tally:
    """Faults tried and held, by kind; those that were not held are printed at once."""

    def __init__(self) -> None:
        self.tried: Counter[str] = Counter()
        self.held: Counter[str] = Counter()

    def add(self, kind: str, held: bool, what: str = "", number: int = 1) -> None:
        self.tried[kind] += number
        self.held[kind] += number if held else 0
        if not held:
            print(f"NOT HELD  {kind}: {what}", flush=True)  # noqa: T201

    def table(self) -> str:
        lines = [
            f"| {kind} | {self.tried[kind]:,} | {self.held[kind]:,} |"
            for kind in sorted(self.tried)
        ]
        return "\n".join(["| fault | tried | held |", "|---|---:|---:|", *lines])

    @property
    def all_held(self) -> bool:
        return self.tried == self.held


def train_child(
    method: str, data: str, out: str, resume: bool, point: int, report: str | None, number: int = 9
) -> None:
    """A training in a process of its own that ends itself at a moment."""
    from kinfolk.training.train import train

    warnings.simplefilter("ignore")
    arm(point, None if report is None else Path(report), number)
    more = arguments(method, Path(data), Path(out))
    if "WORLD_SIZE" in os.environ:
        more["settings"] = {**more["settings"], "trainer.devices": int(os.environ["WORLD_SIZE"])}
    train(**more, resume=resume)


def kills(number: int, chance: random.Random, room: Path, tally: Tally) -> None:
    """Kills at random moments, up to three in one run, over all methods in turn; the resumed run
    must end as one that was never killed."""
    data = room / "data"
    write_data(data)
    done, turn = 0, 0
    moments: dict[str, int] = {}
    while done < number:
        method = METHODS[turn % len(METHODS)]
        whole, out = room / "never-killed" / method, room / "killed" / method
        if method not in moments:
            report = room / "moments"
            (code,) = in_children(
                [(train_child, (method, str(data), str(whole), False, 0, str(report)), {})]
            )
            if code != 0:
                tally.add("kills", False, f"{method} does not train (exit code {code})")
                moments[method] = 0
            else:
                moments[method] = int(report.read_text())
        turn += 1
        if moments[method] == 0:
            continue
        shutil.rmtree(out, ignore_errors=True)
        times = chance.randint(1, 3)
        points = [chance.randint(1, moments[method] // times) for _ in range(times)]
        struck = 0
        for point in points:
            (code,) = in_children(
                [(train_child, (method, str(data), str(out), True, point, None), {})]
            )
            struck += code == -9
            if code not in (0, -9):
                tally.add("kills", False, f"{method} after kills at {points}: exit code {code}")
        (code,) = in_children([(train_child, (method, str(data), str(out), True, 0, None), {})])
        wrong = [f"exit code {code}"] if code != 0 else differences(out, whole)
        tally.add(
            "kills",
            not wrong,
            f"{method}, killed at {points}: {', '.join(wrong[:4])}",
            max(1, struck),
        )
        done += max(1, struck)


def rank_kills(number: int, chance: random.Random, room: Path, tally: Tally) -> None:
    """One of two ranks is killed; the other must end by itself, and the resumed run as one that was
    never killed."""
    data = room / "data"
    write_data(data)
    for turn in range(number):
        method, launcher = RANKED[turn % len(RANKED)], ("torchrun", "slurm")[turn % 2]
        whole, out = room / "whole-ranks" / method, room / "killed-ranks" / method
        if not whole.exists():
            codes = _ranks(method, data, whole, False, [0, 0], launcher)
            if codes != [0, 0]:
                tally.add(
                    "ranks killed",
                    False,
                    f"{method} does not train in two processes (exit codes {codes})",
                )
                continue
        shutil.rmtree(out, ignore_errors=True)
        rank = chance.randrange(2)
        point = chance.randint(1, 25 if rank == 0 else 6)
        codes = _ranks(
            method,
            data,
            out,
            False,
            [point if rank == 0 else 0, point if rank == 1 else 0],
            launcher,
            patience=120,
        )
        lonely = codes[1 - rank]
        if codes[rank] != -9:  # it had ended before the moment came
            tally.add(
                "ranks killed",
                False,
                f"{method}: rank {rank} was not killed at {point} (exit codes {codes})",
            )
            continue
        if lonely is None or lonely == 0:
            tally.add(
                "ranks killed",
                False,
                f"{method}, {launcher}, rank {rank} at {point}: the other went on (exit code"
                f" {lonely})",
            )
            continue
        codes = _ranks(method, data, out, True, [0, 0], launcher)
        wrong = [f"exit codes {codes}"] if codes != [0, 0] else differences(out, whole)
        tally.add(
            "ranks killed",
            not wrong,
            f"{method}, {launcher}, rank {rank} at {point}: {', '.join(wrong[:4])}",
        )


def full_disks(number: int, chance: random.Random, room: Path, tally: Tally) -> None:
    """Disks that are full after some bytes: reported in a sentence, and the resumed run ends as if
    nothing had happened."""
    from kinfolk.errors import KinfolkError
    from kinfolk.training.train import train

    data = room / "data"
    write_data(data)
    for turn in range(number):
        method = METHODS[turn % len(METHODS)]
        whole, out = room / "whole" / method, room / "full" / method
        if not whole.exists():
            train(**arguments(method, data, whole))
        shutil.rmtree(out, ignore_errors=True)
        size, message = chance.randrange(1 << chance.randrange(10, 23)), "nothing"
        try:
            with full_disk(size):
                train(**arguments(method, data, out))
        except KinfolkError as error:
            message = str(error)
        if message != "nothing" and "the disk is full" not in message:
            tally.add("full disks", False, f"{method}, {size} bytes: {message}")
            continue
        train(**arguments(method, data, out), resume=True)
        wrong = differences(out, whole)
        tally.add("full disks", not wrong, f"{method}, {size} bytes: {', '.join(wrong[:4])}")


def small_disks(number: int, chance: random.Random, room: Path, tally: Tally) -> None:
    """The same on a file system that is really full, with the logs of TensorBoard on it, where one
    may be mounted."""
    data, place, report = room / "data", room / "small", room / "report"
    write_data(data)
    place.mkdir()
    method = "sogclr+glofnd"
    whole = room / "whole" / method
    for _ in range(number):
        size = chance.randrange(8, 600)
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(place)],
            capture_output=True,
            check=False,
        ).returncode:
            print("small disks: not permitted here", flush=True)  # noqa: T201
            return
        try:
            report.unlink(missing_ok=True)
            in_children([(tell_child, (method, str(data), str(place / "run"), str(report)), {})])
            message = (
                report.read_text(encoding="utf-8") if report.exists() else "it ended without a word"
            )
            if message not in ("nothing",) and "the disk is full" not in message:
                tally.add("small disks", False, f"{size} KiB: {message}")
                continue
            subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)
            (code,) = in_children(
                [(train_child, (method, str(data), str(place / "run"), True, 0, None), {})]
            )
            if not whole.exists():
                in_children([(train_child, (method, str(data), str(whole), False, 0, None), {})])
            wrong = [f"exit code {code}"] if code != 0 else differences(place / "run", whole)
            tally.add("small disks", not wrong, f"{size} KiB: {', '.join(wrong[:4])}")
        finally:
            subprocess.run(["umount", str(place)], check=True)


def tell_child(method: str, data: str, out: str, report: str) -> None:
    """A training that leaves what its error said: one of ours, or the traceback's last line."""
    from kinfolk.errors import KinfolkError
    from kinfolk.training.train import train

    warnings.simplefilter("ignore")
    more = arguments(method, Path(data), Path(out))
    more["settings"] = {
        **more["settings"],
        "trainer.loggers": ["tensorboard"],
        "trainer.log_every": 1,
    }
    message = "nothing"
    try:
        train(**more)
    except KinfolkError as error:
        message = str(error)
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
    Path(report).write_text(message, encoding="utf-8")


def _ranks(
    method: str,
    data: Path,
    out: Path,
    resume: bool,
    points: list[int],
    launcher: str,
    patience: float = 300,
) -> list[int | None]:
    calls: list[Any] = [
        (train_child, (method, str(data), str(out), resume, point, None), environment)
        for point, environment in zip(points, as_ranks(len(points), launcher), strict=True)
    ]
    return in_children(calls, patience)


def flips(number: int, chance: random.Random, room: Path, tally: Tally) -> None:
    """Single bits of checkpoint, model, towers and cache: refused, or for the cache read anew;
    never loaded as they are."""
    for kind, path, held in readers(room):
        whole = path.read_bytes()
        for _ in range(number):
            bit = chance.randrange(len(whole) * 8)
            with replaced(path, flipped(whole, bit)):
                tally.add(f"bit flips, {kind}", held(), f"bit {bit} of {path.name}")
        for _ in range(max(1, number // 10)):
            with replaced(path, mutated(whole, chance)):
                if path.read_bytes() != whole:
                    tally.add(
                        f"damaged, {kind}", held(), f"{path.name}, {path.stat().st_size} bytes"
                    )


def readers(room: Path) -> list[tuple[str, Path, Callable[[], bool]]]:
    """(kind, file, whether a reader of the file, as it is now, holds: refuses it or gives what was
    written)."""
    import torch

    from kinfolk.data.open_source import open_source
    from kinfolk.data.prepare import prepare
    from kinfolk.errors import KinfolkError
    from kinfolk.models.weights import load_encoder, read_state
    from kinfolk.training.checkpoint import read_checkpoint
    from kinfolk.training.train import train

    data = room / "data"
    write_data(data)
    if not (room / "flipped").exists():
        train(**arguments("sogclr+glofnd", data, room / "flipped" / "images"))
        train(**arguments("clip+glofnd", data, room / "flipped" / "text"))
    images, text = room / "flipped" / "images", room / "flipped" / "text"

    def refused(read: Callable[[], object]) -> Callable[[], bool]:
        def held() -> bool:
            try:
                read()
            except KinfolkError:
                return True
            return False

        return held

    source = open_source(str(data / "text"))
    cache = room / "cache"
    wanted = prepare(source, image_size=16, cache_dir=cache, shared=True, workers=0).pixels(
        torch.arange(24)
    )

    def cached() -> bool:
        try:
            again = prepare(
                open_source(str(data / "text")),
                image_size=16,
                cache_dir=cache,
                shared=True,
                workers=0,
            )
        except KinfolkError:
            return True
        return torch.equal(again.pixels(torch.arange(24)), wanted)

    found = [
        (
            "checkpoint",
            images / "checkpoints" / "last.ckpt",
            refused(lambda: read_checkpoint(images / "checkpoints" / "last.ckpt")),
        ),
        ("model", images / "model.safetensors", refused(lambda: load_encoder(images))),
        (
            "towers",
            text / "towers.safetensors",
            refused(lambda: read_state(text / "towers.safetensors")),
        ),
    ]
    for suffix in (".u8", ".crc32", ".arrow", ".json"):
        (path,) = cache.rglob(f"*{suffix}")
        found.append((f"cache {suffix}", path, cached))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        help="of everything random; another each time unless it is given",
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--flips", type=int, default=150, help="of each of eight files")
    parser.add_argument("--disks", type=int, default=20, help="full disks")
    parser.add_argument("--files", type=int, default=300, help="hostile files")
    parser.add_argument("--ranks", type=int, default=20, help="ranks to kill")
    chosen = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if chosen.seed is None else chosen.seed
    print(f"seed {seed}", flush=True)  # noqa: T201
    tally = Tally()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # bit for bit the same result is promised for one number of threads
    with tempfile.TemporaryDirectory(prefix="kinfolk-faults-") as folder:
        for name, part, number in (
            ("bit flips", flips, chosen.flips),
            ("hostile files", hostile_files, chosen.files),
            ("full disks", full_disks, chosen.disks),
            ("small disks", small_disks, chosen.disks),
            ("kills", kills, chosen.kills),
            ("ranks", rank_kills, chosen.ranks),
        ):
            start = time.monotonic()
            if number:
                part(number, random.Random(f"{seed} {name}"), Path(folder), tally)
                print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)  # noqa: T201
    print(tally.table())  # noqa: T201
    return 0 if tally.all_held else 1


if __name__ == "__main__":
    sys.exit(main())
