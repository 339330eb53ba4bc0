"""Atomic and durable writing of files, and digests that detect damaged ones. Checkpoints have a
digest of all their bytes in the comment of their zip archive, safetensors files in their
metadata."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from kinfolk.errors import KinfolkError, short

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
UNFINISHED = ".unfinished"
"""In the name of a file that is being written; a killed process may leave it behind."""
DIGEST = "kinfolk.digest"

_SEAL = b"kinfolk blake2b "
_HEX = 32
_BLANK = "0" * _HEX
_PIECE = 1 << 24
_REASONS = {
    errno.ENOSPC: "the disk is full; make room",
    errno.EDQUOT: "the disk quota is used up; make room",
    errno.EFBIG: "the file would be larger than this system allows",
    errno.EROFS: "the file system is read-only; give another folder",
    errno.EACCES: "this user may not use it; change its rights, or give another folder",
    errno.EPERM: "this user may not use it; change its rights, or give another folder",
    errno.ENOENT: "its folder was removed or renamed",
    errno.ENOTDIR: "its folder is not a folder any more",
    errno.EEXIST: "its folder is not a folder",
    errno.EISDIR: "there is a folder of that name; remove it",
    errno.EIO: "the disk reports an error",
}
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
_GONE = (errno.ENOENT, errno.ENOTDIR)


class DamagedFileError(KinfolkError):
    """The bytes of a file are not the ones that were written."""


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Renames the file to `path` once its bytes are on the disk. The folder of `path` is created if
    it is missing, but not the one above it: a run folder that was removed is an error."""

    def write_to(unfinished: Path) -> None:
        with open(unfinished, "wb") as file:
            write(file)

    write_by_name(path, write_to)


