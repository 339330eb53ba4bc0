"""From the arguments of a user to a complete configuration; docs/training.md lists the defaults."""

from __future__ import annotations

import inspect
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kinfolk.data.open_source import typical_side
from kinfolk.data.presets import augmentations
from kinfolk.data.sample_table import Samples
from kinfolk.data.text import every_caption
from kinfolk.data.views import Views
from kinfolk.detectors import DETECTORS
from kinfolk.errors import UsageError, warn
from kinfolk.frameworks import FRAMEWORKS
from kinfolk.frameworks.registry import (
    detector_arguments,
    framework_arguments,
    parse,
    stored_method,
)
from kinfolk.models.text import SENTENCE, sentence_tokenizer, sentence_transformer
from kinfolk.plugins import load_plugins
from kinfolk.training.config import (
    HeadConfig,
    OptimizerConfig,
    Section,
    TextConfig,
    TrainConfig,
    parse_settings,
)
from kinfolk.training.documents import read_yaml
from kinfolk.training.guides import PATCHES
from kinfolk.training.launch import resolve_trainer
from kinfolk.training.run_folder import num_processes
from kinfolk.training.settings import (
    check_arguments,
    flat,
    load_recipe,
    recipe_path,
    with_method,
)

if TYPE_CHECKING:
    from kinfolk.data.source import Source

SMALLEST, LARGEST, CIFAR_STEM = 16, 224, 64
"""Sides of views: the smallest and largest default, and the largest with the cifar stem."""
CPU_LARGEST, CPU_CIFAR_STEM, CPU_EPOCHS, CPU_WIDTH = 64, 40, 30, 32
"""The same on a CPU, its number of epochs, and the width of its resnet10 with the imagenet stem."""
FEW_SAMPLES, STEPS_PER_EPOCH, SMALLEST_BATCH = 2048, 8, 16
_BY_BATCH = {"lr": 0.03, "lr_scaling": "linear", "weight_decay": 5e-4, "warmup_epochs": 0}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 0.003, "lr_scaling": "none", "weight_decay": 0.01, "warmup_epochs": 0},
    "sgd": _BY_BATCH,
    "lars": _BY_BATCH,
}
CAPTION_ADAMW = {"lr": 0.001, "weight_decay": 0.1, "warmup_epochs": 1}
CAPTION_VIEWS = {"scale": [0.5, 1.0], "flip": 0.5}
"""SimCLR's views would make captions wrong, and CLIP's hardly change a small data set."""
TEXT_TOWERS: tuple[tuple[float, dict[str, int]], ...] = (
    (100_000, {"layers": 1, "width": 128, "vocab_size": 4096}),
    (1_000_000, {"layers": 4, "width": 256, "vocab_size": 16384}),
    (math.inf, {"layers": 12, "width": 512, "vocab_size": 49408}),
)
"""The default text tower by the largest number of captions; the last is CLIP's, not for a CPU."""
LARGEST_CONTEXT, COUNTED_CAPTIONS = 77, 100_000
"""CLIP's number of tokens; captions that are counted to choose a smaller one."""
PATHS = (
    *("data.source", "data.exclude", "model.init", "text.tokenizer"),
    *("detector.pairs", "detector.features", "detector.labels_file"),
)


def assemble(
    stored: TrainConfig | None,
    recipe: str | os.PathLike[str] | None,
    arguments: Mapping[str, Any],
    settings: Sequence[str] | Mapping[str, Any],
) -> TrainConfig:
    """Combines a recipe, the stored configuration of a run or the defaults with the arguments that
    are not None and then the settings."""
    given = _join_settings(arguments, settings)
    config, method = stored or TrainConfig(), given.get("method")
    if recipe is not None:
        config = load_recipe(recipe)
        if method is not None:
            before = config.method
            config, dropped = with_method(config, method)
            if dropped:
                warn(
                    f"the recipe is for {before}; for {config.method} these settings of it are"
                    f" dropped: {', '.join(f'`{name}`' for name in dropped)}"
                )
    elif stored is not None:
        config = stored.model_copy(update={"method": stored_method(stored.method)})
    load_plugins(config.with_settings({"plugins": given.get("plugins", config.plugins)}).plugins)
    if stored is not None or recipe is not None:
        return resolve(config.with_settings(given))
    if method is not None and contrasts_texts(TrainConfig(method=method)):
        config = config.with_settings(_defaults_of_texts(str(given.get("model.name", ""))))
    config = config.with_settings(given)
    on_cpu = resolve_trainer(config.trainer).accelerator == "cpu"
    if "epochs" not in given and on_cpu and not contrasts_texts(config):
        epochs = max(CPU_EPOCHS, math.ceil(config.optimizer.warmup_epochs or 0))
        config = config.with_settings({"epochs": epochs})
    return resolve(config)


