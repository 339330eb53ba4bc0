"""From the arguments of a user to a complete configuration, and from that to views, networks, framework and optimiser.

The last part builds what only methods with captions need: tokenizer, text tower and its head.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kinfolk.data.augmentation.views import Views
from kinfolk.data.images import ImageData
from kinfolk.data.open_source import typical_side
from kinfolk.data.sample_table import Samples
from kinfolk.data.text import StreamedText, TextData, Tokenizer, every_caption, read_tokenizer, require_captions, train_tokenizer
from kinfolk.detectors import DETECTORS
from kinfolk.errors import KinfolkError, KinfolkWarning, UsageError, warn_about_dropped_settings
from kinfolk.frameworks import FRAMEWORKS, Framework
from kinfolk.frameworks.registry import Context, build, detector_arguments, framework_arguments, parse
from kinfolk.models import SplitEncoder, SplitHead, build_encoder, build_text, projection_head
from kinfolk.models.towers import TOWERS, begin_from
from kinfolk.seeding import derive_seed
from kinfolk.training.config import TrainConfig, parse_settings
from kinfolk.training.launch import resolve_trainer
from kinfolk.training.optimizers import build_optimizer, build_scheduler, move_to_own_group, scaled_lr
from kinfolk.training.recipes import load_recipe
from kinfolk.training.run_folder import Run
from kinfolk.training.settings import checked_arguments, with_method, written_arguments

if TYPE_CHECKING:
    from kinfolk.data.source import Source


SMALLEST, LARGEST, CIFAR_STEM = 16, 224, 64
"""Sides of views in pixels: the smallest and largest automatic choice, and the largest for which the cifar stem is chosen."""


def assemble(
    stored: TrainConfig | None,
    recipe: str | os.PathLike[str] | None,
    arguments: Mapping[str, Any],
    settings: Sequence[str] | Mapping[str, Any],
) -> TrainConfig:
    """Combines a recipe, the stored configuration of a run or the defaults with the arguments that are not None and then the settings.

    If `method` differs from the method of the recipe, settings of the replaced parts are dropped with a warning. The result is resolved."""
    config = load_recipe(recipe) if recipe is not None else stored or TrainConfig()
    given = {key: value for key, value in arguments.items() if value is not None} | parse_settings(settings)
    if recipe is not None and given.get("method") is not None:
        own = config.method
        config, dropped = with_method(config, given["method"])
        warn_about_dropped_settings(own, config.method, dropped)
    return resolve(config.with_settings(given))


def resolve(config: TrainConfig) -> TrainConfig:
    """Replaces every `auto`, and checks and completes the arguments of the method."""
    method = parse(config.method)
    if config.optimizer.warmup_epochs > config.epochs:
        raise UsageError(f"`optimizer.warmup_epochs` (={config.optimizer.warmup_epochs:g}) must be at most `epochs` (={config.epochs})")
    document = config.model_dump(mode="json")
    document["method"] = str(method)
    document["framework"] = written_arguments(
        FRAMEWORKS[method.framework], framework_arguments(method), config.framework, "framework", method.framework
    )
    if method.detector is not None:
        detector = DETECTORS[method.detector]
        document["detector"] = written_arguments(
            detector, detector_arguments(method, config.detector), config.detector, "detector", method.detector
        )
    elif config.detector:
        raise UsageError(
            f"`detector.{next(iter(config.detector))}` is set, but {method} has no detector; write the method as {method}+NAME"
        )
    document["views"]["options"] |= _needed_views(config)
    document["trainer"] = resolve_trainer(config.trainer).model_dump(mode="json")
    resolved = TrainConfig.of(document)
    if resolved.views.size is not None:
        build_views(resolved)
    return resolved


def _needed_views(config: TrainConfig) -> Mapping[str, object]:
    """The view options that the framework requires. Another value from the user is refused."""
    needed = FRAMEWORKS[parse(config.method).framework].view_options
    for name, value in needed.items():
        if config.views.options.get(name, value) != value:
            raise UsageError(
                f"`views.options.{name}` (={config.views.options[name]!r}) must be {value!r} for {config.method}; leave it out"
            )
    return needed


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """Makes paths absolute, so that the run finds its data from any working directory. The name of a bundled data set is not a path."""
    named = {"data.source": config.data.source, "data.hierarchy": config.data.hierarchy, "detector.pairs": config.detector.get("pairs")}
    named["detector.labels_file"] = config.detector.get("labels_file")
    named |= {"model.init": config.model.init, "text.tokenizer": config.text.tokenizer}
    return config.with_settings({key: os.path.abspath(path) for key, path in named.items() if path is not None and os.path.exists(path)})


def fit_to_data(config: TrainConfig, source: Source) -> TrainConfig:
    """Chooses resolution and stem by the size of the images, where the user has not set them."""
    document = config.model_dump(mode="json")
    side = typical_side(source) or LARGEST
    size = config.views.size or min(max(side, SMALLEST), LARGEST)
    document["views"]["size"] = size
    document["model"]["stem"] = config.model.stem or ("cifar" if size <= CIFAR_STEM else "imagenet")
    document["data"]["image_size"] = config.data.image_size or min(math.ceil(size * 8 / 7), side)
    fitted = TrainConfig.of(document)
    build_views(fitted)
    return fitted


def build_views(config: TrainConfig) -> Views:
    """The views of a training; `Views.evaluate` prepares images for its encoder."""
    assert config.views.size is not None, "fitted to the data"
    return Views(config.views.preset, config.views.size, **config.views.options)


def build_framework(config: TrainConfig, data: ImageData, tokenizer: Tokenizer | None = None, resumed: bool = False) -> Framework:
    """The untrained framework. Its weights depend on the seed and on the file of initial weights, which a resumed run does not read.

    `tokenizer` is needed by methods that learn from captions.
    """
    method = parse(config.method)
    labels = None if data.labels is None else data.labels[: data.num_train]
    framework_args = checked_arguments(
        FRAMEWORKS[method.framework], framework_arguments(method), config.framework, "framework", method.framework
    )
    detector_args = {}
    if method.detector is not None:
        detector = DETECTORS[method.detector]
        detector_args = checked_arguments(
            detector, detector_arguments(method, config.detector), config.detector, "detector", method.detector
        )
    if resumed:  # the weights are in the checkpoint and are not downloaded again
        config = config.with_settings({"model.pretrained": False, "text.pretrained": False})
    torch.manual_seed(derive_seed(config.seed, "weights"))
    try:
        encoder, head = networks(config, FRAMEWORKS[method.framework].channels)
        text = None if tokenizer is None else text_networks(config, tokenizer)
        if config.model.init is not None and not resumed:
            load_initial_weights(config, encoder, head, text)
        keys = data.samples.keys[: data.num_train]
        framework = build(method, encoder, head, Context(data.num_train, labels, text, keys), framework_args, detector_args)
    except KinfolkError:
        raise
    except ValueError as error:  # the constructors' own checks: argument, rule and value
        raise UsageError(f"{method} cannot be built: {error}") from error
    framework.set_eval_labels(labels)
    for objective in framework.objectives:
        objective.compiles = config.trainer.compile is True
    return framework


def networks(config: TrainConfig, channels: tuple[int, ...]) -> tuple[nn.Module, nn.Module]:
    """Encoder and head. With several groups of channels, one of each per group, joined."""
    model, head = config.model, config.head
    assert model.stem is not None, "fitted to the data"
    encoders, heads = [], []
    for number in channels:
        encoder = build_encoder(model.name, stem=model.stem, width=model.width, pretrained=model.pretrained, in_channels=number)
        size: int = encoder.output_size
        encoders.append(encoder)
        heads.append(
            nn.Identity()
            if head.layers == 0
            else projection_head(size, head.hidden_size or size, head.out_size, **head.model_dump(exclude={"hidden_size", "out_size"}))
        )
    if len(channels) == 1:
        return encoders[0], heads[0]
    return SplitEncoder(encoders, channels), SplitHead(heads, [encoder.output_size for encoder in encoders])


def build_optimizers(config: TrainConfig, framework: Framework, num_batches: int) -> dict[str, Any]:
    """Optimiser and schedule in Lightning's form. The learning rate scales with the samples of an optimiser step."""
    chosen = config.optimizer
    steps = math.ceil(num_batches / config.trainer.accumulate)
    optimizer = build_optimizer(
        chosen.name,
        framework,
        scaled_lr(chosen.lr, config.batch_size * config.trainer.accumulate, chosen.lr_scaling),
        weight_decay=chosen.weight_decay,
        momentum=chosen.momentum,
        nesterov=chosen.nesterov,
        betas=chosen.betas,
        trust=chosen.trust,
    )
    milestones = [round(epoch * steps) for epoch in chosen.milestones]
    warmup = round(chosen.warmup_epochs * steps)
    scheduled = len(optimizer.param_groups)
    for own in framework.own_rates:
        move_to_own_group(optimizer, own.parameters, own.lr)
    factors = [own.factor for own in framework.own_rates]
    assert len(optimizer.param_groups) == scheduled + len(factors)
    scheduler = build_scheduler(optimizer, config.epochs * steps, warmup, chosen.schedule, milestones, chosen.factor, others=factors)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def learns_from_text(config: TrainConfig) -> bool:
    """Whether the method learns from images with captions."""
    return "text" in FRAMEWORKS[parse(config.method).framework].modalities


