"""`kf.train`, and `kf.load`, `kf.embed` and `kf.evaluate` for a run afterwards."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from kinfolk.data.decode import decode, squash
from kinfolk.data.prepare import cached_size
from kinfolk.data.text import cut
from kinfolk.embedding import require_labels, take_parts
from kinfolk.errors import UsageError, require_choice
from kinfolk.evaluation import protocols
from kinfolk.report import write_report
from kinfolk.training.config import parse_settings
from kinfolk.training.load_run import OpenedRun, measure_kin, open_run
from kinfolk.training.run_folder import Run
from kinfolk.training.train import train as train_run

if TYPE_CHECKING:
    import numpy.typing as npt
    from numpy.typing import NDArray

    from kinfolk.detectors.base import Detector
    from kinfolk.training.train import Data

    Pixels = Tensor | NDArray[np.uint8] | Image.Image

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
    labels: npt.ArrayLike | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    report: bool = True,
) -> Run:
    """Trains an encoder and writes a run folder with the encoder, metrics, checkpoints and a
    report.

    Args:
        data: a folder, array file, table, archive, "digits", an array of images (N, H, W, 3), two
            arrays (images, labels), or a map-style `Dataset`.
        out: the run folder; must be new or empty unless `resume` or `overwrite`.
        method: `framework[+detector[:variant][:action]]`, such as "sogclr+glofnd"; by default
            "simclr".
        batch_size: samples of a batch over all devices.
        guide: features for a method with `+guide`: a .npy or .safetensors file, a run folder,
            "timm/NAME", "torchvision/NAME" or "patches" (the default), which is made from these
            images alone.
        recipe: a ready configuration to start from, by name or path. With another `method` than
            that of the recipe, settings of the replaced parts are dropped.
        model: the name of an encoder, or a module that maps images (B, 3, H, W) to (B, F) or (B, F,
            H, W). A module is trained in place.
        detector: a detector object, used with a `method` that has none. It is trained in place.
        action: what happens to the false negatives of that detector: "eliminate" (the default),
            "attract" or "reweight".
        lr: learning rate before scaling.
        image_size: side of the views in pixels.
        settings: any other key of the configuration: `{"optimizer.momentum": 0.8}` or
            `["optimizer.momentum=0.8"]`.
        labels: classes (N,) of an array of images, to measure with.
        resume: continues the run in `out` exactly from its last checkpoint, or starts it if there
            is none. Settings that are given must agree with those of the run; a larger `epochs`
            extends it.
        overwrite: replaces the run in `out`. Files that no run wrote are kept.
        progress: shows a progress bar, or lines if there is no terminal.
        report: writes `report.html`.

    Returns:
        The run. `rank` is above 0 in other processes than rank zero, and `unchanged` is True if it
        was finished already.
    """
    if guide is not None:
        if not isinstance(guide, str | os.PathLike):
            raise UsageError(
                f"`guide` (={type(guide).__name__}) must be a path or a name; features in memory"
                " are passed as `detector=kf.Guide(features, alpha=0.01)`"
            )
        settings = {"detector.features": os.fspath(guide), **parse_settings(settings)}
    if labels is not None:
        if data is None or isinstance(data, str | os.PathLike | tuple):
            raise UsageError("`labels` belong to an array of images; give `data` as one")
        data = (data, labels)  # type: ignore[assignment]
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
    """The encoder of a run with its preprocessing, as `kf.load` returns it. The call takes
    preprocessed images (B, 3, H, W), or the tokens of texts, and returns features (B, F)."""

    def __init__(self, run: OpenedRun) -> None:
        super().__init__()
        self.run, self.encoder, self.views = run, run.encoder(), run.views()
        self.image_size = run.config.data.image_size or self.views.size
        source, arrays = run.config.data.source, (".npz", ".npy", ".tar.gz", ".tgz")
        # arrays keep their size if it is small
        self.keeps_size = source in (None, "digits") or source.lower().endswith(arrays)
        self.output_size = int(self.encoder.output_size)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.encoder(images)
        return features

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """(B, T), for a run of text pairs."""
        tokenizer = self.run.tokenizer()
        return cut(tokenizer.encode(texts), tokenizer.end_id)

    def preprocess(self, pixels: Pixels | Sequence[Pixels]) -> Tensor:
        """(B, 3, S, S) images, resized and normalised as `kf.embed` prepares them.

        Args:
            pixels: uint8 (H, W, 3) or (B, H, W, 3) as an array or a tensor, a Pillow image, which
                is turned by its EXIF tag, or a sequence of these.
        """
        if "image" not in self.run.modalities:
            raise UsageError(f"{self.run.path} was trained on texts; use `tokenize`")
        many = pixels if isinstance(pixels, Sequence) else [pixels]
        if not many:
            raise UsageError("`pixels` is empty; give at least one image")
        return torch.cat([self._prepare(each) for each in many])

    def _prepare(self, pixels: Pixels) -> Tensor:
        device = pixels.device if isinstance(pixels, Tensor) else torch.device("cpu")
        if isinstance(pixels, Image.Image):
            squashed = [squash(pixels, self.image_size, self.image_size)]
        else:
            given = pixels.cpu().numpy() if isinstance(pixels, Tensor) else np.asarray(pixels)
            if given.dtype != np.uint8 or given.ndim not in (3, 4) or given.shape[-1] != 3:
                raise UsageError(
                    f"`pixels` (={pixels.dtype}, shape {given.shape}) must be uint8 of the shape"
                    " (B, H, W, 3), or Pillow images"
                )
            given = given if given.ndim == 4 else given[None]
            native = (int(given.shape[1]), int(given.shape[2])) if self.keeps_size else None
            size = cached_size(native, self.image_size)
            squashed = [decode(each, *size, pixel_cap=sys.maxsize) for each in given]
        batch = torch.from_numpy(np.stack([each.pixels for each in squashed])).to(device)
        aspect = torch.tensor([each.width / each.height for each in squashed], device=device)
        return self.views.evaluate(batch, aspect)


def load(run: str | os.PathLike[str] | Run, model: nn.Module | None = None) -> Encoder:
    """The trained encoder of a run with its preprocessing, in evaluation mode. `model`: the module
    to fill, needed for a run that was trained with a module as `model`."""
    return Encoder(open_run(run, model)).eval()


def embed(
    run: str | os.PathLike[str] | Run,
    data: Data | None = None,
    *,
    model: nn.Module | None = None,
    progress: bool = False,
) -> NDArray[np.float32]:
    """(N, F) features of every sample of `data`, or of the data of the run, by its encoder."""
    opened = open_run(run, model)
    opened.encoder()  # a run without a model is refused before any image is read
    return opened.features(opened.data(data, progress=progress), progress=progress)


def evaluate(
    run: str | os.PathLike[str] | Run,
    data: Data | None = None,
    protocol: str = "knn",
    *,
    k: int = 20,
    temperature: float = 0.1,
    seed: int = 0,
    labels_from_folders: bool | None = None,
    model: nn.Module | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """The result of one protocol of `kinfolk eval` on labelled data.

    Args:
        data: labelled data; None: the data of the run.
        protocol: "knn", "linear", "clusters", or "kin" for the false negatives that the method
            flags.
        k, temperature: of the nearest-neighbour classifier.
        labels_from_folders: whether the sub-folders of a folder are the classes; None: if the
            folder has no other labels.
        model: as in `load`.
    """
    require_choice("protocol", protocol, PROTOCOLS)
    opened = open_run(run, model)
    images = opened.data(data, labels_from_folders=labels_from_folders, progress=progress)
    if protocol == "kin":
        return measure_kin(opened, images, seed, progress=progress)
    require_labels(images.samples.labels)
    parts = take_parts(images, opened.features(images, progress=progress))
    if protocol == "knn":
        return protocols.run_knn(parts, k, temperature)
    if protocol == "linear":
        return protocols.run_linear(parts, seed)
    return protocols.run_clusters(parts, None)