def _join_settings(
    arguments: Mapping[str, Any], settings: Sequence[str] | Mapping[str, Any]
) -> dict[str, Any]:
    named = {key: value for key, value in arguments.items() if value is not None}
    return named | parse_settings(settings)


def _defaults_of_texts(model: str) -> dict[str, Any]:
    pretrained = model.startswith(SENTENCE)
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


def names_batch_size(
    recipe: str | os.PathLike[str] | None,
    arguments: Mapping[str, Any],
    settings: Sequence[str] | Mapping[str, Any],
) -> bool:
    in_recipe = {} if recipe is None else read_yaml(recipe_path(recipe))
    return "batch_size" in in_recipe | _join_settings(arguments, settings)


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
    if method.detector is None and config.detector:
        raise UsageError(
            f"`detector.{next(iter(config.detector))}` is set, but {method} has no detector; write"
            f" the method as {method}+NAME"
        )
    framework, detector = method_arguments(config, written=True)
    has_captions, views = learns_from_text(config), config.views
    needed = FRAMEWORKS[method.framework].view_options
    for name, value in needed.items():
        if views.options.get(name, value) != value:
            raise UsageError(
                f"`views.options.{name}` (={views.options[name]!r}) must be {value!r} for"
                f" {config.method}; leave it out"
            )
    preset = views.preset or ("clip" if has_captions else "simclr")
    mild = CAPTION_VIEWS if views.preset is None and has_captions else {}
    options = {**mild, **views.options, **needed}
    parameters = inspect.signature(Views).parameters
    overrides = {name: value for name, value in options.items() if name not in parameters}
    augmentations(preset, views.size or LARGEST, overrides)  # refuses wrong options
    text = config.text
    if not has_captions:  # unused, and the same in all run folders
        text = text_settings(config, math.inf, LARGEST_CONTEXT)
    sections = {
        "head": head_settings(config),
        "optimizer": optimizer_settings(config),
        "text": text,
        "trainer": resolve_trainer(config.trainer),
        "views": views.model_copy(update={"preset": preset, "options": options}),
    }
    arguments = {"method": str(method), "framework": framework, "detector": detector}
    complete_config = config.model_copy(update=sections)
    return TrainConfig.of(complete_config.model_dump(mode="json") | arguments)


