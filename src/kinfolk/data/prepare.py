"""Preparing data: every image is read, checked and decoded once. The other processes of a training
map the result."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from kinfolk.data.decode import Read, RefusedError, decode, digest, strict_pillow
from kinfolk.data.images import ImageData
from kinfolk.data.labels import group_ids, read_columns
from kinfolk.data.pixel_cache import (
    CacheFolder,
    Contents,
    FileStore,
    MemoryStore,
    available_memory,
    map_cache,
)
from kinfolk.data.sample_table import Samples
from kinfolk.data.source import (
    Item,
    Refusals,
    Source,
    all_refused,
    arrange,
    tabulate,
)
from kinfolk.data.text import read_pairs
from kinfolk.data.workers import default_workers, read_files
from kinfolk.errors import (
    KinfolkError,
    UsageError,
    csv_text,
    require,
    short,
    show_progress,
    unescape_cell,
)
from kinfolk.files import append_line, read_sealed_text, write_sealed_text, write_text

LOG = logging.getLogger("kinfolk.data")
_FEW = 64
_SMALL_BYTES = 64 << 20
_NATIVE_SIDE = 64


def prepare(
    source: Source,
    *,
    image_size: int,
    workers: int | None = None,
    pixel_cap: int = 50_000_000,
    cache_dir: str | Path | None = None,
    progress: bool = False,
    shared: bool = False,
) -> ImageData:
    """Reads every image once. Bad images are refused with a reason, never replaced. Images are
    squashed to `image_size` × `image_size`; arrays of one size keep it if no side is above 64 or
    `image_size`. Pixels are kept in memory if they take less than half of what is free, and in a
    mapped file otherwise, or if `shared` by processes, or if there is a `cache_dir` and they take
    more than 64 MiB. `workers`: None: one per processor; 0: none. `pixel_cap`: largest width ×
    height, read from the header."""
    if source.has_texts:
        return read_pairs(source)
    require(image_size >= 1, "image_size", image_size, "1 or more")
    require(workers is None or workers >= 0, "workers", workers, "0 or more")
    if shared and cache_dir is None:
        raise UsageError("`shared` needs a `cache_dir` that all processes can read")
    listing, workers = Listing(source), default_workers() if workers is None else workers
    height, width = cached_size(source.native_size, image_size)
    folder = found = None
    if cache_dir is not None:
        setting = {"height": height, "width": width, "pixel_cap": pixel_cap}
        folder = CacheFolder(cache_dir, listing.state(), source=source.name, **setting)
        found = folder.find()
    shape = len(listing.images), height, width, 3
    num_bytes = math.prod(shape)
    fits = num_bytes < available_memory() // 2
    in_memory = fits and not shared and (folder is None or num_bytes <= _SMALL_BYTES)
    if found is None and in_memory:
        folder = None
    with nullcontext() if found is not None or folder is None else one_writer(folder.path):
        if found is None and folder is not None:
            found = folder.find()  # another process may have written it meanwhile
        if found is None:
            path = None if folder is None else folder.path
            store = MemoryStore(shape) if in_memory else FileStore(path, shape)
            reads = _read_all(source, listing.images, (height, width, pixel_cap), workers)
            try:
                with strict_pillow(), closing(reads):
                    shown = show_progress(reads, shape[0], "Reading images", enabled=progress)
                    samples, refused = listing.tabulate(shown, store)
                if folder is not None and isinstance(store, FileStore):
                    found = folder.publish(store, samples, refused)
                else:
                    found = Contents(samples, refused, store.finish())
            except BaseException:
                store.abandon()
                raise
    return listing.image_data(found, folder)


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Locks `folder`, and waits for another process that writes it."""
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "writer.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        LOG.info("%s", f"another process is preparing {folder}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def cached_size(native: tuple[int, int] | None, image_size: int) -> tuple[int, int]:
    """`native`: (height, width) of arrays of one size."""
    if native is not None and max(native) <= max(image_size, _NATIVE_SIDE):
        return native
    return image_size, image_size


def _read_all(
    source: Source, indices: Sequence[int], setting: tuple[int, int, int], workers: int
) -> Generator[Read, None, None]:
    places = [place for index in indices if (place := source.path(index)) is not None]
    if len(places) == len(indices):
        yield from read_files(places, *setting, workers if len(places) >= _FEW else 0)
        return
    # Pillow decodes without holding the interpreter
    with ThreadPoolExecutor(max(1, workers), "kinfolk-decode") as pool:
        pending: deque[Future[Read]] = deque()
        for index in indices:
            pending.append(pool.submit(_decode_loaded, *_load(source, index), *setting))
            if len(pending) > 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _load(source: Source, index: int) -> tuple[Any, tuple[int, int]]:
    data: Any
    try:
        data = source.load(index)
        size = len(data) if isinstance(data, bytes) else data.nbytes
    except Exception as error:  # a Dataset may raise anything
        data, size = error, 0
    return data, source.stat(index) or (size, 0)


def _decode_loaded(data: Any, size: tuple[int, int], *setting: int) -> Read:
    try:
        if isinstance(data, Exception):
            raise data
        found = decode(data, *setting)
    except (RefusedError, KinfolkError) as error:
        return Read(*size, reason=str(error))
    except Exception as error:
        return Read(*size, reason=f"{type(error).__name__}: {error}")
    return Read(*size, digest(data), found.width, found.height, found.pixels)


# The table of samples


