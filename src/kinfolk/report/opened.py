"""A run opened again: its encoder, its views and its data, from what its folder says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from kinfolk.errors import UsageError

if TYPE_CHECKING:
    from kinfolk.data.images import ImageData
    from kinfolk.data.views import Views
    from kinfolk.training.config import TrainConfig


@dataclass(frozen=True)
class OpenedRun:
    """A finished or interrupted run. Nothing is read before it is asked for."""

    path: Path
    config: TrainConfig

    def encoder(self) -> nn.Module:
        """The encoder, in evaluation mode."""
        from kinfolk.models.weights import load_encoder

        return load_encoder(self.path)[0]

    def views(self) -> Views:
        """The views as the run made them."""
        from kinfolk.training.assemble import build_views

        return build_views(self.config)

    def data(
        self, source: str | None = None, *, labels_from_folders: bool = False, workers: int | None = None, progress: bool = False
    ) -> ImageData:
        """The run's own pictures, or those of another source, at the run's resolution."""
        from kinfolk.data.prepare import prepare
        from kinfolk.data.sources import open_source

        own = self.config.data
        spec = source or own.source
        if spec is None:
            raise UsageError(f"{self.path} was trained on data handed over in Python; say with --data where the pictures are")
        labels = labels_from_folders or (source is None and own.labels_from_folders)
        opened = open_source(spec, labels_from_folders=labels, **({} if source is not None else self._columns()))
        return prepare(
            opened,
            image_size=own.image_size or math.ceil((self.config.views.size or 32) * 8 / 7),
            workers=own.workers if workers is None else workers,
            pixel_cap=own.pixel_cap,
            cache_dir=None if source is not None or opened.native_size is not None else own.cache_dir or self.path / "cache",
            progress=progress,
        )

    def _columns(self) -> dict[str, Any]:
        """Which columns of a table the run has read."""
        return {name: value for name, value in self.config.data if name.endswith("_column")}

    def features(self, data: ImageData, ids: NDArray[np.int64] | None = None, *, progress: bool = False) -> NDArray[np.float32]:
        """(N, F) of all samples, or of `ids`, on the first accelerator there is."""
        from kinfolk.evaluation.embed import embed

        chosen = None if ids is None else torch.from_numpy(ids)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return np.asarray(embed(self.encoder(), data, self.views(), chosen, device=device, progress=progress).numpy(), dtype=np.float32)


def open_run(path: Path | str) -> OpenedRun:
    """Opens the folder that a training wrote."""
    from kinfolk.training.config import TrainConfig

    path = Path(path)
    if not (path / "config.yaml").is_file():
        raise UsageError(f"{path} is not a run folder: it holds no config.yaml; give the folder that `kinfolk train --out` wrote")
    return OpenedRun(path, TrainConfig.load(path / "config.yaml"))
