"""Contrastive representation learning that knows its false negatives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kinfolk.detectors import FNC, GloFND, Oracle, StartAt
from kinfolk.objectives import NTXent, SogCLR
from kinfolk.pairs import Pairs
from kinfolk.stats import Stats

if TYPE_CHECKING:
    from kinfolk.training.train import train

__version__ = "0.1.0"

__all__ = ["FNC", "GloFND", "NTXent", "Oracle", "Pairs", "SogCLR", "StartAt", "Stats", "__version__", "train"]


def __getattr__(name: str) -> Any:
    """Training pulls in Lightning, so it is loaded when it is asked for."""
    if name == "train":
        from kinfolk.training.train import train

        return train
    raise AttributeError(f"module 'kinfolk' has no attribute {name!r}")