def read_text(images: ImageData, config: TrainConfig, run: Run, known: bool) -> TextData | StreamedText | None:
    """The captions of all samples; None for a method that needs none. `known`: the run folder has a tokenizer already."""
    if not learns_from_text(config):
        return None
    require_captions(images.samples)
    tokenizer = _tokenizer(images.samples, config, run, known)
    return TextData(images.samples, tokenizer) if images.stream is None else StreamedText(images.samples, tokenizer)


def _tokenizer(samples: Samples, config: TrainConfig, run: Run, known: bool) -> Tokenizer:
    """The tokenizer of the run, the given one, that of the run with the initial towers, or one learnt from the training captions."""
    wanted = config.text
    file = run.tokenizer if known else wanted.tokenizer or _tokenizer_beside(config.model.init)
    if file is not None:
        return read_tokenizer(file, wanted.context)
    return train_tokenizer(every_caption(samples, "train"), vocab_size=wanted.vocab_size, context=wanted.context)


def _tokenizer_beside(weights: str | None) -> Path | None:
    """The tokenizer of the run that the file of towers, or the checkpoint, belongs to."""
    if weights is None or (Path(weights).name != TOWERS and Path(weights).suffix != ".ckpt"):
        return None
    places = (Run(folder).tokenizer for folder in Path(weights).absolute().parents[:2])
    return next((place for place in places if place.is_file()), None)


