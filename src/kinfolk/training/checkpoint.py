"""Checkpoints: written whole or not at all, with a digest of all their bytes, and read without running code of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from kinfolk.errors import KinfolkError
from kinfolk.files import DamagedFileError, check_sealed_zip, write_sealed_zip
from kinfolk.models.weights import why_unreadable

FORMAT = 2
"""1 had neither digest nor the run's settings."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Loads a checkpoint without running any code from it; a damaged file is refused in one sentence."""
    try:
        check_sealed_zip(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise KinfolkError(f"there is no checkpoint at {path}") from None
    except Exception as error:  # pickle raises any
        raise DamagedFileError(
            f"the checkpoint {path} is damaged or was not written by this version of kinfolk: {why_unreadable(error)}"
        ) from error
    if not isinstance(checkpoint, dict) or not {"state_dict", "loops", "kinfolk"} <= checkpoint.keys():
        raise KinfolkError(f"the checkpoint {path} was not written by kinfolk's training; give a run folder of `kinfolk train`")
    return checkpoint


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's way to the disk, made atomic; loads with `weights_only=True` whatever it is asked."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_sealed_zip(Path(path), lambda file: torch.save(checkpoint, file))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        return read_checkpoint(Path(path))