def write_by_name(path: Path, write: Callable[[Path], T]) -> T:
    """As `write_atomically`, for writers that take a path; returns their result."""
    # The name is random because two processes may write the same cache.
    unfinished = path.with_name(f"{path.stem}.{secrets.token_hex(3)}{UNFINISHED}{path.suffix}")
    with explain_write_errors(path):
        _make_folder(path.parent)
        try:
            result = write(unfinished)
            # safetensors makes its files readable by the owner only
            if not unfinished.stat().st_mode & 0o077:
                os.umask(mask := os.umask(0o077))  # the only way to read it
                unfinished.chmod(0o666 & ~mask)
            move_into_place(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
    return result


def move_into_place(unfinished: Path, path: Path) -> None:
    with open(unfinished, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    sync_folder(path.parent)


def is_unfinished(name: str) -> bool:
    return UNFINISHED in name or name.endswith((".partial", ".part"))


def remove_unfinished(folder: Path) -> None:
    for entry in folder.glob(f"*{UNFINISHED}*"):
        with contextlib.suppress(OSError):
            entry.unlink()


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write(text.encode("utf-8", "backslashreplace")))


def write_sealed_text(path: Path, text: str) -> None:
    """The first line is the digest of the rest."""
    write_text(path, f"{_text_digest(text)}\n{text}")


def read_sealed_text(path: Path) -> str:
    digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    if digest != _text_digest(text):
        raise DamagedFileError(f"{short(str(path))} does not match its digest")
    return text


def _text_digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()


def append_line(path: Path, line: str) -> None:
    with explain_write_errors(path):
        is_new = not path.exists()
        with open(path, "ab") as file:
            file.write(line.encode("utf-8", "backslashreplace") + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync_folder(path.parent)


@contextlib.contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turns an error of the file system into a sentence, also inside a RuntimeError of torch."""
    try:
        yield
    except KinfolkError:
        raise
    except (OSError, RuntimeError) as error:
        raise KinfolkError(
            f"{short(str(path))} cannot be written: {_reason(error)}; what was there before is kept"
        ) from error


@contextlib.contextmanager
def explain_read_errors(what: str, kind: str = "array") -> Iterator[None]:
    """Turns an error of a reader, which may be of any type on a broken file, into a sentence."""
    try:
        yield
    except KinfolkError:
        raise
    except Exception as error:
        if re.search("pickle|object|weights_only", str(error), re.IGNORECASE) and kind == "array":
            raise KinfolkError(
                f"{what} holds Python objects, not numbers, and is not loaded, because it could run"
                " code; save plain arrays"
            ) from error
        why = first_line(error.__cause__ or error)
        raise KinfolkError(f"{what} is not a readable {kind}: {why}") from error


def file_digest(path: Path, size: int = 16) -> str:
    digest = hashlib.blake2b(digest_size=size)
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


@contextlib.contextmanager
def explain_file_errors(folder: Path) -> Iterator[None]:
    """Turns an error of the file system into a sentence, wherever it is raised. Threads of loggers,
    which write into `folder` too, run into the same error; there it is suppressed."""
    previous, place = threading.excepthook, os.path.abspath(folder)

    def is_about_folder(error: object) -> bool:
        if not isinstance(error, OSError):
            return False
        has_name = isinstance(error.filename, str | bytes)
        name = os.path.abspath(os.fsdecode(error.filename)) if has_name else ""
        return error.errno in _UNWRITABLE or (error.errno in _GONE and name.startswith(place))

    def hook(args: threading.ExceptHookArgs) -> None:
        if not is_about_folder(args.exc_value):
            previous(args)

    threading.excepthook = hook
    try:
        yield
    except OSError as error:
        if is_about_folder(error) and not os.path.isdir(place):
            raise KinfolkError(
                f"{short(str(folder))} was removed or renamed during the run; resume it in its new"
                " place (--resume), or start it again"
            ) from error
        if error.errno in _REASONS and error.filename is not None:
            raise KinfolkError(why_failed(error)) from error
        if error.errno in _UNWRITABLE:
            raise KinfolkError(
                f"a file in {short(str(folder))} cannot be written: {_REASONS[error.errno]}"
            ) from error
        raise
    finally:
        threading.excepthook = previous


def sync_folder(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    with contextlib.suppress(OSError):
        os.fsync(handle)
    os.close(handle)


def first_line(error: BaseException) -> str:
    """The message as one printable line without a full stop."""
    if isinstance(error, OSError) and error.strerror:
        return short(str(error.strerror))
    return short((str(error).strip() or type(error).__name__).splitlines()[0]).rstrip(".")


def why_failed(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in _REASONS and error.filename is not None:
        return f"{short(os.fsdecode(error.filename))} cannot be used: {_REASONS[error.errno]}"
    text = first_line(error)
    return text if text == type(error).__name__ else f"{type(error).__name__}: {text}"


def write_sealed_zip(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """The comment of the archive is the digest of its bytes. `write` must not seek."""

    def write_with_seal(file: BinaryIO) -> None:
        hashing = _Hashing(file)
        write(hashing)  # type: ignore[arg-type]
        if hashing.failed is not None:
            raise hashing.failed
        seal = _SEAL + hashing.state.hexdigest().encode()
        file.seek(-2, os.SEEK_END)  # a zip archive ends with the length of its comment, zero so far
        file.write(len(seal).to_bytes(2, "little") + seal)

    write_atomically(path, write_with_seal)


def check_sealed_zip(path: Path) -> None:
    """Raises `DamagedFileError` unless `path` is what `write_sealed_zip` wrote."""
    left, length = path.stat().st_size - len(_SEAL) - _HEX - 2, len(_SEAL) + _HEX
    state = hashlib.blake2b(digest_size=_HEX // 2)
    with open(path, "rb") as file:
        while left > 0 and (piece := file.read(min(left, _PIECE))):
            state.update(piece)
            left -= len(piece)
        end = file.read()
    state.update(b"\0\0")
    if end[2:-_HEX] != _SEAL:
        raise DamagedFileError(
            "it has no digest at its end: it was cut short, or it is not a checkpoint of this"
            " version"
        )
    if end != length.to_bytes(2, "little") + _SEAL + state.hexdigest().encode():
        raise DamagedFileError("its bytes do not match its digest")


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """The metadata has the digest of the whole file."""
    from safetensors.torch import save

    data = memoryview(save(dict(tensors)))
    length = int.from_bytes(data[:8], "little")
    # safetensors itself writes the metadata in no fixed order
    described = {"__metadata__": {DIGEST: _BLANK, **(metadata or {})}}
    described |= json.loads(bytes(data[8 : 8 + length]))
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    state = hashlib.blake2b(header, digest_size=_HEX // 2)
    state.update(data[8 + length :])
    sealed = header.replace(_entry(_BLANK), _entry(state.hexdigest()), 1)

    def write(file: BinaryIO) -> None:
        file.write(sealed)
        file.write(data[8 + length :])

    write_atomically(path, write)


def _entry(digest: str) -> bytes:
    return f'"{DIGEST}":"{digest}"'.encode()


def check_safetensors(path: Path, metadata: Mapping[str, str], required: bool = False) -> None:
    """Raises `DamagedFileError` if `path` is not what `write_safetensors` wrote. Files of other
    programs have no digest and are not checked unless it is `required`."""
    if (digest := metadata.get(DIGEST)) is None:
        if required or any(key.startswith("kinfolk") for key in metadata):
            raise DamagedFileError(
                "its metadata has no digest: it was changed, or written by an older version"
            )
        return
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        file.seek(0)
        header = file.read(8 + length)
        blank = header.replace(_entry(digest), _entry(_BLANK))
        state = hashlib.blake2b(blank, digest_size=_HEX // 2)
        while piece := file.read(_PIECE):
            state.update(piece)
    if state.hexdigest() != digest or header.count(_entry(digest)) != 1:
        raise DamagedFileError("its bytes do not match its digest")


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir()
        sync_folder(folder.parent)


class _Hashing:
    """Hashes what is written to a file. It keeps an OSError, which torch replaces by another."""

    failed: OSError | None = None

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.state = file, hashlib.blake2b(digest_size=_HEX // 2)

    def write(self, data: Any) -> int:
        try:
            written = self.file.write(data)
        except OSError as error:
            self.failed = error
            raise
        self.state.update(data)
        return written

    def flush(self) -> None:
        self.file.flush()


def _reason(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return _REASONS.get(getattr(cause, "errno", None) or 0, first_line(cause or error))


def read_json_objects(folder: Path) -> dict[str, dict[str, Any]]:
    """What the `.json` files of a folder contain, by their names without the ending."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            value = first_line(error)
        if not isinstance(value, dict):
            raise KinfolkError(f"{path} is not a result; evaluate again, or remove it.")
        found[path.stem] = value
    return found


def to_json(value: Any) -> Any:
    """Arrays become lists; NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
