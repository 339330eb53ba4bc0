"""From the arguments of a user to a complete configuration, and from that to views, networks,
framework and optimiser.

The last part builds what only methods with captions need: tokenizer, text tower and its head.
"""

from __future__ import annotations

import inspect
import itertools
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from kinfolk.data.augmentation.presets import augmentations
from kinfolk.data.augmentation.views import Views
from kinfolk.data.images import ImageData
from kinfolk.data.labels import captions_of
from kinfolk.data.open_source import typical_side
from kinfolk.data.sample_table import Samples
from kinfolk.data.text import (
    PairTexts,
    StreamedText,
    TextData,
    TextViews,
    Tokenizer,
    every_caption,
    parse_tokenizer,
    read_tokenizer,
    require_captions,
    train_tokenizer,
)
from kinfolk.detectors import DETECTORS, Guide
from kinfolk.detectors.base import Detector
from kinfolk.errors import KinfolkError, KinfolkWarning, UsageError, warn_about_dropped_settings
from kinfolk.frameworks import FRAMEWORKS, Framework
from kinfolk.frameworks.registry import (
    Context,
    build,
    detector_arguments,
    framework_arguments,
    parse,
    stored_method,
)
from kinfolk.models import SplitEncoder, SplitHead, build_encoder, build_text, projection_head
from kinfolk.models.encoders import adapt
from kinfolk.models.text import SENTENCE, sentence_tokenizer, sentence_transformer
from kinfolk.models.weights import TOWERS, load_parts
from kinfolk.plugins import load_plugins
from kinfolk.seeding import derive_seed
from kinfolk.training.config import (
    HeadConfig,
    OptimizerConfig,
    Section,
    TextConfig,
    TrainConfig,
    parse_settings,
)
from kinfolk.training.documents import read_yaml
from kinfolk.training.guides import PATCHES, guide_features, text_guide
from kinfolk.training.launch import resolve_trainer
from kinfolk.training.optimizers import (
    build_optimizer,
    build_scheduler,
    lr_factor,
    move_to_own_group,
    scaled_lr,
)
from kinfolk.training.run_folder import Run, num_processes
from kinfolk.training.settings import (
    checked_arguments,
    flat,
    load_recipe,
    recipe_path,
    with_method,
    written_arguments,
)

if TYPE_CHECKING:
    from kinfolk.data.source import Source


SMALLEST, LARGEST, CIFAR_STEM = 16, 224, 64
"""Sides of views in pixels: the smallest and largest automatic choice, and the largest for which
the cifar stem is chosen."""
CPU_LARGEST, CPU_CIFAR_STEM, CPU_EPOCHS, CPU_WIDTH = 64, 40, 30, 32
"""The same on a CPU, the number of epochs there, and the width of its resnet10 with the imagenet
stem. A step takes a sixth of the time of resnet18, so that a thousand photos take minutes."""
FEW_SAMPLES, STEPS_PER_EPOCH, SMALLEST_BATCH = 2048, 8, 16
"""With fewer samples the automatic batch is a power of two that gives an epoch at least so many
steps, and is at least so large."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 0.003, "lr_scaling": "none", "weight_decay": 0.01, "warmup_epochs": 0},
    "sgd": {"lr": 0.03, "lr_scaling": "linear", "weight_decay": 5e-4, "warmup_epochs": 0},
    "lars": {"lr": 0.03, "lr_scaling": "linear", "weight_decay": 5e-4, "warmup_epochs": 0},
}
"""Defaults of each optimiser; docs/training.md has the measurement."""
CAPTION_ADAMW = {"lr": 0.001, "weight_decay": 0.1, "warmup_epochs": 1}
CAPTION_VIEWS = {"scale": [0.5, 1.0], "flip": 0.5}
"""What differs for captions. SimCLR's views would make captions wrong, and CLIP's, made for
millions of images, hardly change the few that a small data set has."""
TEXT_TOWERS: tuple[tuple[float, dict[str, int]], ...] = (
    (100_000, {"layers": 1, "width": 128, "vocab_size": 4096}),
    (1_000_000, {"layers": 4, "width": 256, "vocab_size": 16384}),
    (math.inf, {"layers": 12, "width": 512, "vocab_size": 49408}),
)
"""The default text tower for up to so many captions; the last one is CLIP's, and not for a CPU."""
LARGEST_CONTEXT, COUNTED_CAPTIONS = 77, 100_000
"""CLIP's number of tokens, and how many captions are counted to choose a smaller one."""
MOST_TOKENIZED = 100_000
"""Text pairs whose texts the tokenizer is learnt from, about."""
LARGE_STEP = 4 * 256 * 224**2
"""Pixels of the samples in a step on one device, above which memory may not suffice."""


