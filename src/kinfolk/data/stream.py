"""Streamed data: images that are read and decoded whenever they are needed, by sample id; the order
of an epoch is a function of seed and epoch."""

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

from kinfolk.data.decode import Place, Read, read_bytes
from kinfolk.data.images import ImageData
from kinfolk.data.open_source import open_folder
from kinfolk.data.prepare import add_to_quarantine, one_writer
from kinfolk.data.sample_table import Places, Samples
from kinfolk.data.shards import expand, find_shards, index_shards
from kinfolk.data.source import Item, Refusals, Source, all_refused, arrange
from kinfolk.data.workers import DecodePool, default_workers
from kinfolk.errors import KinfolkError, UsageError, short
from kinfolk.files import remove_unfinished
from kinfolk.seeding import generator

LOG = logging.getLogger("kinfolk.data")
_GONE = ("can't be read", "truncated: the archive")


@final
class StreamOrder:
    """The training samples of one epoch, each once: shards shuffled, then samples shuffled within
    windows of consecutive shards, so that reads stay close together.

    Args:
        starts: (S + 1,) the first id of each shard, and the number of training samples.
        window: number of samples that are shuffled together.

    Example:
        >>> order = StreamOrder(np.array([0, 2, 5]), window=5, seed=0, epoch=0)
        >>> sorted(order[0:5].tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, starts: npt.NDArray[np.int64], window: int, seed: int, epoch: int) -> None:
        self.starts, self.size, self.seed, self.epoch = starts, window, seed, epoch
        self.shards = torch.randperm(
            len(starts) - 1, generator=generator(seed, "shards", epoch)
        ).numpy()
        lengths = np.diff(starts)[self.shards]
        self.ends = lengths.cumsum()
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
        begin = self.ends[shard] - np.diff(self.starts)[self.shards[shard]]
        ids = torch.from_numpy(self.starts[self.shards[shard]] + place - begin)
        return ids[
            torch.randperm(len(ids), generator=generator(self.seed, "window", self.epoch, number))
        ]


@final
class StreamedPixels:
    """Reads images by id, in worker processes. A corrupt image is added to `quarantine` and to the
    file `note` (of the run), left out of its batch and not read again. A shard that is missing or
    truncated ends the training with an error."""

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
        self.height, self.width, self.window = height, width, window
        self.pool = DecodePool(
            height, width, pixel_cap, default_workers() if workers is None else workers
        )
        self.quarantine: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._bad: set[int] = set()
        self._aspects = np.zeros(len(samples), dtype=np.float32)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.samples), self.height, self.width, 3

    def order(self, seed: int, epoch: int) -> StreamOrder | Tensor:
        archive = self.places.archive[: self.num_train]
        if len(archive) and archive[0] < 0:
            return torch.randperm(self.num_train, generator=generator(seed, "shuffle", epoch))
        starts = np.flatnonzero(np.diff(archive, prepend=-1))
        return StreamOrder(np.append(starts, self.num_train), self.window, seed, epoch)

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(G, H, W, 3) pixels, (G,) aspects and (G,) positions within `ids` (B,) of the good
        images."""
        readable = [place for place, id_ in enumerate(ids.tolist()) if id_ not in self._bad]
        rows = ids[readable]
        pixels, reads = self.pool.read([self.samples.place(row) for row in rows.tolist()])
        good = []
        for place, (id_, read) in enumerate(zip(rows.tolist(), reads, strict=True)):
            if read.reason is None:
                good.append(place)
                self._aspects[id_] = read.width / read.height
            else:
                self._refuse(id_, read)
        if len(good) < len(pixels):
            pixels = pixels[good]
        kept = torch.tensor(readable, dtype=torch.int64)[good]
        return (
            torch.from_numpy(np.asarray(pixels)),
            torch.from_numpy(self._aspects[ids[kept].numpy()]),
            kept,
        )

    def pixels(self, ids: Tensor) -> Tensor:
        """(B, H, W, 3), for evaluation; black for a refused image."""
        found, _, kept = self.read(ids)
        if len(kept) == len(ids):
            return found
        everything = found.new_zeros((len(ids), *found.shape[1:]))
        everything[kept] = found
        return everything

    def aspect(self, ids: Tensor) -> Tensor:
        """(B,) width / height of the original images; 1 for a refused image."""
        rows = ids.numpy()
        unknown = ids[self._aspects[rows] == 0]
        if len(unknown):
            self.read(unknown)
        found = torch.from_numpy(self._aspects[rows])
        return found.where(found > 0, 1.0)

    def _refuse(self, id_: int, read: Read) -> None:
        key, reason = self.samples.keys[id_], str(read.reason)
        number = int(self.places.archive[id_])
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
        LOG.warning(
            "%s",
            f"{short(key)} was refused: {reason}; training leaves it out, and evaluation uses a"
            " black image instead",
        )


