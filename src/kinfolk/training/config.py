"""The configuration of a training: its sections with their fields and defaults, and the reading of `section.key=value`.

Unknown keys are refused with the nearest valid ones. The whole configuration, defaults included, is written to config.yaml.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kinfolk.errors import UsageError, did_you_mean
from kinfolk.plugins import load_plugins
from kinfolk.training.documents import parse_yaml, read_yaml


class Section(BaseModel):
    """Abstract. A part of the configuration. Unknown keys are refused, and values do not change after construction."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class DataConfig(Section):
    """Where the samples come from, and how they are stored."""

    source: str | None = Field(default=None, description="folder, array file, table, archive or the name of a bundled data set")
    image_size: int | None = Field(
        default=None, ge=1, description="side of the cached images; None: 8/7 of `views.size`, or their own size if that is smaller"
    )
    labels_from_folders: bool = Field(default=False, description="class sub-folders become labels")
    hierarchy: str | None = Field(default=None, description="file of child and parent classes, or cifar100; with `depth`")
    depth: int | None = Field(default=None, ge=0, description="labels become their ancestors at this depth of `hierarchy`; 0: the root")
    image_column: str = "image"
    label_column: str | None = Field(
        default=None, description="for this and the next three: None uses the column of that name if there is one"
    )
    caption_column: str | None = None
    group_column: str | None = None
    split_column: str | None = None
    pixel_cap: int = Field(default=50_000_000, ge=1, description="images with more pixels are refused by their header")
    workers: int | None = Field(default=None, ge=0, description="decoding processes; None: one per core")
    streaming: bool = Field(
        default=False,
        description="read shards or files in every epoch instead of keeping all pixels decoded: for data larger than the disk",
    )
    shuffle_buffer: int = Field(default=10_000, ge=1, description="samples of consecutive shards that are shuffled together when streaming")
    cache_dir: str | None = Field(
        default=None, description="folder of the pixel cache; None: memory, or the run folder if memory is too small"
    )


class ViewsConfig(Section):
    """How the views of an image are made; `options` override single settings of the preset."""

    preset: str = "simclr"
    size: int | None = Field(default=None, ge=1, description="None: that of the images, from 16 to 224; at most 64 on a CPU")
    options: dict[str, Any] = Field(default_factory=dict)


class ModelConfig(Section):
    """The encoder."""

    name: str = Field(default="auto", description="auto: resnet18, or resnet10 on a CPU")
    stem: Literal["cifar", "imagenet"] | None = Field(default=None, description="None: cifar up to 64 pixels, on a CPU up to 40")
    width: int | None = Field(default=None, ge=1, description="channels of the first stage; None: the usual number")
    pretrained: bool = False
    init: str | None = Field(default=None, description="file of initial weights: .safetensors or a state dict")


class TextConfig(Section):
    """The tokenizer and the text tower, for methods that learn from captions; the defaults are CLIP's."""

    name: str = "transformer"
    layers: int = Field(default=12, ge=1)
    width: int = Field(default=512, ge=1)
    heads: int = Field(default=8, ge=1)
    causal: bool = True
    pretrained: bool = False
    context: int = Field(default=77, ge=4, description="largest number of tokens of a text, start and end included")
    vocab_size: int = Field(default=49408, ge=259, description="largest number of tokens that the tokenizer learns")
    tokenizer: str | None = Field(default=None, description="a tokenizer.json; None: learnt from the training captions")


class HeadConfig(Section):
    """The projection head on top of the encoder."""

    hidden_size: int | None = Field(default=None, ge=1, description="None: the encoder's output size")
    out_size: int = Field(default=128, ge=1)
    layers: int = Field(default=2, ge=0, description="0: no head, the loss compares the output of the encoder")
    norm: bool = True
    second: bool = Field(default=False, description="whether kin are attracted on a head of their own, of the same size")
    last_norm: bool = False
    last_affine: bool = Field(default=True, description="whether the last norm has weight and bias")


class OptimizerConfig(Section):
    """The optimiser and its learning-rate schedule."""

    name: Literal["sgd", "lars", "adamw"] = "sgd"
    lr: float = Field(default=0.03, gt=0, description="before scaling")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(default="linear", description="linear: lr·batch/256; sqrt: lr·√batch")
    momentum: float = Field(default=0.9, ge=0, lt=1)
    betas: tuple[float, float] = (0.9, 0.999)
    nesterov: bool = False
    trust: float = Field(default=0.001, gt=0, description="LARS's trust coefficient")
    weight_decay: float = Field(default=5e-4, ge=0)
    schedule: Literal["cosine", "steps", "constant"] = "cosine"
    warmup_epochs: float = Field(default=0, ge=0)
    milestones: tuple[float, ...] = Field(default=(), description="epochs at which the rate falls, for `steps`")
    factor: float = Field(default=0.1, gt=0, description="what the rate is multiplied by at a milestone")