@dataclass(frozen=True)
class Parts:
    """Objects passed to `kf.train` instead of names. They are trained in place."""

    model: nn.Module | None = None
    detector: Detector | None = None

    def settings(self, action: str | None) -> dict[str, Any]:
        """Their entries in the configuration."""
        model = None if self.model is None else type(self.model).__qualname__
        detector = None if self.detector is None else type(self.detector).__qualname__
        return {
            "python.model": model,
            "python.detector": detector,
            "python.action": action if detector is not None else None,
        }

    def require(self, config: TrainConfig) -> None:
        """Refuses to build a run whose objects are missing."""
        for what, wanted, given in (
            ("model", config.python.model, self.model),
            ("detector", config.python.detector, self.detector),
        ):
            if wanted is not None and given is None:
                raise UsageError(
                    f"the {what} of this run ({wanted}) was passed from Python; pass it again as"
                    f" `{what}`"
                )


NO_PARTS = Parts()


def assemble(
    stored: TrainConfig | None,
    recipe: str | os.PathLike[str] | None,
    arguments: Mapping[str, Any],
    settings: Sequence[str] | Mapping[str, Any],
) -> TrainConfig:
    """Combines a recipe, the stored configuration of a run or the defaults with the arguments that
    are not None and then the settings.

    If `method` differs from the method of the recipe, settings of the replaced parts are dropped
    with a warning. The result is resolved."""
    config = load_recipe(recipe) if recipe is not None else stored or TrainConfig()
    if recipe is None and stored is not None:
        config = stored.model_copy(update={"method": stored_method(stored.method)})
    given = {key: value for key, value in arguments.items() if value is not None} | parse_settings(
        settings
    )
    if recipe is not None and given.get("method") is not None:
        own = config.method
        config, dropped = with_method(config, given["method"])
        warn_about_dropped_settings(own, config.method, dropped)
    load_plugins(
        config.with_settings({"plugins": given["plugins"]}).plugins
        if "plugins" in given
        else config.plugins
    )
    if stored is None and recipe is None:
        config = config.with_settings(_defaults_of_texts(given))
    config = config.with_settings(given)
    if (
        stored is None
        and recipe is None
        and "epochs" not in given
        and not contrasts_texts(config)
        and resolve_trainer(config.trainer).accelerator == "cpu"
    ):
        config = config.with_settings(
            {"epochs": max(CPU_EPOCHS, math.ceil(config.optimizer.warmup_epochs or 0))}
        )
    return resolve(config)