def text_networks(config: TrainConfig, tokenizer: Tokenizer) -> tuple[nn.Module, nn.Module]:
    """The text tower and its head: a linear map without bias, as in CLIP, or the identity if the images have no head either."""
    text = config.text
    tower = build_text(
        text.name,
        vocab_size=tokenizer.vocab_size,
        context=text.context,
        end_id=tokenizer.end_id,
        width=text.width,
        layers=text.layers,
        heads=text.heads,
        causal=text.causal,
        pretrained=text.pretrained,
    )
    size = tower.output_size
    assert isinstance(size, int)
    head = nn.Identity() if config.head.layers == 0 else projection_head(size, size, config.head.out_size, layers=1, bias=False)
    return tower, head


def load_initial_weights(config: TrainConfig, encoder: nn.Module, head: nn.Module, text: tuple[nn.Module, nn.Module] | None) -> None:
    """Loads the file `model.init`. Warns about networks without weights in it, and about a text tower without its tokenizer."""
    path = config.model.init
    assert path is not None
    parts = nn.Module()
    parts.encoder, parts.head = encoder, head
    if text is not None:
        parts.text_encoder, parts.text_head = text
    filled = begin_from(parts, path)
    if "text_encoder" in filled and config.text.tokenizer is None and _tokenizer_beside(path) is None:
        warnings.warn(
            f"the text tower of {path} was trained with a tokenizer that is not known here, and a new one numbers the tokens "
            "differently; give the tokenizer.json of its training as `text.tokenizer`",
            KinfolkWarning,
            stacklevel=2,
        )
    rest = [name for name, part in parts.named_children() if name not in filled and any(True for _ in part.parameters())]
    if rest:
        warnings.warn(
            f"{path} has weights for {', '.join(filled)}; {', '.join(rest)} start from random weights", KinfolkWarning, stacklevel=2
        )
