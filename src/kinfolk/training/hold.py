"""One training at a time in a run folder: two that write into it would mix their checkpoints and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from kinfolk.errors import UsageError

LOCK = ".lock"


@contextmanager
def held(folder: Path, rank: int = 0) -> Iterator[None]:
    """Holds `folder` for this training, by a lock of the system's that ends with the process, however it ends; for rank zero alone.

    A folder that this made, and in which nothing came to be, is removed again. One that cannot be written to fails where it is written to.

    Raises:
        UsageError: another training holds it.

    Example:
        >>> import tempfile
        >>> with held(Path(tempfile.mkdtemp())):
        ...     pass
    """
    if rank > 0:
        yield
        return
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(f"another training is writing into `out` (={folder}); wait for its end, or give another folder") from None
    except OSError:
        pass
    try:
        yield
    finally:
        if lock.is_locked:
            (folder / LOCK).unlink(missing_ok=True)
            lock.release()
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