def _defaults_of_texts(given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a training on text pairs, which differ from those of images; empty for other
    methods. A pretrained encoder is trained shorter and with a smaller step."""
    method = given.get("method")
    if method is None or not contrasts_texts(TrainConfig(method=method)):
        return {}
    pretrained = str(given.get("model.name", "")).startswith(SENTENCE)
    return {
        "epochs": 3 if pretrained else 20,
        "batch_size": 128,
        "optimizer.name": "adamw",
        "optimizer.lr": 5e-5 if pretrained else 1e-3,
        "optimizer.lr_scaling": "none",
        "optimizer.weight_decay": 0.01,
        "optimizer.warmup_epochs": 0.2,
        "text.context": 128 if pretrained else 64,
        "text.width": 256,
        "text.layers": 2,
        "text.heads": 4,
        "text.causal": False,
        "text.vocab_size": 8192,
    }


def setting_origins(
    stored: TrainConfig | None,
    recipe: str | os.PathLike[str] | None,
    arguments: Mapping[str, Any],
    settings: Sequence[str] | Mapping[str, Any],
) -> dict[str, str]:
    """Where each setting comes from, by key: "given", the recipe or the run. Keys that are not in
    it have their default."""
    origins: dict[str, str] = {}
    if recipe is not None:
        origins = dict.fromkeys(flat(read_yaml(recipe_path(recipe))), "recipe")
    elif stored is not None:
        origins = dict.fromkeys(flat(stored.model_dump(mode="json")), "the run")
    given = {key: value for key, value in arguments.items() if value is not None} | parse_settings(
        settings
    )
    return origins | dict.fromkeys(flat(given), "given")


def resolve(config: TrainConfig) -> TrainConfig:
    """Replaces every `auto`, and checks and completes the arguments of the method."""
    method = parse(config.method)
    if config.python.detector is not None and method.detector is not None:
        raise UsageError(
            f"`detector` was passed as an object, and {method} has a detector already; give"
            f" `method={method.framework!r}`"
        )
    warmup = config.optimizer.warmup_epochs
    if warmup is not None and warmup > config.epochs:
        raise UsageError(
            f"`optimizer.warmup_epochs` (={warmup:g}) must be at most `epochs` (={config.epochs})"
        )
    document = config.model_dump(mode="json")
    document["method"] = str(method)
    document["framework"] = written_arguments(
        FRAMEWORKS[method.framework],
        framework_arguments(method),
        config.framework,
        "framework",
        method.framework,
    )
    if method.detector is not None:
        detector = DETECTORS[method.detector]
        document["detector"] = written_arguments(
            detector,
            detector_arguments(method, config.detector),
            config.detector,
            "detector",
            method.detector,
        )
    elif config.detector:
        raise UsageError(
            f"`detector.{next(iter(config.detector))}` is set, but {method} has no detector; write"
            f" the method as {method}+NAME"
        )
    document["head"] = head_settings(config).model_dump(mode="json")
    document["optimizer"] = optimizer_settings(config).model_dump(mode="json")
    captions = learns_from_text(config)
    if not captions:  # unused, and the same in all run folders
        document["text"] = text_settings(config, math.inf, LARGEST_CONTEXT).model_dump(mode="json")
    if config.views.preset is None:
        document["views"]["preset"] = "clip" if captions else "simclr"
        document["views"]["options"] = (CAPTION_VIEWS if captions else {}) | config.views.options
    document["views"]["options"] |= _needed_views(config)
    document["trainer"] = resolve_trainer(config.trainer).model_dump(mode="json")
    resolved = TrainConfig.of(document)
    # refuses wrong options
    preset = resolved.views.preset
    assert preset is not None
    augmentations(preset, resolved.views.size or LARGEST, _view_overrides(resolved))
    return resolved


Part = TypeVar("Part", bound=Section)


def complete(section: Part, defaults: Mapping[str, Any]) -> Part:
    """The section with these defaults where it has null."""
    missing = {name: value for name, value in defaults.items() if getattr(section, name) is None}
    return section.model_copy(update=missing)


def optimizer_settings(config: TrainConfig) -> OptimizerConfig:
    """The settings of the optimiser, completed by its defaults."""
    name = config.optimizer.name
    captions = CAPTION_ADAMW if name == "adamw" and learns_from_text(config) else {}
    return complete(config.optimizer, OPTIMIZERS[name] | captions)


def text_settings(config: TrainConfig, num_captions: float, context: int) -> TextConfig:
    """The settings of the text tower, completed by those that fit the number of captions and the
    device. A tower of another package gets CLIP's tokenizer."""
    towers = TEXT_TOWERS[:2] if config.trainer.accelerator == "cpu" else TEXT_TOWERS
    if config.text.name != "transformer" or not learns_from_text(config):
        num_captions, context, towers = math.inf, LARGEST_CONTEXT, TEXT_TOWERS
    fits = [tower for limit, tower in towers if num_captions <= limit] or [towers[-1][1]]
    text = complete(config.text, {**fits[0], "context": context})
    assert text.width is not None
    heads = [number for number in (8, 4, 2) if text.width % (32 * number) == 0]
    return complete(text, {"heads": heads[0] if heads else 1})


def fit_text(config: TrainConfig, samples: Samples) -> TrainConfig:
    """Chooses text tower, context and size of the vocabulary by the training captions and the
    device, where the user has not set them."""
    if not learns_from_text(config) or samples.captions is None:
        return config
    captions = every_caption(samples, "train")
    words = sorted(len(each.split()) for each in itertools.islice(captions, COUNTED_CAPTIONS))
    number = len(words) + sum(1 for _ in captions)
    # a word is one or two tokens; start and end
    tokens = math.ceil(1.5 * words[int(0.99 * (len(words) - 1))]) + 2 if words else LARGEST_CONTEXT
    context = min(16 * math.ceil(tokens / 16), LARGEST_CONTEXT)
    return config.model_copy(update={"text": text_settings(config, number, context)})


def _view_overrides(config: TrainConfig) -> dict[str, Any]:
    """The view options that belong to the augmentations; the others are arguments of `Views`."""
    own = inspect.signature(Views).parameters
    return {name: value for name, value in config.views.options.items() if name not in own}


def _needed_views(config: TrainConfig) -> Mapping[str, object]:
    """The view options that the framework requires. Another value from the user is refused."""
    needed = FRAMEWORKS[parse(config.method).framework].view_options
    for name, value in needed.items():
        if config.views.options.get(name, value) != value:
            raise UsageError(
                f"`views.options.{name}` (={config.views.options[name]!r}) must be {value!r} for"
                f" {config.method}; leave it out"
            )
    return needed


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """Makes paths absolute, so that the run finds its data from any working directory. The name of
    a bundled data set is not a path."""
    named = {
        "data.source": config.data.source,
        "data.exclude": config.data.exclude,
        "data.hierarchy": config.data.hierarchy,
        "detector.pairs": config.detector.get("pairs"),
    }
    named["detector.features"] = (
        None if config.detector.get("features") == PATCHES else config.detector.get("features")
    )
    named["detector.labels_file"] = config.detector.get("labels_file")
    for key, name in (
        ("model.name", config.model.name),
        ("detector.features", named["detector.features"]),
    ):
        place = str(name).removeprefix(SENTENCE)
        if str(name).startswith(SENTENCE) and os.path.isdir(place):
            config = config.with_settings({key: SENTENCE + os.path.abspath(place)})
    files = [os.path.abspath(name) if name.endswith(".py") else name for name in config.plugins]
    named |= {"model.init": config.model.init, "text.tokenizer": config.text.tokenizer}
    found = {
        key: os.path.abspath(path)
        for key, path in named.items()
        if path is not None and os.path.exists(path)
    }
    return config.with_settings({**found, "plugins": files})


def fit_to_data(config: TrainConfig, source: Source) -> TrainConfig:
    """Chooses resolution, encoder and stem by the size of the images and the device, and the
    features of a guide, where the user has not set them. Refuses texts for a method of images and
    the other way round."""
    if contrasts_texts(config) != source.has_texts:
        raise UsageError(
            f"{source.name} is a table of text pairs, and {config.method} learns from images; give"
            " --method pairs, or pairs+glofnd"
            if source.has_texts
            else f"{config.method} learns from text pairs, and {source.name} has none; give a table"
            " (.csv, .tsv, .parquet) with the columns anchor and positive"
        )
    if source.has_texts:
        return _fit_to_texts(config)
    document = config.model_dump(mode="json")
    on_cpu = config.trainer.accelerator == "cpu"
    side = typical_side(source) or LARGEST
    size = config.views.size or min(max(side, SMALLEST), CPU_LARGEST if on_cpu else LARGEST)
    small = size <= (CPU_CIFAR_STEM if on_cpu else CIFAR_STEM)
    document["views"]["size"] = size
    if config.model.name == "auto":
        document["model"]["name"] = "resnet10" if on_cpu else "resnet18"
        document["model"]["width"] = config.model.width or (
            CPU_WIDTH if on_cpu and not small else None
        )
    document["model"]["stem"] = config.model.stem or ("cifar" if small else "imagenet")
    document["data"]["image_size"] = config.data.image_size or min(math.ceil(size * 8 / 7), side)
    method = parse(config.method)
    by_captions = "modality" in FRAMEWORKS[method.framework].guides
    if (
        method.detector == "guide"
        and not by_captions
        and config.python.detector is None
        and config.detector.get("features") is None
    ):
        document["detector"]["features"] = PATCHES
    return TrainConfig.of(document)


def _fit_to_texts(config: TrainConfig) -> TrainConfig:
    """Chooses the built-in encoder if none is named, and cuts texts at the length that a model of
    sentence-transformers takes."""
    name, context = config.model.name, config.text.context
    if name == "auto":
        return config.with_settings({"model.name": "transformer"})
    if not name.startswith(SENTENCE):
        return config
    longest = sentence_tokenizer(sentence_transformer(name))[1]
    return config.with_settings({"text.context": min(context or longest, longest)})


def fit_batch(config: TrainConfig, num_train: int, chosen: bool) -> TrainConfig:
    """Reduces a batch that is larger than the data. Without a `chosen` size, small data sets get a
    batch with several steps per epoch."""
    processes, size = num_processes(config), config.batch_size
    if not chosen and num_train < FEW_SAMPLES:
        size = min(
            size, max(SMALLEST_BATCH, 2 ** int(math.log2(max(num_train // STEPS_PER_EPOCH, 1))))
        )
    size = min(size, num_train // processes * processes)
    if size == config.batch_size or size < 2:  # one sample per process is refused by the loader
        return config
    if chosen:
        warnings.warn(
            f"`batch_size` (={config.batch_size}) is larger than the {num_train:,} training"
            f" samples; {size} is used",
            KinfolkWarning,
            stacklevel=2,
        )
    return config.model_copy(update={"batch_size": size})


def warn_if_large(config: TrainConfig) -> None:
    """Warns if a step has so many pixels that memory may not suffice: the system ends a process on
    a CPU without a message."""
    side, size = (
        config.views.size or 0,
        min(
            config.batch_size // num_processes(config),
            config.trainer.chunk_size or config.batch_size,
        ),
    )
    if size * side**2 > LARGE_STEP:
        fits = max(2, LARGE_STEP // 4 // side**2)
        warnings.warn(
            f"a step of {size} samples with views of {side} pixels may need more memory than there"
            f" is; if the training is killed, give a smaller batch (--batch-size {fits}) or smaller"
            " views (--image-size)",
            KinfolkWarning,
            stacklevel=2,
        )


def build_views(config: TrainConfig) -> Views:
    """The views of a training; `Views.evaluate` prepares images for its encoder. Texts have none:
    `TextViews`."""
    if contrasts_texts(config):
        return cast(Views, TextViews())
    assert config.views.size is not None, "fitted to the data"
    assert config.views.preset is not None
    return Views(config.views.preset, config.views.size, **config.views.options)


def build_framework(
    config: TrainConfig,
    data: ImageData,
    tokenizer: Tokenizer | None = None,
    resumed: bool = False,
    parts: Parts = NO_PARTS,
    cache: Path | None = None,
) -> Framework:
    """The untrained framework. Its weights depend on the seed and on the file of initial weights,
    which a resumed run does not read.

    `tokenizer` is needed by methods that learn from captions, `parts` by runs with objects that
    were passed from Python. `cache` is the folder for the features of a guide that are computed
    here.
    """
    parts.require(config)
    method = parse(config.method)
    if config.python.action is not None:
        method = replace(method, action=config.python.action)
    labels = None if data.labels is None else data.of_ids(data.labels)
    framework_args = checked_arguments(
        FRAMEWORKS[method.framework],
        framework_arguments(method),
        config.framework,
        "framework",
        method.framework,
    )
    detector_args = {}
    if method.detector is not None:
        detector = DETECTORS[method.detector]
        detector_args = checked_arguments(
            detector,
            detector_arguments(method, config.detector),
            config.detector,
            "detector",
            method.detector,
        )
    if isinstance(detector_args.get("features"), str | Path):
        if data.texts is None:
            detector_args["features"] = guide_features(detector_args["features"], data, cache)
        else:
            detector_args |= text_guide(detector_args["features"], data, cache)
    if resumed:  # the weights are in the checkpoint and are not downloaded again
        config = config.with_settings({"model.pretrained": False, "text.pretrained": False})
    torch.manual_seed(derive_seed(config.seed, "weights"))
    try:
        if contrasts_texts(config):
            assert tokenizer is not None
            if parts.model is not None:
                raise UsageError(
                    f"{method} takes no module as `model`; give the name transformer or st/NAME, or"
                    " train it with kinfolk.integrations.sentence_transformers"
                )
            (encoder, head), text = text_networks(config, tokenizer), None
        else:
            encoder, head = networks(config, FRAMEWORKS[method.framework].channels, parts.model)
            text = None if tokenizer is None else text_networks(config, tokenizer)
        second = _head(config, int(encoder.output_size)) if config.head.second else None  # type: ignore[arg-type]
        if config.model.init is not None and not resumed:
            load_initial_weights(config, encoder, head, text)
        keys: Sequence[str] = data.samples.keys[: data.num_train]
        if data.num_ids > data.num_train:
            keys = [*keys, *(f"negative/{each}" for each in range(data.num_ids - data.num_train))]
        context = Context(data.num_ids, labels, text, keys, second)
        framework = build(
            method, encoder, head, context, framework_args, detector_args, parts.detector
        )
    except KinfolkError:
        raise
    except ValueError as error:  # the constructors' own checks: argument, rule and value
        raise UsageError(f"{method} cannot be built: {error}") from error
    _check_guides(framework, data)
    framework.set_eval_labels(labels)
    for objective in framework.objectives:
        objective.compiles = config.trainer.compile is True
    return framework


def _check_guides(framework: Framework, data: ImageData) -> None:
    """Refuses features of other samples, before the first step would meet an id without
    features."""
    for part in framework.modules():
        if (
            isinstance(part, Guide)
            and part.features is not None
            and len(part.features) not in {data.num_ids, max(len(data), data.num_ids)}
        ):
            raise UsageError(
                f"the guide has features of {len(part.features):,} samples; it must have one row"
                f" for each of the {data.num_ids:,} training samples, in data-set order, or for"
                f" each of all {len(data):,} samples"
            )


def networks(
    config: TrainConfig, channels: tuple[int, ...], own: nn.Module | None = None
) -> tuple[nn.Module, nn.Module]:
    """Encoder and head. With several groups of channels, one of each per group, joined. `own`: an
    encoder that was passed from Python."""
    if own is not None and len(channels) > 1:
        raise UsageError(
            f"{config.method} needs one encoder per group of channels, so it takes no module as"
            " `model`; give a name"
        )
    model = config.model
    assert model.stem is not None, "fitted to the data"
    encoders: list[nn.Module] = []
    heads: list[nn.Module] = []
    sizes: list[int] = []
    for number in channels:
        if own is not None:
            assert config.views.size is not None
            encoder = adapt(own, input_size=config.views.size)
        else:
            encoder = build_encoder(
                model.name,
                stem=model.stem,
                width=model.width,
                pretrained=model.pretrained,
                in_channels=number,
            )
        size = int(encoder.output_size)  # type: ignore[arg-type]
        encoders.append(encoder)
        sizes.append(size)
        heads.append(_head(config, size))
    if len(channels) == 1:
        return encoders[0], heads[0]
    return SplitEncoder(encoders, channels), SplitHead(heads, sizes)


def head_settings(config: TrainConfig) -> HeadConfig:
    """The settings of the head, completed by those of the framework."""
    own = {
        "layers": 2,
        "last_norm": False,
        **FRAMEWORKS[parse(config.method).framework].head_options,
    }
    return complete(config.head, own)


def _head(config: TrainConfig, size: int) -> nn.Module:
    """The projection of features of this size."""
    head = head_settings(config)
    if head.layers == 0:
        return nn.Identity()
    return projection_head(
        size,
        head.hidden_size or size,
        head.out_size,
        **head.model_dump(exclude={"hidden_size", "out_size", "second"}),
    )


def build_optimizers(config: TrainConfig, framework: Framework, num_batches: int) -> dict[str, Any]:
    """Optimiser and schedule in Lightning's form. The learning rate scales with the samples of an
    optimiser step."""
    chosen = optimizer_settings(config)
    assert chosen.lr is not None
    assert chosen.lr_scaling is not None
    assert chosen.weight_decay is not None
    assert chosen.warmup_epochs is not None
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
    schedule = (config.epochs * steps, warmup, chosen.schedule, milestones, chosen.factor)
    scheduler = build_scheduler(optimizer, lambda step: lr_factor(step, *schedule), others=factors)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def learns_from_text(config: TrainConfig) -> bool:
    """Whether the method learns from texts: captions of images, or text pairs."""
    return "text" in FRAMEWORKS[parse(config.method).framework].modalities


def contrasts_texts(config: TrainConfig) -> bool:
    """Whether the method learns from text pairs, without images. The name of weights from elsewhere
    is no method; they encode images."""
    framework = FRAMEWORKS.get(config.method.partition("+")[0])
    return framework is not None and "image" not in framework.modalities


def read_text(
    images: ImageData, config: TrainConfig, run: Run, known: bool
) -> TextData | StreamedText | PairTexts | None:
    """The captions of all samples; None for a method that needs none. `known`: the run folder has a
    tokenizer already."""
    if not learns_from_text(config):
        return None
    require_captions(images.samples)
    tokenizer = _tokenizer(images.samples, config, run, known)
    if images.texts is not None:
        images.texts.tokenizer = tokenizer
        return images.texts
    return (
        TextData(images.samples, tokenizer)
        if images.stream is None
        else StreamedText(images.samples, tokenizer)
    )


def _tokenizer(samples: Samples, config: TrainConfig, run: Run, known: bool) -> Tokenizer:
    """The tokenizer of the run, the given one, that of the run with the initial towers, or one
    learnt from the training captions."""
    wanted = config.text
    assert wanted.context is not None, "fitted to the data"
    file = run.tokenizer if known else wanted.tokenizer or _tokenizer_beside(config.model.init)
    if file is not None:
        return read_tokenizer(file, wanted.context)
    if contrasts_texts(config) and config.model.name.startswith(SENTENCE):
        found = sentence_tokenizer(sentence_transformer(config.model.name))[0]
        return parse_tokenizer(found, wanted.context)
    assert wanted.vocab_size is not None
    texts = every_caption(samples, "train")
    if contrasts_texts(config):  # of many pairs, a part that is spread over the table
        assert samples.captions is not None
        part = samples.captions[: samples.num_train : 1 + samples.num_train // MOST_TOKENIZED]
        texts = (text for pair in part for text in captions_of(pair))
    return train_tokenizer(texts, vocab_size=wanted.vocab_size, context=wanted.context)


def _tokenizer_beside(weights: str | None) -> Path | None:
    """The tokenizer of the run that the file of towers, or the checkpoint, belongs to."""
    if weights is None or (Path(weights).name != TOWERS and Path(weights).suffix != ".ckpt"):
        return None
    places = (Run(folder).tokenizer for folder in Path(weights).absolute().parents[:2])
    return next((place for place in places if place.is_file()), None)


def text_networks(config: TrainConfig, tokenizer: Tokenizer) -> tuple[nn.Module, nn.Module]:
    """The text tower and its head: a linear map without bias, as in CLIP, or the identity if the
    images have no head either, or for text pairs."""
    text = config.text
    assert text.context is not None, "fitted to the data"
    assert text.width is not None
    assert text.layers is not None
    assert text.heads is not None
    tower = build_text(
        config.model.name if contrasts_texts(config) else text.name,
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
    head = (
        nn.Identity()
        if config.head.layers == 0
        else projection_head(size, size, config.head.out_size, layers=1, bias=False)
    )
    return tower, head


def load_initial_weights(
    config: TrainConfig,
    encoder: nn.Module,
    head: nn.Module,
    text: tuple[nn.Module, nn.Module] | None,
) -> None:
    """Loads the file `model.init`. Warns about networks without weights in it, and about a text
    tower without its tokenizer."""
    path = config.model.init
    assert path is not None
    parts = nn.Module()
    parts.encoder, parts.head = encoder, head
    if text is not None:
        parts.text_encoder, parts.text_head = text
    filled = load_parts(parts, path)
    if (
        "text_encoder" in filled
        and config.text.tokenizer is None
        and _tokenizer_beside(path) is None
    ):
        warnings.warn(
            f"the text tower of {path} was trained with a tokenizer that is not known here, and a"
            " new one numbers the tokens differently; give the tokenizer.json of its training as"
            " `text.tokenizer`",
            KinfolkWarning,
            stacklevel=2,
        )
    rest = [
        name
        for name, part in parts.named_children()
        if name not in filled and any(True for _ in part.parameters())
    ]
    if rest:
        warnings.warn(
            f"{path} has weights for {', '.join(filled)}; {', '.join(rest)} start from random"
            " weights",
            KinfolkWarning,
            stacklevel=2,
        )
