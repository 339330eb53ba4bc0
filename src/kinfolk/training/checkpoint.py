"""Checkpoints that are either whole or not there: written beside the old one, flushed to the disk, then renamed over it."""

from __future__ import annotations

import contextlib
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from kinfolk.errors import KinfolkError

UNFINISHED = ".unfinished"
"""Suffix of a file that is being written; a killed process may leave one behind, and nothing ever reads it."""


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """`write` fills a file of another name; it takes the place of `path` only when its bytes are on the disk."""
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except (OSError, RuntimeError) as error:  # torch wraps a full disk in a RuntimeError
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise KinfolkError(f"{path} cannot be written ({_first_line(error)}); what was there before is kept") from error
    _sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """As `write_atomically`, for text."""
    write_atomically(path, lambda file: file.write(text.encode()))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Loads a checkpoint without running any code from it; a damaged file is refused in one sentence."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch itself does not look at the checksums it writes
            if (broken := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"bad checksum of {broken}")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise KinfolkError(f"there is no checkpoint at {path}") from None
    except (zipfile.BadZipFile, RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise KinfolkError(
            f"the checkpoint {path} is damaged or was not written by kinfolk ({_first_line(error)}); "
            "restore it from a copy, or start again with overwrite"
        ) from error
    if not isinstance(checkpoint, dict) or not {"state_dict", "loops", "kinfolk"} <= checkpoint.keys():
        raise KinfolkError(f"the checkpoint {path} was not written by kinfolk's training; give a run folder of `kinfolk train`")
    return checkpoint


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's way to the disk, made atomic; loads with `weights_only=True` whatever it is asked."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_atomically(Path(path), lambda file: torch.save(checkpoint, file))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        return read_checkpoint(Path(path))


def _sync_folder(folder: Path) -> None:
    """Makes a rename durable; not every system lets a folder be opened for that."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160].rstrip(".")