def method_arguments(
    config: TrainConfig, written: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    method, given = parse(config.method), config.framework
    name, settable = method.framework, framework_arguments(method)
    framework = check_arguments(FRAMEWORKS[name], settable, given, "framework", name, written)
    if method.detector is None:
        return framework, {}
    given, name = config.detector, method.detector
    settable = detector_arguments(method, given)
    detector = check_arguments(DETECTORS[name], settable, given, "detector", name, written)
    return framework, detector


Part = TypeVar("Part", bound=Section)


def complete(section: Part, defaults: Mapping[str, Any]) -> Part:
    missing = {name: value for name, value in defaults.items() if getattr(section, name) is None}
    return section.model_copy(update=missing)


def optimizer_settings(config: TrainConfig) -> OptimizerConfig:
    name = config.optimizer.name
    captions = CAPTION_ADAMW if name == "adamw" and learns_from_text(config) else {}
    return complete(config.optimizer, OPTIMIZERS[name] | captions)


def head_settings(config: TrainConfig) -> HeadConfig:
    options = FRAMEWORKS[parse(config.method).framework].head_options
    return complete(config.head, {"layers": 2, "last_norm": False, **options})


def text_settings(config: TrainConfig, num_captions: float, context: int) -> TextConfig:
    """The text tower that fits captions and device; CLIP's tokenizer for one of a package."""
    towers = TEXT_TOWERS[:2] if config.trainer.accelerator == "cpu" else TEXT_TOWERS
    if config.text.name != "transformer" or not learns_from_text(config):
        num_captions, context, towers = math.inf, LARGEST_CONTEXT, TEXT_TOWERS
    fits = next((tower for most, tower in towers if num_captions <= most), towers[-1][1])
    text = complete(config.text, {**fits, "context": context})
    assert text.width is not None
    heads = next((number for number in (8, 4, 2) if text.width % (32 * number) == 0), 1)
    return complete(text, {"heads": heads})


def fit_text(config: TrainConfig, samples: Samples) -> TrainConfig:
    if not learns_from_text(config) or samples.captions is None:
        return config
    captions = every_caption(samples, "train")
    words = sorted(len(each.split()) for each in itertools.islice(captions, COUNTED_CAPTIONS))
    number = len(words) + sum(1 for _ in captions)
    # a word is one or two tokens; start and end
    tokens = math.ceil(1.5 * words[int(0.99 * (len(words) - 1))]) + 2 if words else LARGEST_CONTEXT
    context = min(16 * math.ceil(tokens / 16), LARGEST_CONTEXT)
    return config.model_copy(update={"text": text_settings(config, number, context)})


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """For a resume from any working directory."""
    found: dict[str, Any] = {}
    for key, value in flat(config.model_dump(mode="json")).items():
        named = value.removeprefix(SENTENCE) if isinstance(value, str) else ""
        if key in ("model.name", "detector.features") and named != value and os.path.isdir(named):
            found[key] = SENTENCE + os.path.abspath(named)
        elif key in PATHS and value not in (None, PATCHES) and os.path.exists(value):
            found[key] = os.path.abspath(value)
    files = [os.path.abspath(name) if name.endswith(".py") else name for name in config.plugins]
    return config.with_settings({**found, "plugins": files})


def fit_to_data(config: TrainConfig, source: Source) -> TrainConfig:
    if contrasts_texts(config) != source.has_texts:
        raise UsageError(
            f"{source.name} is a table of text pairs, and {config.method} learns from images; give"
            " --method pairs, or pairs+glofnd"
            if source.has_texts
            else f"{config.method} learns from text pairs, and {source.name} has none; give a table"
            " (.csv, .tsv, .parquet) with the columns anchor and positive"
        )
    if source.has_texts:
        name, context = config.model.name, config.text.context
        if name == "auto":
            return config.with_settings({"model.name": "transformer"})
        if not name.startswith(SENTENCE):
            return config
        longest = sentence_tokenizer(sentence_transformer(name))[1]
        return config.with_settings({"text.context": min(context or longest, longest)})
    on_cpu = config.trainer.accelerator == "cpu"
    found = fit_size(config, source, CPU_LARGEST if on_cpu else LARGEST)
    is_small = found["views.size"] <= (CPU_CIFAR_STEM if on_cpu else CIFAR_STEM)
    found["model.stem"] = config.model.stem or ("cifar" if is_small else "imagenet")
    if config.model.name == "auto":
        found["model.name"] = "resnet10" if on_cpu else "resnet18"
        width = CPU_WIDTH if on_cpu and not is_small else None
        found["model.width"] = config.model.width or width
    method = parse(config.method)
    by_captions = "modality" in FRAMEWORKS[method.framework].guides
    has_guide = method.detector == "guide" and config.python.detector is None
    if has_guide and not by_captions and config.detector.get("features") is None:
        found["detector.features"] = PATCHES
    return config.with_settings(found)


def fit_size(config: TrainConfig, source: Source, largest: int = LARGEST) -> dict[str, Any]:
    side = typical_side(source) or LARGEST
    size = config.views.size or min(max(side, SMALLEST), largest)
    kept = config.data.image_size or min(math.ceil(size * 8 / 7), side)
    return {"views.size": size, "data.image_size": kept}


def fit_batch(config: TrainConfig, num_train: int, chosen: bool) -> TrainConfig:
    """Reduces a batch that is larger than the data. Unless the size is `chosen`, small data sets
    get a power of two with several steps per epoch."""
    processes, size = num_processes(config), config.batch_size
    if not chosen and num_train < FEW_SAMPLES:
        fits = 2 ** int(math.log2(max(num_train // STEPS_PER_EPOCH, 1)))
        size = min(size, max(SMALLEST_BATCH, fits))
    size = min(size, num_train // processes * processes)
    if size == config.batch_size or size < 2:  # one sample per process is refused by the loader
        return config
    if chosen:
        warn(
            f"`batch_size` (={config.batch_size}) is larger than the {num_train:,} training"
            f" samples; {size} is used"
        )
    return config.model_copy(update={"batch_size": size})


def learns_from_text(config: TrainConfig) -> bool:
    return "text" in FRAMEWORKS[parse(config.method).framework].modalities


def contrasts_texts(config: TrainConfig) -> bool:
    """The name of imported weights is no method."""
    framework = FRAMEWORKS.get(config.method.partition("+")[0])
    return framework is not None and "image" not in framework.modalities
