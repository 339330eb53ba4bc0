"""Preparing data: every image is read, checked and decoded once, into pixels by sample id; refused
images are written to a quarantine file. The other processes of a training map the result."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from kinfolk.data.decode import Read, RefusedError, decode, digest, read_file, strict_pillow
from kinfolk.data.images import ImageData
from kinfolk.data.labels import group_ids, read_columns, same_type
from kinfolk.data.pixel_cache import (
    CacheFolder,
    Contents,
    FileStore,
    MemoryStore,
    available_memory,
    map_cache,
)
from kinfolk.data.sample_table import Samples
from kinfolk.data.source import Refusals, Source, all_refused, arrange, content_change
from kinfolk.data.text import read_pairs
from kinfolk.data.workers import default_workers, read_files
from kinfolk.errors import KinfolkError, UsageError, csv_text, short, show_progress, unescape_cell
from kinfolk.files import (
    append_line,
    read_sealed_text,
    write_atomically,
    write_sealed_text,
    write_text,
)

__all__ = ["ImageData", "prepare"]

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
    """Reads every image once. Bad images are refused with a reason, never replaced. Text pairs have
    no images, and no argument applies to them.

    Images are squashed to `image_size` × `image_size`; arrays of one size keep it if no side is
    above 64 or `image_size`. Pixels are kept in memory if they take less than half of what is free,
    and in a mapped file otherwise, or if `shared`, or if there is a `cache_dir` and they take more
    than 64 MiB. A complete file in `cache_dir` for the same images is used again.

    Args:
        workers: processes that decode files; None: one per processor; 0: none.
        pixel_cap: largest width × height, read from the header.
        shared: several processes will use the same pixels; needs `cache_dir`.
    """
    if source.has_texts:
        return read_pairs(source)
    if image_size < 1:
        raise UsageError(f"`image_size` (={image_size}) must be 1 or more")
    if workers is not None and workers < 0:
        raise UsageError(f"`workers` (={workers}) must be 0 or more")
    if shared and cache_dir is None:
        raise UsageError("`shared` needs a `cache_dir` that all processes can read")
    listing = Listing(source)
    folder = None
    size = height, width = cached_size(source.native_size, image_size)
    if cache_dir is not None:
        source.keep(Path(cache_dir))
        setting: dict[str, int | str] = {"source": source.name, "height": height, "width": width}
        folder = CacheFolder(cache_dir, **setting, pixel_cap=pixel_cap)
    number = len(listing.images)
    num_bytes = number * height * width * 3
    in_memory = (
        num_bytes < available_memory() // 2
        and not shared
        and (folder is None or num_bytes <= _SMALL_BYTES)
    )
    with ExitStack() as held:
        found = None if folder is None else folder.find(listing.agrees)
        if found is None and in_memory:
            folder = None
        elif found is None and folder is not None:
            held.enter_context(one_writer(folder.path))
            found = folder.find(listing.agrees)  # another process may have written it meanwhile
        if found is None:
            store = (
                MemoryStore(number, *size)
                if in_memory
                else FileStore(folder and folder.path, number, *size)
            )
            reads = _read_all(source, listing.images, height, width, pixel_cap, workers)
            found = _decode(listing, reads, store, folder, progress)
    return listing.image_data(*found, folder)


def _decode(
    listing: Listing,
    results: Generator[Read, None, None],
    store: MemoryStore | FileStore,
    folder: CacheFolder | None,
    progress: bool,
) -> tuple[Contents, Tensor]:
    number, reads = len(listing.images), []
    try:
        with strict_pillow(), closing(results):
            for read in show_progress(results, number, "Reading images", enabled=progress):
                if read.pixels is not None:
                    store.add(read.pixels)
                reads.append(read._replace(pixels=None))
        contents = listing.contents(reads)
        if folder is not None and isinstance(store, FileStore):
            return contents, folder.publish(store, contents)
        return contents, store.finish()
    except BaseException:
        store.abandon()
        raise


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
    """(height, width) of the pixels that are kept. `native`: the size of arrays of one size."""
    if native is not None and max(native) <= max(image_size, _NATIVE_SIDE):
        return native
    return image_size, image_size


def _read_all(
    source: Source,
    indices: Sequence[int],
    height: int,
    width: int,
    pixel_cap: int,
    workers: int | None,
) -> Generator[Read, None, None]:
    places = [source.path(index) for index in indices]
    workers = default_workers() if workers is None else workers
    files = [place for place in places if place is not None]
    if len(files) == len(indices) and len(files) >= _FEW and workers > 0:
        yield from read_files(files, height, width, pixel_cap, workers)
        return
    # Pillow decodes without holding the interpreter
    with ThreadPoolExecutor(max(1, workers), "kinfolk-decode") as pool:
        pending: deque[Future[Read]] = deque()
        for index, place in zip(indices, places, strict=True):
            if place is not None:
                pending.append(pool.submit(read_file, place, height, width, pixel_cap))
            else:
                loaded = _load(source, index)
                pending.append(pool.submit(_decode_loaded, *loaded, height, width, pixel_cap))
            if len(pending) > 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _load(source: Source, index: int) -> tuple[Any, tuple[int, int]]:
    try:
        data = source.load(index)
        size = len(data) if isinstance(data, bytes) else data.nbytes
        return data, source.stat(index) or (size, 0)
    except Exception as error:  # a Dataset may raise anything
        return _why(error), source.stat(index) or (0, 0)


def _decode_loaded(
    data: Any, size: tuple[int, int], height: int, width: int, pixel_cap: int
) -> Read:
    if isinstance(data, str):
        return Read(*size, reason=data)
    try:
        found = decode(data, height, width, pixel_cap)
    except Exception as error:
        return Read(*size, reason=_why(error))
    return Read(*size, digest(data), found.width, found.height, found.pixels)


def _why(error: Exception) -> str:
    is_known = isinstance(error, RefusedError | KinfolkError)
    return str(error) if is_known else f"{type(error).__name__}: {error}"


# The table of samples


@final
class Listing:
    """The items of a source in the order of their ids. `images`: item index of every image to read;
    items that share an image count once."""

    def __init__(self, source: Source) -> None:
        self._source, self._items = source, source.items()
        if not self._items:
            raise all_refused(source.name, source.refused)
        seen: set[str] = set()
        for item in self._items:
            if item.key in seen:
                raise KinfolkError(
                    f"{source.name} has two samples with the key `{short(item.key)}`; rename one of"
                    " them"
                )
            seen.add(item.key)
        self._order = arrange(self._items)
        self.images = list(dict.fromkeys(self._image_of(index) for index in self._order))

    def contents(self, reads: Sequence[Read]) -> Contents:
        both = [(self._items[index], read) for index, read in zip(self.images, reads, strict=True)]
        good = [(item, read) for item, read in both if read.reason is None]
        refused = [
            (item.key, read.reason, read.size_bytes, read.modified_ns)
            for item, read in both
            if read.reason is not None
        ]
        unread = self._source.refused
        if not good:
            raise all_refused(self._source.name, [*unread, *(row[:2] for row in refused)])
        samples = Samples(
            ids=np.arange(len(good)),
            keys=[item.key for item, _ in good],
            widths=np.array([read.width for _, read in good]),
            heights=np.array([read.height for _, read in good]),
            labels=None,
            classes=None,
            splits=[item.split for item, _ in good],
            sizes_bytes=np.array([read.size_bytes for _, read in good]),
            modified_ns=np.array([read.modified_ns for _, read in good]),
            digests=[read.digest for _, read in good],
        )
        return Contents(samples, list(unread), refused)

    def agrees(self, contents: Contents) -> bool:
        """Whether a cache with these contents holds exactly the images of this source."""
        refused = {path: (size, time) for path, _, size, time in contents.refused}
        good = [index for index in self.images if self._items[index].key not in refused]
        bad = [index for index in self.images if self._items[index].key in refused]
        return (
            contents.unread == self._source.refused
            and len(bad) == len(refused)
            and all(self._source.stat(index) == refused[self._items[index].key] for index in bad)
            and contents.samples.keys == [self._items[index].key for index in good]
            and content_change(contents.samples, self._source, good) is None
        )

    def image_data(
        self, contents: Contents, cache: Tensor, folder: CacheFolder | None
    ) -> ImageData:
        reasons = {path: reason for path, reason, *_ in contents.refused}
        row_of = {key: row for row, key in enumerate(contents.samples.keys)}
        good: list[int] = []
        places: list[int] = []
        quarantine = list(contents.unread)
        for index in self._order:
            image_key = self._items[self._image_of(index)].key
            if image_key in row_of:
                good.append(index)
                places.append(row_of[image_key])
            else:
                quarantine.append((self._items[index].key, reasons[image_key]))
        items, rows = [self._items[index] for index in good], np.array(places)
        labels = np.array([-1 if (x := self._source.label(index)) is None else x for index in good])
        captions = same_type([item.caption for item in items])
        groups = [item.group for item in items]
        table = contents.samples.at(rows)
        samples = replace(
            table,
            keys=[item.key for item in items],
            splits=[item.split for item in items],
            labels=labels if (labels >= 0).any() else None,
            classes=self._source.classes,
            captions=captions if any(each is not None for each in captions) else None,
            groups=groups if any(each is not None for each in groups) else None,
        )
        if samples.captions is not None or samples.groups is not None:
            known = group_ids(table.digests, samples.captions, samples.groups)
            samples = replace(samples, group_ids=known)
        is_plain = len(rows) == len(cache) and bool((rows == np.arange(len(rows))).all())
        data = ImageData(
            samples if folder is None else samples.map_from_file(folder.path),
            cache,
            None if is_plain else torch.from_numpy(rows),
            quarantine,
        )
        if folder is not None:
            data.folder, data.verify = folder.path, folder.verify
        return data

    def _image_of(self, index: int) -> int:
        same_as = self._items[index].same_as
        return index if same_as is None else same_as


# Other processes of the same training


def hand_over(data: ImageData, note: Path) -> None:
    """Writes the location of the data to `note`; removes `note` if the data is in memory."""
    if data.folder is None or data.samples.file is None:
        note.unlink(missing_ok=True)
        return
    rows = b"" if data.rows is None else data.rows.numpy().astype("<i8").tobytes()
    file = data.samples.file.with_suffix(".i8")
    write_atomically(file, lambda opened: opened.write(rows))
    places = [str(data.folder), str(data.samples.file), str(file), _digest(rows)]
    write_sealed_text(note, json.dumps(places))


def take_over(note: Path) -> ImageData | None:
    """The data that `hand_over` recorded; None if it is missing, as on another machine, or
    damaged."""
    try:
        folder, table, file, digest_of_rows = json.loads(read_sealed_text(note))
        (cache, verify), samples = map_cache(Path(folder)), Samples.open(table)
        content = Path(file).read_bytes()
    except (OSError, ValueError, KeyError, TypeError, KinfolkError):
        return None
    if _digest(content) != digest_of_rows:
        return None
    rows = torch.from_numpy(np.frombuffer(content, dtype="<i8").copy()) if content else None
    if (len(samples) if rows is None else int(rows.max()) + 1) > len(cache):
        return None
    data = ImageData(samples, cache, rows, [])
    data.folder, data.verify = Path(folder), verify
    return data


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


# Refused images


def write_quarantine(refused: Sequence[tuple[str, str]], path: str | Path) -> None:
    write_text(Path(path), csv_text(("path", "reason"), refused))


def read_quarantine(path: str | Path) -> Refusals:
    path = Path(path)
    if not path.is_file():
        raise KinfolkError(
            f"there is no `{short(str(path))}`; the run folder is incomplete: restore it, or start"
            " a new run"
        )
    columns = read_columns(path)
    if list(columns) != ["path", "reason"]:
        raise KinfolkError(
            f"`{short(str(path))}` is not a quarantine file; its columns must be path and reason"
        )
    rows = zip(columns["path"], columns["reason"], strict=True)
    return [(unescape_cell(key), unescape_cell(reason)) for key, reason in rows]


def describe_refused(
    refused: Sequence[tuple[str, str]],
    total: int,
    where: str | Path = "quarantine.csv",
    what: str = "images",
) -> str | None:
    """One line for the screen, or None where nothing was refused."""
    if not refused:
        return None
    verb = "was" if len(refused) == 1 else "were"
    return f"{len(refused):,} of {total:,} {what} {verb} refused; see {where}"


def add_to_quarantine(key: str, reason: str, path: str | Path) -> None:
    """Appends one row, unless the file has one for this key from another rank or epoch."""
    path = Path(path)
    if not path.exists():
        write_quarantine([], path)
    if any(key == known for known, _ in read_quarantine(path)):
        return
    # one write, so that rows of two ranks do not mix
    append_line(path, csv_text(("path", "reason"), [(key, reason)]).split("\n")[1])
