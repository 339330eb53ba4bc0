"""The features of a run: its own encoder on its own training samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kinfolk.data.images import ImageData


def embedded(run: Path, labels: Any | None, progress: bool) -> tuple[NDArray[np.float32], Any | None, Sequence[str]]:
    """Features, labels (the run's own unless others are given) and names of the training samples."""
    features, own, names, _ = run_material(run, progress)
    return features, own if labels is None else labels, names


def run_material(run: Path, progress: bool) -> tuple[NDArray[np.float32], list[Any] | None, list[str], ImageData]:
    """The same with the pictures."""
    from kinfolk.training.opened import open_run

    opened = open_run(run)
    opened.encoder()  # a run without a model is refused before any picture is read
    images = opened.data(progress=progress)
    ids = np.arange(images.num_train)
    samples = images.samples
    return opened.features(images, ids, progress=progress), class_names(images, len(ids)), list(samples.keys[: len(ids)]), images


def class_names(images: ImageData, number: int) -> list[Any] | None:
    """Labels of the first samples, by name where they have names; None without labels."""
    labels, classes = images.samples.labels, images.samples.classes
    if labels is None or not (labels[:number] >= 0).any():
        return None
    return [None if label < 0 else classes[label] if classes else int(label) for label in labels[:number]]