@final
class Listing:
    """Items in the order of their ids. `images`: index of the first item of each image."""

    def __init__(self, source: Source) -> None:
        self._source, self._items = source, source.items()
        if not self._items:
            raise all_refused(source.name, source.refused)
        key, count = Counter(item.key for item in self._items).most_common(1)[0]
        if count > 1:
            raise KinfolkError(
                f"{source.name} has two samples with the key `{short(key)}`; rename one of them"
            )
        self._order = arrange(self._items)
        self.images = list(dict.fromkeys(map(self._image_of, self._order)))

    def state(self) -> str:
        """A digest of keys with sizes and times, or with contents."""
        found = hashlib.blake2b(json.dumps(self._source.refused).encode(), digest_size=16)
        for index in self.images:
            status: Any = self._source.stat(index)
            if status is None or status[1] == 0:
                try:
                    status = digest(self._source.load(index))
                except Exception:  # a Dataset may raise anything
                    status = None
            found.update(json.dumps([self._items[index].key, status]).encode())
        return found.hexdigest()

    def tabulate(
        self, reads: Iterable[Read], store: MemoryStore | FileStore
    ) -> tuple[Samples, Refusals]:
        good: list[tuple[Item, Read]] = []
        refused: Refusals = []
        for index, read in zip(self.images, reads, strict=True):
            item = self._items[index]
            if read.pixels is None:
                refused.append((item.key, str(read.reason)))
            else:
                store.add(read.pixels)
                good.append((item, read._replace(pixels=None)))
        if not good:
            raise all_refused(self._source.name, [*self._source.refused, *refused])
        samples = tabulate(
            [Item(item.key, split=item.split) for item, _ in good],
            None,
            widths=np.array([read.width for _, read in good]),
            heights=np.array([read.height for _, read in good]),
            sizes_bytes=np.array([read.size_bytes for _, read in good]),
            modified_ns=np.array([read.modified_ns for _, read in good]),
            digests=[read.digest for _, read in good],
        )
        return samples, refused

    def image_data(self, contents: Contents, folder: CacheFolder | None) -> ImageData:
        reasons, cache = dict(contents.refused), contents.pixels
        row_of = {key: row for row, key in enumerate(contents.samples.keys)}
        image_keys = {index: self._items[self._image_of(index)].key for index in self._order}
        good = [index for index in self._order if image_keys[index] in row_of]
        rows = np.array([row_of[image_keys[index]] for index in good])
        bad = [index for index in self._order if image_keys[index] not in row_of]
        quarantine = [(self._items[index].key, reasons[image_keys[index]]) for index in bad]
        labels = np.array([-1 if (x := self._source.label(index)) is None else x for index in good])
        table = contents.samples.at(rows)
        columns = ("widths", "heights", "sizes_bytes", "modified_ns", "digests")
        samples = tabulate(
            [self._items[index] for index in good],
            self._source.classes,
            labels,
            **{column: getattr(table, column) for column in columns},
        )
        if samples.captions is not None or samples.groups is not None:
            known = group_ids(table.digests, samples.captions, samples.groups)
            samples = replace(samples, group_ids=known)
        data = ImageData(
            samples if folder is None else samples.map_from_file(folder.path),
            cache,
            None if np.array_equal(rows, np.arange(len(cache))) else torch.from_numpy(rows),
            [*self._source.refused, *quarantine],
        )
        if folder is not None:
            data.folder, data.verify = folder.path, folder.verify
        return data

    def _image_of(self, index: int) -> int:
        same_as = self._items[index].same_as
        return index if same_as is None else same_as


# Other processes of the same training


def hand_over(data: ImageData, note: Path) -> None:
    if data.folder is None:
        note.unlink(missing_ok=True)
        return
    rows = None if data.rows is None else data.rows.tolist()
    write_sealed_text(note, json.dumps([str(data.folder), str(data.samples.file), rows]))


def take_over(note: Path) -> ImageData | None:
    """None if the data is missing, as on another machine, or damaged."""
    try:
        folder, table, rows = json.loads(read_sealed_text(note))
        (cache, verify), samples = map_cache(Path(folder)), Samples.open(table)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if (len(samples) if rows is None else max(rows) + 1) > len(cache):
        return None
    data = ImageData(samples, cache, None if rows is None else torch.tensor(rows), [])
    data.folder, data.verify = Path(folder), verify
    return data


# Refused images


def write_quarantine(refused: Sequence[tuple[str, str]], path: str | Path) -> None:
    write_text(Path(path), csv_text(("path", "reason"), refused))


def read_quarantine(path: str | Path) -> Refusals:
    path = Path(path)
    columns = read_columns(path) if path.is_file() else {}
    if list(columns) != ["path", "reason"]:
        raise KinfolkError(
            f"`{short(str(path))}` must be a table with the columns path and reason; restore it, or"
            " start a new run"
        )
    rows = zip(columns["path"], columns["reason"], strict=True)
    return [(unescape_cell(key), unescape_cell(reason)) for key, reason in rows]


def describe_refused(
    refused: Sequence[tuple[str, str]],
    total: int,
    where: str | Path = "quarantine.csv",
    what: str = "images",
) -> str | None:
    if not refused:
        return None
    verb = "was" if len(refused) == 1 else "were"
    return f"{len(refused):,} of {total:,} {what} {verb} refused; see {where}"


def add_to_quarantine(key: str, reason: str, path: str | Path) -> None:
    """Appends a row, unless another rank or epoch has added this key."""
    path = Path(path)
    if not path.exists():
        write_quarantine([], path)
    if key not in dict(read_quarantine(path)):
        # one write, so that rows of two ranks do not mix
        append_line(path, csv_text(("path", "reason"), [(key, reason)]).split("\n")[1])
