"""The functions of the Python interface: `kf.train`, and `kf.load`, `kf.embed` and `kf.evaluate` for a run afterwards."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kinfolk.embedding import require_labels, take_parts
from kinfolk.errors import UsageError, did_you_mean
from kinfolk.evaluation import protocols
from kinfolk.report import write_report
from kinfolk.training.config import parse_settings
from kinfolk.training.load_run import OpenedRun, open_run, restore
from kinfolk.training.run_folder import Run, open_data, read_data
from kinfolk.training.train import train as train_run

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kinfolk.data.images import ImageData
    from kinfolk.detectors.base import Detector
    from kinfolk.training.train import Data

PROTOCOLS = ("knn", "linear", "clusters", "kin")


def train(
    data: Data | None = None,
    out: str | os.PathLike[str] | None = None,
    *,
    method: str | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    guide: str | os.PathLike[str] | None = None,
    recipe: str | os.PathLike[str] | None = None,
    model: str | nn.Module | None = None,
    detector: Detector | None = None,
    action: str | None = None,
    lr: float | None = None,
    image_size: int | None = None,
    settings: Sequence[str] | Mapping[str, Any] = (),
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    report: bool = True,
) -> Run:
    """Trains an encoder on images and writes a run folder with the encoder, metrics, checkpoints and a report.

    Args:
        data: a folder, array file, table, archive, "digits", an array of images (N, H, W, 3), or a map-style `Dataset`.
        out: the run folder; must be new or empty unless `resume` or `overwrite`.
        method: `framework[+detector[:variant][:action]]`, e.g. "sogclr+glofnd"; by default "simclr".
        epochs, batch_size, seed: settings of the training; `batch_size` is the total over all devices.
        guide: features for a method with `+guide`: a .npy or .safetensors file, a run folder, "timm/NAME", "torchvision/NAME" or "patches",
            which is made from these images alone and is the default; the same as the setting `detector.features`.
        recipe: a ready configuration to start from, by name or path. With another `method` than that of the recipe, settings of the
            replaced parts are dropped.
        model: the name of an encoder, or a module that maps images (B, 3, H, W) to (B, F) or (B, F, H, W). A module is trained in place.
        detector: a detector object, used with a `method` that has none. It is trained in place.
        action: what happens to the false negatives of that detector: "eliminate" (the default), "attract" or "reweight".
        lr: learning rate before scaling.
        image_size: side of the views in pixels.
        settings: any other key of the configuration: `{"optimizer.momentum": 0.8}` or `["optimizer.momentum=0.8"]`.
        resume: continues the run in `out` exactly from its last checkpoint, or starts it if there is none. Settings that are not given
            are those of the run; given ones must agree with it. A larger `epochs` extends the run.
        overwrite: replaces the run in `out`. Files that no run wrote are kept.
        progress: shows a progress bar, or lines if there is no terminal.
        report: writes `report.html`. Data passed as an array or a `Dataset` cannot be read again by a later `kinfolk report`.

    Returns:
        The run. Its `rank` is above 0 in processes other than rank zero, and `unchanged` is True if it was finished already.
    """
    if guide is not None:
        if not isinstance(guide, str | os.PathLike):
            raise UsageError(
                f"`guide` (={type(guide).__name__}) must be a path or a name; features in memory are passed as "
                "`detector=kf.Guide(features, alpha=0.01)`"
            )
        settings = {"detector.features": os.fspath(guide), **parse_settings(settings)}
    run = train_run(
        data,
        out,
        method=method,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        recipe=recipe,
        model=model,
        detector=detector,
        action=action,
        lr=lr,
        image_size=image_size,
        settings=settings,
        resume=resume,
        overwrite=overwrite,
        progress=progress,
    )
    if report and run.rank == 0 and not run.unchanged:
        write_report(run.path, run.images, run.features, progress=progress)
    return replace(run, images=None, features=None)


class Encoder(nn.Module):
    """The encoder of a run with its preprocessing, as `kf.load` returns it.

    The call takes preprocessed images (B, 3, H, W) and returns features (B, F), like any encoder. `preprocess` makes such images of
    pixels.
    """

    def __init__(self, run: OpenedRun) -> None:
        super().__init__()
        self.run, self.encoder, self.views = run, run.encoder(), run.views()
        self.output_size = int(self.encoder.output_size)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        """(B, F) features of preprocessed images (B, 3, H, W)."""
        features: Tensor = self.encoder(images)
        return features

    def preprocess(self, pixels: Tensor | NDArray[np.uint8]) -> Tensor:
        """(B, 3, H, W) resized and normalised images of uint8 pixels (B, H, W, 3) or (H, W, 3)."""
        given = torch.as_tensor(pixels)
        if given.dtype != torch.uint8 or given.ndim not in (3, 4) or given.shape[-1] != 3:
            raise UsageError(f"`pixels` (={given.dtype}, shape {tuple(given.shape)}) must be uint8 of the shape (B, H, W, 3)")
        given = given if given.ndim == 4 else given.unsqueeze(0)
        aspect = torch.full((len(given),), given.shape[2] / given.shape[1])
        square = min(given.shape[1], given.shape[2])
        top, left = (given.shape[1] - square) // 2, (given.shape[2] - square) // 2
        return self.views.evaluate(given[:, top : top + square, left : left + square], torch.ones_like(aspect))


def load(run: str | os.PathLike[str] | Run, model: nn.Module | None = None) -> Encoder:
    """The trained encoder of a run with its preprocessing, in evaluation mode.

    Args:
        run: the run, or its folder.
        model: the module to fill, needed only for a run that was trained with a module as `model`.
    """
    return Encoder(open_run(_folder(run), model)).eval()


def embed(
    run: str | os.PathLike[str] | Run, data: Data | None = None, *, model: nn.Module | None = None, progress: bool = False
) -> NDArray[np.float32]:
    """(N, F) features of every sample of `data`, or of the data of the run, by its encoder."""
    opened = open_run(_folder(run), model)
    opened.encoder()  # a run without a model is refused before any image is read
    return opened.features(_images(opened, data, progress), progress=progress)


def evaluate(
    run: str | os.PathLike[str] | Run,
    data: Data | None = None,
    protocol: str = "knn",
    *,
    k: int = 20,
    temperature: float = 0.1,
    seed: int = 0,
    model: nn.Module | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """The result of one protocol of `kinfolk eval` on labelled data.

    Args:
        run: the run, or its folder.
        data: labelled data; None: the data of the run.
        protocol: "knn", "linear", "clusters", or "kin" for the false negatives that the method flags. `kinfolk eval` has more.
        k, temperature: of the nearest-neighbour classifier.
        seed: of classifiers and subsets.
        model: as in `load`.
    """
    if protocol not in PROTOCOLS:
        raise UsageError(f"unknown protocol {protocol!r}{did_you_mean(protocol, PROTOCOLS)} (there are: {', '.join(PROTOCOLS)})")
    opened = open_run(_folder(run), model)
    images = _images(opened, data, progress)
    if protocol == "kin":
        return protocols.run_kin(restore(opened.path, opened.config, images), images, opened.views(), seed, progress=progress)
    require_labels(images.samples.labels)
    parts = take_parts(images, opened.features(images, progress=progress))
    if protocol == "knn":
        return protocols.run_knn(parts, k, temperature)
    return protocols.run_linear(parts, seed, progress=progress) if protocol == "linear" else protocols.run_clusters(parts, None)


def _folder(run: str | os.PathLike[str] | Run) -> Path:
    return run.path if isinstance(run, Run) else Path(run)


def _images(opened: OpenedRun, data: Data | None, progress: bool) -> ImageData:
    """The data of the run, or other data in any form that `train` takes, at the resolution of the run."""
    if data is None or isinstance(data, str | Path):
        return opened.data(None if data is None else str(data), progress=progress)
    config = opened.config.with_settings({"data.hierarchy": None, "data.depth": None, "data.streaming": False})
    return read_data(open_data(data, config), config, Run(opened.path), several=False, progress=progress)
