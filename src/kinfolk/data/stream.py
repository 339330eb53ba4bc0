"""Streamed data: images that are read and decoded whenever they are needed."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kinfolk.data.images import ImageData
from kinfolk.data.open_source import open_folder
from kinfolk.data.prepare import add_to_quarantine, one_writer
from kinfolk.data.sample_table import Places, Samples
from kinfolk.data.shards import expand, find_shards, index_shards
from kinfolk.data.source import (
    FileSource,
    Item,
    Refusals,
    Source,
    all_refused,
    arrange,
    tabulate,
)
from kinfolk.data.workers import DecodePool, default_workers
from kinfolk.errors import KinfolkError, UsageError, short
from kinfolk.files import remove_unfinished
from kinfolk.seeding import generator

LOG = logging.getLogger("kinfolk.data")
_GONE = ("can't be read", "truncated: the archive")


@final
class StreamOrder:
    """The training samples of one epoch, as a function of seed and epoch: shards shuffled, then
    samples within windows of consecutive shards, so that reads stay close together. `starts`: (S +
    1,) the first id of each shard, and the number of training samples."""

    def __init__(self, starts: npt.NDArray[np.int64], window: int, seed: int, epoch: int) -> None:
        self.starts, self.size, self.seed, self.epoch = starts, window, seed, epoch
        random = generator(seed, "shards", epoch)
        self.shards = torch.randperm(len(starts) - 1, generator=random).numpy()
        self.lengths = np.diff(starts)[self.shards]
        self.ends = self.lengths.cumsum()
        self.window = lru_cache(maxsize=4)(self._window)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, part: slice) -> Tensor:
        start, stop, _ = part.indices(len(self))
        windows = range(start // self.size, (max(stop, start + 1) - 1) // self.size + 1)
        joined = torch.cat([self.window(number) for number in windows])
        first = windows.start * self.size
        return joined[start - first : stop - first]

    def _window(self, number: int) -> Tensor:
        place = np.arange(number * self.size, min((number + 1) * self.size, len(self)))
        shard = np.searchsorted(self.ends, place, side="right")
        begin = self.ends[shard] - self.lengths[shard]
        ids = torch.from_numpy(self.starts[self.shards[shard]] + place - begin)
        random = generator(self.seed, "window", self.epoch, number)
        return ids[torch.randperm(len(ids), generator=random)]


@final
class StreamedPixels:
    """Reads images by id. A corrupt image is added to `quarantine` and to the file `note`, left out
    of its batch and not read again. A missing or truncated shard ends the training."""

    note: Path | None = None

    def __init__(
        self,
        samples: Samples,
        height: int,
        width: int,
        *,
        pixel_cap: int,
        workers: int | None,
        window: int,
    ) -> None:
        assert samples.places is not None
        self.samples, self.places, self.num_train = samples, samples.places, samples.num_train
        self.window = window
        self.shape = len(samples), height, width, 3
        workers = default_workers() if workers is None else workers
        self.pool = DecodePool(height, width, pixel_cap, workers)
        self.quarantine: Refusals = []
        self._lock = threading.Lock()
        self._bad: set[int] = set()
        self._aspects = np.zeros(len(samples), dtype=np.float32)

    def order(self, seed: int, epoch: int) -> StreamOrder | Tensor:
        archive = self.places.archive[: self.num_train]
        if len(archive) and archive[0] < 0:
            return torch.randperm(self.num_train, generator=generator(seed, "shuffle", epoch))
        starts = np.flatnonzero(np.diff(archive, prepend=-1))
        return StreamOrder(np.append(starts, self.num_train), self.window, seed, epoch)

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(G, H, W, 3) pixels, (G,) aspects and (G,) positions in `ids` of the good images."""
        readable = [place for place, id_ in enumerate(ids.tolist()) if id_ not in self._bad]
        rows = ids[readable].tolist()
        reads = self.pool.read([self.samples.place(row) for row in rows])
        good, pixels = [], []
        for place, id_, read in zip(readable, rows, reads, strict=True):
            if read.pixels is not None:
                good.append(place)
                pixels.append(read.pixels)
                self._aspects[id_] = read.width / read.height
            else:
                self._refuse(id_, str(read.reason))
        kept = torch.tensor(good, dtype=torch.int64)
        aspects = torch.from_numpy(self._aspects[ids[kept].numpy()])
        stacked = np.stack(pixels) if pixels else np.empty((0, *self.shape[1:]), dtype=np.uint8)
        return torch.from_numpy(stacked), aspects, kept

    def pixels(self, ids: Tensor) -> Tensor:
        """(B, H, W, 3), for evaluation; black for a refused image."""
        found, _, kept = self.read(ids)
        if len(kept) == len(ids):
            return found
        everything = found.new_zeros((len(ids), *found.shape[1:]))
        everything[kept] = found
        return everything

    def aspect(self, ids: Tensor) -> Tensor:
        """(B,), 1 for a refused image."""
        rows = ids.numpy()
        unknown = ids[self._aspects[rows] == 0]
        if len(unknown):
            self.read(unknown)
        found = torch.from_numpy(self._aspects[rows])
        return found.where(found > 0, 1.0)

    def _refuse(self, id_: int, reason: str) -> None:
        key, number = self.samples.keys[id_], int(self.places.archive[id_])
        if number >= 0 and reason.startswith(_GONE):
            raise KinfolkError(
                f"the shard `{self.places.archives[number]}` is missing or has been truncated since"
                f" it was indexed ({short(key)}: {reason}); restore it and resume"
            )
        with self._lock:
            if id_ in self._bad:
                return
            self._bad.add(id_)
            self.quarantine.append((key, reason))
            if self.note is not None:
                add_to_quarantine(key, reason, self.note)
        LOG.warning("%s was refused: %s; training leaves it out", short(key), reason)


