"""The one pass over the data: read, check, decode, and keep."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from torch import Tensor

from kinfolk.data.cache import CacheFolder, Contents
from kinfolk.data.decode import Read, RefusedError, decode, digest, read_file, strict_pillow
from kinfolk.data.images import ImageData
from kinfolk.data.memory import available_memory
from kinfolk.data.pixel_store import FileStore, MemoryStore
from kinfolk.data.progress import show_progress
from kinfolk.data.roster import Roster
from kinfolk.data.samples import Samples
from kinfolk.data.source import Source
from kinfolk.data.workers import default_workers, read_files
from kinfolk.errors import KinfolkError, UsageError

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
    """Reads every image once; bad ones are refused with a reason, never replaced.

    Images are squashed to `image_size` × `image_size` (`ImageData.aspect` knows the original shape). Arrays of one size keep it if no
    side is above 64 or `image_size`. Pixels are kept in memory if they take less than half of what is free; in a memory-mapped
    file if they don't, if `shared`, or if `cache_dir` is given and they take more than 64 MiB. A complete file in `cache_dir` that
    belongs to the same images is used instead of decoding again. Of several processes that prepare one cache at the same time one writes
    it; the others wait for it and read it.

    Args:
        workers: processes that decode files; None: one per processor; 0: none. Fewer than 64 files, arrays and Datasets need none.
        pixel_cap: largest width × height, read from the header.
        progress: show a progress bar, if there is a terminal.
        shared: several processes on this machine will use the same pixels; needs `cache_dir`.
    """
    if image_size < 1:
        raise UsageError(f"`image_size` (={image_size}) must be 1 or more")
    if workers is not None and workers < 0:
        raise UsageError(f"`workers` (={workers}) must be 0 or more")
    if shared and cache_dir is None:
        raise UsageError("`shared` needs a `cache_dir` that all processes can read")
    roster = Roster(source)
    if cache_dir is not None:
        source.keep(cache_dir)
    height, width = _cache_size(source, image_size)
    folder = None if cache_dir is None else CacheFolder(cache_dir, source=source.name, height=height, width=width, pixel_cap=pixel_cap)
    num_bytes = len(roster.images) * height * width * 3
    in_memory = num_bytes < available_memory() // 2 and not shared and (folder is None or num_bytes <= _SMALL_BYTES)
    with ExitStack() as held:
        found = None if folder is None else folder.find(roster.agrees)
        if found is None and folder is not None and not in_memory:
            held.enter_context(one_writer(folder.path))
            found = folder.find(roster.agrees)  # another process may have written it meanwhile
        if found is not None or not in_memory:
            keep = Samples.packed if folder is None else partial(Samples.mapped, folder=folder.path)
        else:
            keep, folder = Samples.packed, None
        if found is None:
            results = _read_all(source, roster.images, height, width, pixel_cap, workers)
            store = (
                MemoryStore(len(roster.images), height, width)
                if in_memory
                else FileStore(None if folder is None else folder.path, len(roster.images), height, width)
            )
            found = _decode(roster, results, store, folder, progress)
    data = roster.image_data(*found, keep)
    if folder is not None:
        data.folder, data.verify = folder.path, folder.verify
    return data


def _decode(
    roster: Roster, results: Generator[Read, None, None], store: MemoryStore | FileStore, folder: CacheFolder | None, progress: bool
) -> tuple[Contents, Tensor]:
    """Decodes every image into the store."""
    try:
        reads = []
        with strict_pillow(), closing(results):
            for read in show_progress(results, len(roster.images), "Reading images", enabled=progress):
                if read.pixels is not None:
                    store.add(read.pixels)
                reads.append(read._replace(pixels=None))
        contents = roster.contents(reads)
        cache = folder.publish(store, contents) if folder is not None and isinstance(store, FileStore) else store.finish()
    except BaseException:
        store.abandon()
        raise
    return contents, cache


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Holds `folder` against other processes that would write the same cache; waits for one that does. The lock ends with its process."""
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


def _cache_size(source: Source, image_size: int) -> tuple[int, int]:
    native = source.native_size
    return native if native is not None and max(native) <= max(image_size, _NATIVE_SIDE) else (image_size, image_size)


def _read_all(
    source: Source, indices: Sequence[int], height: int, width: int, pixel_cap: int, workers: int | None
) -> Generator[Read, None, None]:
    """One result per index, in order."""
    paths = [path for index in indices if (path := source.path(index)) is not None]
    workers = default_workers() if workers is None else workers
    if len(paths) == len(indices) and len(paths) >= _FEW and workers > 0:
        yield from read_files(paths, height, width, pixel_cap, workers)
        return
    for index in indices:
        path = source.path(index)
        yield read_file(path, height, width, pixel_cap) if path is not None else _read_loaded(source, index, height, width, pixel_cap)


def _read_loaded(source: Source, index: int, height: int, width: int, pixel_cap: int) -> Read:
    try:
        data = source.load(index)
        size_bytes, modified_ns = source.stat(index) or (len(data) if isinstance(data, bytes) else data.nbytes, 0)
        decoded = decode(data, height, width, pixel_cap)
    except (RefusedError, KinfolkError) as error:
        return Read(*(source.stat(index) or (0, 0)), "", 0, 0, None, str(error))
    except Exception as error:  # a Dataset may raise anything
        return Read(*(source.stat(index) or (0, 0)), "", 0, 0, None, f"{type(error).__name__}: {error}")
    return Read(size_bytes, modified_ns, digest(data), decoded.width, decoded.height, decoded.pixels, None)