@final
class StreamSource(Source):
    """Shards or a folder of images that are not decoded in advance; `index_dir` is for the
    table."""

    def __init__(
        self, spec: object, index_dir: Path, *, labels_from_folders: bool | None = False
    ) -> None:
        path, name = Path(str(spec)), f"`{short(str(spec))}`"
        shards = {} if path.exists() else {"train": expand(str(spec))}
        if path.is_dir() or (path.is_file() and path.suffix.lower() == ".tar"):
            shards = find_shards(path)
            if shards and labels_from_folders:
                raise UsageError(
                    f"`labels_from_folders` needs a folder of images; {name} holds shards,"
                    " whose labels are .cls files"
                )
        if any(shards.values()):
            self.samples, refused = index_shards(shards, name, index_dir)
        elif path.is_dir():
            self.samples, refused = _list_folder(path, labels_from_folders is not False, index_dir)
        else:
            missing = not path.exists() and str(spec) != "digits"
            raise UsageError(
                (f"there is no file or folder {name}; " if missing else "")
                + "`data.streaming` needs webdataset shards (.tar) or a folder of images"
                + ("" if missing else f", not {name}")
            )
        super().__init__(name, [], classes=self.samples.classes, refused=refused)
        self._items = _Items(self.samples)

    def image_data(
        self, *, image_size: int, workers: int | None, pixel_cap: int, window: int
    ) -> ImageData:
        stream = StreamedPixels(
            self.samples,
            image_size,
            image_size,
            pixel_cap=pixel_cap,
            workers=workers,
            window=window,
        )
        return ImageData(self.samples, stream, None, list(self.refused))

    def load(self, index: int) -> bytes:
        return read_bytes(self.path(index))

    def path(self, index: int) -> Place:
        return self.samples.place(index)

    def stat(self, index: int) -> tuple[int, int]:
        return int(self.samples.sizes_bytes[index]), int(self.samples.modified_ns[index])


@final
class _Items(Sequence[Item]):
    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[at] for at in range(*row.indices(len(self)))]
        sample = self._samples[range(len(self))[row]]
        return Item(sample.key, sample.label, sample.split)


def _list_folder(root: Path, labels_from_folders: bool, folder: Path) -> tuple[Samples, Refusals]:
    source = open_folder(root, labels_from_folders=labels_from_folders)
    items = [source.items()[index] for index in arrange(source.items())]
    if not items:
        raise all_refused(source.name, source.refused)
    for item in items:
        if os.path.relpath(item.origin, root).replace(os.sep, "/") != item.key:
            raise KinfolkError(
                f"the file `{item.key}` has a name that is not UTF-8, which streaming cannot read;"
                " rename it"
            )
    labels = np.array([-1 if item.label is None else item.label for item in items])
    unknown = np.zeros(len(items), dtype=np.int64)
    samples = Samples(
        ids=np.arange(len(items)),
        keys=[item.key for item in items],
        widths=unknown,
        heights=unknown,
        labels=None if source.classes is None else labels,
        classes=source.classes,
        splits=[item.split for item in items],
        sizes_bytes=unknown,
        modified_ns=unknown,
        digests=[None] * len(items),  # type: ignore[list-item]
        places=Places([os.path.abspath(root)], unknown - 1, unknown),
    )
    with one_writer(folder / "streams"):
        remove_unfinished(folder / "streams")
        return samples.map_from_file(folder / "streams"), source.refused