def open_stream(
    spec: str | os.PathLike[str], index_dir: Path, *, labels_from_folders: bool | None = False
) -> FileSource:
    """A source with `samples`, mapped from `index_dir`."""
    path, name = Path(spec), f"`{short(str(spec))}`"
    if path.is_dir() or (path.is_file() and path.suffix.lower() == ".tar"):
        shards = find_shards(path)
    else:
        shards = {} if path.exists() else {"train": expand(str(spec))}
    if any(shards.values()):
        if labels_from_folders:
            raise UsageError(f"`labels_from_folders` needs a folder of images, not {name}")
        samples, refused = index_shards(shards, name, index_dir)
    elif path.is_dir():
        samples, refused = _list_folder(path, labels_from_folders is not False, index_dir)
    else:
        if not path.exists() and str(spec) != "digits":
            raise UsageError(f"there is no file or folder {name}")
        raise UsageError(
            f"`data.streaming` needs webdataset shards (.tar) or a folder of images, not {name}"
        )
    source = FileSource(name, _Items(samples), classes=samples.classes, refused=refused)
    source.samples = samples
    return source


def stream_images(source: Source, image_size: int, **options: Any) -> ImageData:
    assert source.samples is not None
    pixels = StreamedPixels(source.samples, image_size, image_size, **options)
    return ImageData(source.samples, pixels, None, list(source.refused))


@final
class _Items(Sequence[Item]):
    """Made when they are asked for, because there may be 10⁸."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, row: Any) -> Any:
        samples, row = self._samples, range(len(self))[row]
        label = None if samples.labels is None else int(samples.labels[row])
        return Item(samples.keys[row], label, samples.splits[row], origin=samples.place(row))


def _list_folder(root: Path, labels_from_folders: bool, folder: Path) -> tuple[Samples, Refusals]:
    source = open_folder(root, labels_from_folders=labels_from_folders)
    items = [source.items()[index] for index in arrange(source.items())]
    if not items:
        raise all_refused(source.name, source.refused)
    for item in items:
        if not item.origin.endswith(item.key):
            raise KinfolkError(
                f"the file `{item.key}` has a name that is not UTF-8, which streaming cannot read;"
                " rename it"
            )
    nothing = np.zeros(len(items), dtype=np.int64)
    places = Places([os.path.abspath(root)], nothing - 1, nothing)
    samples = tabulate(items, source.classes, places=places)
    with one_writer(folder / "streams"):
        remove_unfinished(folder / "streams")
        return samples.map_from_file(folder / "streams"), source.refused
