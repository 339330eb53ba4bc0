"""Opening a run after the training: its encoder, views and data, or the framework with its state.

Dimension key: N samples, F features, Q queries, C candidates, P positives.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kinfolk.data.images import ImageData
from kinfolk.data.sample_table import Samples, key_difference, samples_digest
from kinfolk.data.text import PairTexts, TextData, Tokenizer, read_tokenizer
from kinfolk.data.views import Views
from kinfolk.detectors.base import Detector
from kinfolk.embedding import Preparation, best_device, embed
from kinfolk.errors import KinfolkError, UsageError, short
from kinfolk.evaluation.detection import flagged_mask
from kinfolk.evaluation.protocols import run_kin
from kinfolk.evaluation.retrieval import Towers
from kinfolk.frameworks import FRAMEWORKS, Framework
from kinfolk.frameworks.clip import Bimodal
from kinfolk.frameworks.registry import parse
from kinfolk.models.encoders import FeatureMap, adapt
from kinfolk.models.text import SENTENCE
from kinfolk.models.weights import (
    DESCRIPTION,
    TOWERS,
    WEIGHTS,
    Pair,
    load_encoder,
    load_parts,
    meta_of,
)
from kinfolk.pairs import OUT, Block
from kinfolk.seeding import preserve_random_state
from kinfolk.training.build import build_framework, build_views, networks, text_networks
from kinfolk.training.checkpoint import read_checkpoint, restore_error
from kinfolk.training.config import DataConfig, TrainConfig
from kinfolk.training.defaults import learns_from_text
from kinfolk.training.run_folder import Run, open_data, read_data
from kinfolk.training.settings import digests_of_stored, require_identity

FOREIGN = "weights.json"
"""Marks a folder as weights from elsewhere; see `foreign_weights`."""
UNUSED = (".detector.store.tail",)
"""State of learned thresholds in checkpoints of earlier versions, needed only to train on."""


@dataclass(frozen=True)
class OpenedRun:
    """A finished or interrupted run, whose files are read when they are needed."""

    path: Path
    config: TrainConfig
    model: nn.Module | None = None
    """The module to fill, for a run that was trained with a module from Python."""

    @property
    def modalities(self) -> tuple[str, ...]:
        """ "image", "text" or both. Imported weights encode images."""
        if (self.path / FOREIGN).is_file():
            return ("image",)
        return FRAMEWORKS[parse(self.config.method).framework].modalities

    def encoder(self) -> nn.Module:
        """In evaluation mode. A file that another run has exported is refused."""
        if self.config.python.model is not None and self.model is None:
            raise UsageError(
                f"{self.path} was trained with a {self.config.python.model} passed from Python;"
                " open it there, with `kf.load(run, model=module)`"
            )
        module: nn.Module | None = None
        if "image" not in self.modalities:
            module = text_networks(_with_saved_model(self.config, self.path), self.tokenizer())[0]
        elif self.model is not None:
            module = adapt(self.model, input_size=self.config.views.size or 32)
        encoder, meta = load_encoder(self.path, module)
        self._require_exported(meta, WEIGHTS)
        return encoder

    def tokenizer(self) -> Tokenizer:
        assert self.config.text.context is not None, "set before a training"
        return read_tokenizer(Run(self.path).tokenizer, self.config.text.context)

    def towers(self) -> Towers:
        if "text" not in self.modalities:
            raise UsageError(
                f"{self.path} was trained with {self.config.method}, which has no text tower; this"
                " needs a method such as clip"
            )
        file = self.path / TOWERS
        if not file.is_file():
            raise UsageError(
                f"there is no {TOWERS} in {self.path}; the training has not finished an epoch yet"
            )
        self._require_exported(meta_of(file), TOWERS)
        tokenizer = self.tokenizer()
        bare = _with_saved_model(self.config, self.path).with_settings(
            {"model.pretrained": False, "text.pretrained": False}
        )
        text = text_networks(bare, tokenizer)
        pair = Pair(*(text if "image" not in self.modalities else networks(bare, (3,))), *text)
        load_parts(pair, file)
        return Towers(pair.eval(), self.views(), tokenizer, best_device())

    def _require_exported(self, meta: Mapping[str, Any], name: str) -> None:
        run = Run(self.path)
        digests = {}
        if "settings" in meta:
            digests["settings"] = digests_of_stored(self.config), run.config.name
        if "samples" in meta and run.samples.is_file():
            digests["samples"] = {samples_digest(Samples.read(run.samples))}, run.samples.name
        for what, (right, source) in digests.items():
            if meta[what] not in right:
                raise KinfolkError(
                    f"{self.path / name} does not belong to this run: it was exported with other"
                    f" {what} (digest {short(str(meta[what]))[:8]}, {source} has {min(right)[:8]});"
                    f" put the run's own file or {source} back"
                )

    def views(self) -> Views:
        return build_views(self.config)

    def data(
        self,
        source: object | None = None,
        *,
        labels_from_folders: bool | None = False,
        workers: int | None = None,
        progress: bool = False,
    ) -> ImageData:
        stored, run = self.config.data, Run(self.path)
        if source is None and stored.source is None:
            raise UsageError(
                f"{self.path} was trained on data passed from Python; give the images with --data"
            )
        changed: dict[str, Any] = {
            "workers": stored.workers if workers is None else workers,
            "labels_from_folders": labels_from_folders,
        }
        where: Run | None = None  # pixels of another source are not cached in the run folder
        if source is None:
            where = run
            changed["labels_from_folders"] = bool(labels_from_folders or stored.labels_from_folders)
        else:
            changed |= {"streaming": False, "exclude": None}
        config = self._with_data(stored, changed)
        try:
            opened = open_data(source, config, where)
        except KinfolkError:
            if source is None:
                raise
            # a table has the column names of the run, or the default ones
            opened = open_data(source, self._with_data(DataConfig(), changed))
        if opened.has_texts != ("image" not in self.modalities):
            here, there = ("texts", "images") if opened.has_texts else ("images", "texts")
            raise UsageError(
                f"{opened.name} holds {here}, and {self.path} was trained with"
                f" {self.config.method} on {there}"
            )
        data = read_data(opened, config, where, several=False, progress=progress)
        if data.texts is not None:
            data.texts.tokenizer = self.tokenizer()
        return data

    def _with_data(self, data: DataConfig, changed: Mapping[str, Any]) -> TrainConfig:
        return self.config.model_copy(update={"data": data.model_copy(update=changed)})

    def features(
        self,
        data: ImageData,
        ids: NDArray[np.int64] | None = None,
        *,
        views: Preparation | None = None,
        unpooled: bool = False,
        progress: bool = False,
    ) -> NDArray[np.float32]:
        """(N, F) features of all samples or of `ids`; `unpooled`: before the average pooling."""
        chosen = None if ids is None else torch.from_numpy(ids)
        model = FeatureMap(self.encoder()).eval() if unpooled else self.encoder()
        found = embed(
            model, data, views or self.views(), chosen, device=best_device(), progress=progress
        )
        if bad := int((~found.isfinite().all(1)).sum()):
            raise KinfolkError(
                f"the encoder of {self.path} gives features that are not finite, for {bad:,} of"
                f" {len(found):,} samples; the training has diverged, so train again with a lower"
                " learning rate"
            )
        return np.asarray(found.numpy(), dtype=np.float32)


def exported_meta(path: Path) -> dict[str, Any]:
    file = path / WEIGHTS if (path / WEIGHTS).is_file() else path / DESCRIPTION
    return meta_of(file) if file.is_file() else {}


def open_run(run: str | os.PathLike[str] | Run, model: nn.Module | None = None) -> OpenedRun:
    path = run.path if isinstance(run, Run) else Path(run)
    if not (path / "config.yaml").is_file():
        raise UsageError(
            f"{path} is not a run folder: it has no config.yaml; give the folder that `kinfolk"
            " train --out` wrote"
        )
    return OpenedRun(path, TrainConfig.load(path / "config.yaml"), model)


def restore(path: Path, config: TrainConfig, data: ImageData) -> Framework:
    """As `load_framework`, for `data` that must be the training samples of the run."""
    run = Run(path)
    if not run.checkpoint.is_file():
        raise UsageError(
            f"there is no {run.checkpoint.relative_to(path)} in {path}; the state of the method"
            " cannot be measured without it"
        )
    stored = Samples.read(run.samples)
    different = key_difference(stored.keys[: stored.num_train], data.samples.keys[: data.num_train])
    if different is not None:
        raise UsageError(
            f"the state of the method of {path} exists for its own training samples only:"
            f" {different}; leave --data out"
        )
    tokenizer = OpenedRun(path, config).tokenizer() if learns_from_text(config) else None
    with preserve_random_state():
        return load_framework(config, run, data, tokenizer)


def measure_kin(
    opened: OpenedRun,
    data: ImageData,
    seed: int,
    *,
    alpha: float | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    framework, views = restore(opened.path, opened.config, data), opened.views()
    text: TextData | PairTexts | None = None
    if isinstance(framework, Bimodal):
        text = data.texts or TextData(data.samples, opened.tokenizer())
    return run_kin(framework, data, views, seed, text=text, alpha=alpha, progress=progress)


def load_framework(
    config: TrainConfig, run: Run, data: ImageData, tokenizer: Tokenizer | None = None
) -> Framework:
    """The framework with its state from the last checkpoint, in evaluation mode and with its
    schedules at the end of the training."""
    checkpoint, samples = read_checkpoint(run.checkpoint), Samples.read(run.samples)
    about = checkpoint["kinfolk"]
    digest, number = samples_digest(samples), samples.num_train
    require_identity(about, config, digest, number, run.checkpoint)
    saved = _with_saved_model(config, run.path)
    framework = build_framework(saved, data, tokenizer, resumed=True, cache=run.cache)
    framework.set_progress(max(int(about["epoch"]) - 1, 0), config.epochs)
    state = {
        name.removeprefix("framework."): value
        for name, value in checkpoint["state_dict"].items()
        if not name.endswith(UNUSED)
    }
    try:
        framework.load_state_dict(state)
    except RuntimeError as error:
        raise restore_error(error, run.checkpoint) from error
    return framework.eval()


def _with_saved_model(config: TrainConfig, path: Path) -> TrainConfig:
    copy = Run(path).sentence_transformer
    return config.with_settings({"model.name": f"{SENTENCE}{copy}"}) if copy.is_dir() else config


@torch.no_grad()
def flagged_candidates(
    detector: Detector,
    sim_QC: Tensor,
    ids_Q: Tensor,
    candidate_ids_C: Tensor,
    own_QC: Tensor,
    pos_QP: Tensor | None = None,
) -> Tensor:
    """(Q, C), never True where `own_QC` is."""
    sim_QC = sim_QC.masked_fill(own_QC, OUT)
    block = Block(sim_QC, ids_Q, candidate_ids_C, 1, (~own_QC).sum(1), pos_QP)
    found = detector.find(block)
    return flagged_mask(found[0] if isinstance(found, tuple) else found, block, with_ignored=True)