class TrainerConfig(Section):
    """Settings of the Lightning trainer, and the loggers."""

    accelerator: str = "auto"
    precision: str = Field(default="auto", description="auto: bf16-mixed where the hardware supports it, else 32 bits")
    devices: int | Literal["auto"] = "auto"
    num_nodes: int = Field(default=1, ge=1)
    strategy: str = "auto"
    accumulate: int = Field(default=1, ge=1, description="batches for each optimiser step; adds no negatives")
    chunk_size: int | None = Field(
        default=None,
        ge=1,
        description="samples per device whose activations are held at a time (GradCache); the loss is that of the whole batch",
    )
    channels_last: bool = True
    compile: bool | Literal["auto"] = Field(default="auto", description="compile the loss with torch.compile; auto: on a GPU")
    compile_encoder: bool | Literal["auto"] = Field(
        default="auto", description="compile the encoder with torch.compile; auto: on a GPU where Triton is installed"
    )
    cudnn_benchmark: bool = Field(default=True, description="let cuDNN try its algorithms on the first batches; CUDA only")
    sync_batchnorm: bool | Literal["auto"] = Field(
        default="auto", description="BatchNorm over the joined batch of all devices; auto: with several GPUs"
    )
    timeout_minutes: float = Field(
        default=240, gt=0, description="how long ranks wait for each other before the training fails, for example during clustering"
    )
    gradient_clip: float | None = Field(default=None, gt=0)
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    log_every: int = Field(default=10, ge=1, description="steps between two entries in the loggers")

    @field_validator("loggers", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        """A single logger may be given by its name, and `none` or an empty name for no logger."""
        return (() if value in ("", "none") else (value,)) if isinstance(value, str) else value


class KnnConfig(Section):
    """The nearest-neighbour accuracy measured during training, where there are labels."""

    every: int = Field(default=1, ge=0, description="epochs between two measurements; 0: never")
    k: int = Field(default=20, ge=1)
    temperature: float = Field(default=0.1, gt=0)
    max_samples: int = Field(default=20_000, ge=1, description="largest number of training samples in the bank")
    nmi_seeds: int = Field(default=0, ge=0, description="number of k-means runs whose NMI with the labels is measured")
    nmi_normaliser: Literal["arithmetic", "geometric", "min", "max"] = Field(
        default="arithmetic", description="what each NMI is divided by: a mean of the two entropies, the smaller or the larger one"
    )


class CheckpointConfig(Section):
    """When a checkpoint is saved. The end of the training and an interruption always save one."""

    every_epochs: int = Field(default=1, ge=1)
    every_minutes: float | None = Field(
        default=10, gt=0, description="between two checkpoints within an epoch; None: only at the end of epochs"
    )
    keep: int = Field(default=2, ge=1, description="number of newest checkpoints to keep: last.ckpt, last-1.ckpt, …")
    best: bool = Field(default=False, description="also keep best.ckpt, the checkpoint of the epoch with the highest kNN accuracy")


class SnapshotConfig(Section):
    """Embeddings of a few training samples at a few epochs, for the maps of the report."""

    epochs: int = Field(default=4, ge=0, description="number of snapshots, from the first epoch to the last; 0: none")
    samples: int = Field(default=1000, ge=1, description="samples per snapshot")


class PythonConfig(Section):
    """Objects that were passed to `kf.train` instead of a name, by their class."""

    model: str | None = None
    detector: str | None = None
    action: Literal["eliminate", "attract", "reweight"] | None = Field(default=None, description="action of that detector")


class TrainConfig(Section):
    """All settings of a training.

    Example:
        >>> config = TrainConfig().with_settings(["optimizer.lr=0.1", "epochs=3"])
        >>> config.optimizer.lr, config.epochs
        (0.1, 3)
    """

    method: str = "simclr"
    epochs: int = Field(default=100, ge=1, description="without a value: 30 on a CPU")
    batch_size: int = Field(default=256, ge=2, description="over all devices together; without a value: less for small data sets")
    seed: int = 0
    data: DataConfig = DataConfig()
    views: ViewsConfig = ViewsConfig()
    model: ModelConfig = ModelConfig()
    text: TextConfig = TextConfig()
    head: HeadConfig = HeadConfig()
    framework: dict[str, Any] = Field(default_factory=dict)
    detector: dict[str, Any] = Field(default_factory=dict)
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    knn: KnnConfig = KnnConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    snapshots: SnapshotConfig = SnapshotConfig()
    plugins: tuple[str, ...] = Field(default=(), description="modules or .py files that register own detectors and frameworks")
    python: PythonConfig = PythonConfig()

    @field_validator("plugins", mode="before")
    @classmethod
    def _one_plugin(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @classmethod
    def of(cls, document: Mapping[str, Any], where: str = "the configuration") -> TrainConfig:
        """Checks a nested mapping and raises a one-sentence error for the first invalid value."""
        refuse_unknown(document, cls, where)
        refuse_not_finite(document)
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise UsageError(validation_message(error)) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TrainConfig:
        """Reads a YAML file, such as the config.yaml of a run, and imports its plugins.

        A plugin file that lies beside the configuration is refused: opening a run folder never runs code that came with it.
        """
        config, folder = cls.of(read_yaml(Path(path)), str(path)), Path(path).resolve().parent
        for name in config.plugins:
            if name.endswith(".py") and (not Path(name).is_absolute() or Path(name).resolve().is_relative_to(folder)):
                raise UsageError(
                    f"the plugin `{name}` of {path} is not imported, because it may have come with that folder; keep plugins elsewhere"
                )
        load_plugins(config.plugins)
        return config

    def with_settings(self, settings: Sequence[str] | Mapping[str, Any]) -> TrainConfig:
        """A copy with `section.key` set to a value: `["detector.alpha=0.02"]` (values are YAML) or `{"detector.alpha": 0.02}`."""
        document = self.model_dump(mode="json")
        for key, value in parse_settings(settings).items():
            *path, last = key.split(".")
            place = document
            for part in path:
                inner = place.setdefault(part, {})
                if not isinstance(inner, dict):
                    raise UsageError(f"`{key}` cannot be set: `{part}` is not a section but a single setting")
                place = inner
            if isinstance(place.get(last), dict):
                if not isinstance(value, Mapping):
                    raise UsageError(f"`{key}` is a section; set one of its keys, as in `{key}.KEY=VALUE`")
                value = {**place[last], **value}
            place[last] = value
        return type(self).of(document, "the settings")

    def to_yaml(self) -> str:
        """The whole configuration, defaults included, in the order of the fields."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def parse_settings(settings: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """`["optimizer.lr=0.1"]` → `{"optimizer.lr": 0.1}`; values are YAML, so lists, true and null work."""
    if isinstance(settings, Mapping):
        return dict(settings)
    if isinstance(settings, str):
        settings = [settings]
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"a setting must have the form KEY=VALUE, as in optimizer.lr=0.1; received {setting!r}")
        try:
            parsed[key.strip()] = _number(parse_yaml(text))
        except yaml.YAMLError:
            raise UsageError(f"the value of `{key.strip()}` cannot be read: {text!r}; quote it if it holds special characters") from None
    return parsed


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-3 as a string."""
    if not isinstance(value, str) or not value[:1].isdigit():
        return value
    try:
        return float(value)
    except ValueError:
        return value


def suggest(name: str, valid: Iterable[str], also: Iterable[str] = ()) -> str:
    """The end of a message about an unknown name: the nearest of `valid` and `also`, and the list of all valid names."""
    valid = list(valid)
    inner = [other for other in also if other.split(".")[-1] == name]
    hint = f"; did you mean {' or '.join(inner)}?" if inner else did_you_mean(name, [*valid, *also]) or "."
    return f"{hint} Valid: {', '.join(valid) if valid else 'none'}"


def refuse_unknown(document: Mapping[str, Any], model: type[BaseModel], where: str, prefix: str = "") -> None:
    """Raises for the first key that `model` or one of its sections does not have."""
    fields = model.model_fields
    for key, value in document.items():
        if key not in fields:
            raise UsageError(f"unknown key `{prefix}{key}` in {where}{suggest(str(key), fields, _inner_keys(model))}")
        section = fields[key].annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            if not isinstance(value, Mapping):
                raise UsageError(f"`{prefix}{key}` (={value!r}) is a section with the keys {', '.join(section.model_fields)}")
            refuse_unknown(value, section, where, f"{prefix}{key}.")


def refuse_not_finite(document: Mapping[str, Any], prefix: str = "") -> None:
    """Raises for a number that is not finite, in any section: JSON would turn it into null."""
    for key, value in document.items():
        if isinstance(value, Mapping):
            refuse_not_finite(value, f"{prefix}{key}.")
        elif any(isinstance(each, float) and not math.isfinite(each) for each in (value if isinstance(value, list | tuple) else (value,))):
            raise UsageError(f"`{prefix}{key}` (={value}) must be a finite number")


REQUIRED_FILES = {"detector.pairs": "give the file of pairs with --known-kin FILE, such as pairs.parquet of `kinfolk audit`"}


def validation_message(error: ValidationError, prefix: str = "") -> str:
    """The first error of a validation as a sentence: "`optimizer.lr` (=-1) must be greater than 0"."""
    first = error.errors(include_url=False)[0]
    place = prefix + ".".join(str(part) for part in first["loc"] if part not in ("int", "float") and not str(part).startswith("literal"))
    if first["type"] == "missing":
        how = REQUIRED_FILES.get(place, f"set it with `{place}=VALUE`")
        return f"`{place}` is required and was not given; {how}"
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return (
        f"`{place}` (={first['input']!r}) must be {message}"
        if "Input should be" in first["msg"]
        else f"`{place}` (={first['input']!r}): {message}"
    )


def _inner_keys(model: type[BaseModel]) -> list[str]:
    """`section.key` of all sections, to suggest the section of a key that was given without it."""
    sections = ((name, field.annotation) for name, field in model.model_fields.items())
    return [
        f"{name}.{key}"
        for name, section in sections
        if isinstance(section, type) and issubclass(section, BaseModel)
        for key in section.model_fields
    ]
