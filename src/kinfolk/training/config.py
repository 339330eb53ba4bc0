"""The configuration of a training, the reading of `section.key=value`, and the list of settings.

The docstring of a field is its description, for `kinfolk settings`, docs/settings.md and the
options of `kinfolk train`.
"""

from __future__ import annotations

import json
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
)
from pydantic.fields import FieldInfo

from kinfolk.errors import UsageError, did_you_mean
from kinfolk.training.documents import parse_yaml, read_yaml

WIDEST = 1 << 14


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


def _require_finite(value: Any) -> Any:
    """JSON would turn other numbers into null."""
    for number in value if isinstance(value, list | tuple) else (value,):
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError("Input should be a finite number")
    return value


Arguments = dict[str, Annotated[Any, AfterValidator(_require_finite)]]


def _split_name(value: Any) -> Any:
    return (() if value in ("", "none") else (value,)) if isinstance(value, str) else value


class DataConfig(Section):
    """Where the samples come from, and how they are stored."""

    source: str | None = None
    """Folder, array file, table, archive, shards, or the name of a bundled data set."""
    image_size: int | None = Field(default=None, ge=1)
    """Side of the cached images; null: 8/7 of `views.size`, or their own size if smaller."""
    labels_from_folders: bool | None = False
    """Use sub-folders as classes; null: for a folder of images, and the labels of other data."""
    exclude: str | None = None
    """Samples to leave out: a .csv with the column `key`."""
    image_column: str = "image"
    """Column of a table with the images."""
    label_column: str | None = None
    """Column with the labels; null: `label`, if there is one."""
    caption_column: str | None = None
    """Column with the captions; null: `caption`, if there is one."""
    anchor_column: str | None = None
    """Column of a table of text pairs with the anchors; null: `anchor`."""
    positive_column: str | None = None
    """Column with the positives of the anchors; null: `positive`."""
    pixel_cap: int = Field(default=50_000_000, ge=1)
    """Images with more pixels are refused, by their header, before they are decoded."""
    workers: int | None = Field(default=None, ge=0)
    """Processes that decode images; null: one per core."""
    streaming: bool = False
    """Read shards or files in every epoch, for data whose decoded pixels do not fit on a disk."""
    shuffle_buffer: int = Field(default=10_000, ge=1)
    """Samples of consecutive shards that are shuffled together when streaming."""
    cache_dir: str | None = None
    """Folder of decoded pixels; null: memory, or the run folder if memory is too small."""


class ViewsConfig(Section):
    """How the views of an image are made."""

    preset: str | None = None
    """Set of augmentations, see the page Data; null: simclr, and for captions clip with crops from
    half the image and flips."""
    size: int | None = Field(default=None, ge=1)
    """Side in pixels; null: that of the images, from 16 to 224, at most 64 on a CPU."""
    options: Arguments = Field(default_factory=dict)
    """Single settings of the preset to replace, as in `views.options.blur=0`."""


class ModelConfig(Section):
    """The encoder."""

    name: str = "auto"
    """resnet10 to resnet152, timm/NAME or torchvision/NAME; auto: resnet18, on a CPU resnet10. For
    text pairs: transformer (auto), or st/NAME of sentence-transformers."""
    stem: Literal["cifar", "imagenet"] | None = None
    """First layers of a ResNet; null: cifar for views up to 64 pixels, on a CPU up to 40."""
    width: int | None = Field(default=None, ge=1, le=WIDEST)
    """Channels of the first stage of a ResNet, at most 512; null: 64, or 16 for resnet10 (32 on a
    CPU with the imagenet stem)."""
    pretrained: bool = False
    """Start from the published weights of timm or torchvision."""
    init: str | None = None
    """File of initial weights: .safetensors, or a state dict."""


class TextConfig(Section):
    """The tokenizer and the text tower, for methods that learn from captions."""

    name: str = "transformer"
    """transformer, open_clip/NAME or st/NAME."""
    layers: int | None = Field(default=None, ge=1, le=1000)
    """Layers of the transformer; null: 1 for up to 100,000 captions, 4 for up to a million and on a
    CPU, else 12."""
    width: int | None = Field(default=None, ge=1, le=WIDEST)
    """Width of the transformer; null: 128, 256 or 512, by the same rule."""
    heads: int | None = Field(default=None, ge=1)
    """Attention heads of each layer; null: up to 8, each at least 32 wide."""
    causal: bool = True
    """Whether a token attends to earlier tokens only."""
    pretrained: bool = False
    """Start from the published weights."""
    context: int | None = Field(default=None, ge=4)
    """Largest number of tokens of a text, with start and end; null: fits 99 % of the captions, at
    most 77."""
    vocab_size: int | None = Field(default=None, ge=259)
    """Largest number of tokens that the tokenizer learns; null: 4,096, 16,384 or 49,408, by the
    rule of `text.layers`."""
    tokenizer: str | None = None
    """A tokenizer.json; null: learned from the training captions."""


class HeadConfig(Section):
    """The projection head on top of the encoder."""

    hidden_size: int | None = Field(default=None, ge=1, le=WIDEST)
    """Width of hidden layers; null: that of the features."""
    out_size: int = Field(default=128, ge=1, le=WIDEST)
    """Size of the embeddings that the loss compares."""
    layers: int | None = Field(default=None, ge=0)
    """Linear layers; with 0 the loss compares the features themselves; null: 1 for captions, 3 for
    rcl and nnclr, else 2."""
    norm: bool = True
    """BatchNorm after each hidden layer."""
    second: bool = False
    """Attract false negatives on a second head of the same size."""
    last_norm: bool | None = None
    """BatchNorm after the last layer, too; null: true for rcl and nnclr, else false."""
    last_affine: bool = True
    """Whether that last BatchNorm has weight and bias."""


class OptimizerConfig(Section):
    """The optimiser and its learning-rate schedule."""

    name: Literal["sgd", "lars", "adamw"] = "adamw"
    """The optimiser."""
    lr: float | None = Field(default=None, gt=0)
    """Learning rate before scaling; null: 0.003 for adamw, with captions 0.001, and 0.03 for sgd
    and lars."""
    lr_scaling: Literal["none", "linear", "sqrt"] | None = None
    """Scaling with the batch size: linear is lr·batch/256, sqrt is lr·√batch; null: none for adamw,
    linear for sgd and lars."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of sgd and lars."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Both decay rates of adamw."""
    nesterov: bool = False
    """Nesterov's momentum, for sgd."""
    trust: float = Field(default=0.001, gt=0)
    """Trust coefficient of lars."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay, none for biases and norms; null: 0.01 for adamw, with captions 0.1, and 0.0005
    for sgd and lars."""
    schedule: Literal["cosine", "steps", "constant"] = "cosine"
    """How the learning rate changes after the warm-up."""
    warmup_epochs: float | None = Field(default=None, ge=0)
    """Epochs in which the learning rate rises from 0; null: 0, with captions 1."""
    milestones: tuple[float, ...] = ()
    """Epochs at which the learning rate falls, with `optimizer.schedule=steps`."""
    factor: float = Field(default=0.1, gt=0)
    """Factor by which the learning rate is multiplied at each milestone."""


class TrainerConfig(Section):
    """Devices, precision, and the loggers."""

    accelerator: Literal["auto", "cuda", "gpu", "mps", "cpu"] = "auto"
    """cuda, mps or cpu; auto: the best available."""
    precision: Annotated[
        Literal["auto", "32", "32-true", "bf16", "bf16-mixed", "16", "16-mixed"],
        BeforeValidator(lambda value: str(value) if type(value) is int else value),
    ] = "auto"
    """32, bf16-mixed or 16-mixed; auto: bf16-mixed where the hardware supports it, else 32."""
    matmul_precision: Literal["auto", "highest", "high", "medium"] = "auto"
    """Products of float32 matrices: highest is float32, high TF32, medium bf16; auto: high with
    bf16 or 16 bits."""
    devices: int | Literal["auto"] = "auto"
    """Devices of each machine."""
    num_nodes: int = Field(default=1, ge=1)
    """Number of machines."""
    accumulate: int = Field(default=1, ge=1)
    """Batches for each step of the optimiser; adds no negatives."""
    chunk_size: int | None = Field(default=None, ge=1)
    """Samples per device whose activations are held at a time (GradCache); null: all."""
    channels_last: bool = True
    """Memory layout of views and encoder."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the loss with torch.compile; auto: on a GPU."""
    compile_encoder: bool | Literal["auto"] = "auto"
    """Compile the encoder with torch.compile; auto: on a GPU where Triton is installed."""
    sync_batchnorm: bool | Literal["auto"] = "auto"
    """BatchNorm over the global batch of all devices; auto: with several GPUs."""
    timeout_minutes: float = Field(default=240, gt=0)
    """How long ranks wait for each other before the training fails."""
    gradient_clip: float | None = Field(default=None, gt=0)
    """Largest norm of the gradient; null: it is not clipped."""
    loggers: Annotated[
        tuple[Literal["tensorboard", "wandb", "mlflow"], ...], BeforeValidator(_split_name)
    ] = ("tensorboard",)
    """Loggers next to metrics.jsonl; none for no logger."""
    log_every: int = Field(default=10, ge=1)
    """Steps between two entries in the loggers."""


class KnnConfig(Section):
    """The nearest-neighbour accuracy measured during training, where there are labels."""

    every: int = Field(default=1, ge=0)
    """Epochs between two measurements; 0: never."""
    k: int = Field(default=20, ge=1)
    """Number of neighbours."""
    temperature: float = Field(default=0.1, gt=0)
    """Temperature of the votes."""
    max_samples: int = Field(default=20_000, ge=1)
    """Largest number of training samples that vote."""
    nmi_seeds: int = Field(default=0, ge=0)
    """Number of k-means runs whose NMI with the labels is measured."""
    nmi_normaliser: Literal["arithmetic", "geometric", "min", "max"] = "arithmetic"
    """Divisor of NMI: a mean of the two entropies, the smaller or the larger one."""


class CheckpointConfig(Section):
    """When a checkpoint is saved. The end of the training and an interruption always save one."""

    every_epochs: int = Field(default=1, ge=1)
    """Epochs between two checkpoints."""
    every_minutes: float | None = Field(default=10, gt=0)
    """Minutes between two checkpoints within an epoch; null: none."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep: last.ckpt, last-1.ckpt, …"""


class PythonConfig(Section):
    """Objects that were passed to `kf.train` instead of a name, by their class. Set by
    `kf.train`."""

    model: str | None = None
    """Class of the encoder."""
    detector: str | None = None
    """Class of the detector."""
    action: Literal["eliminate", "attract", "reweight"] | None = None
    """Action of that detector."""


REMOVED = {
    "snapshots": False,
    "checkpoint.best": False,
    "trainer.strategy": False,
    "trainer.cudnn_benchmark": False,
    "data.hierarchy": False,
    "data.depth": True,
    "data.group_column": True,
    "data.split_column": True,
}
"""Settings of earlier versions, which run folders may have; whether they determined the result."""


class TrainConfig(Section):
    """All settings of a training.

    Example:
        >>> config = TrainConfig().with_settings(["optimizer.lr=0.1", "epochs=3"])
        >>> config.optimizer.lr, config.epochs
        (0.1, 3)
    """

    method: str = "simclr"
    """`framework[+detector[:variant][:action]]`; `kinfolk methods` lists them."""
    epochs: int = Field(default=100, ge=1)
    """Epochs of the whole training; 30 on a CPU if it is not given."""
    batch_size: int = Field(default=256, ge=2)
    """Samples of a batch over all devices; less for small data sets if it is not given."""
    seed: int = 0
    """Seed of weights, order, views and all other draws."""
    data: DataConfig = DataConfig()
    views: ViewsConfig = ViewsConfig()
    model: ModelConfig = ModelConfig()
    text: TextConfig = TextConfig()
    head: HeadConfig = HeadConfig()
    framework: Arguments = Field(default_factory=dict)
    """Arguments of the framework, as in `framework.temperature=0.2`; see its page."""
    detector: Arguments = Field(default_factory=dict)
    """Arguments of the detector, as in `detector.alpha=0.01`; see its page."""
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    knn: KnnConfig = KnnConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    plugins: Annotated[tuple[str, ...], BeforeValidator(_split_name)] = ()
    """Modules or .py files that register detectors and frameworks."""
    python: PythonConfig = PythonConfig()
    _removed: dict[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def of(cls, document: Mapping[str, Any], where: str = "the configuration") -> TrainConfig:
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise UsageError(validation_message(error, model=cls, where=where)) from None

    @classmethod
    def of_stored(cls, document: Mapping[str, Any], where: str) -> TrainConfig:
        """As `of`, for a document that an earlier version may have written."""
        kept, removed = dict(document), dict[str, Any]()
        for name in REMOVED:
            section, _, key = name.rpartition(".")
            place = kept.get(section) if section else kept
            if isinstance(place, Mapping) and key in place:
                removed[name] = place[key]
                rest = {other: value for other, value in place.items() if other != key}
                kept = {**kept, section: rest} if section else rest
        config = cls.of(kept, where)
        config._removed = {name: value for name, value in removed.items() if REMOVED[name]}
        return config

    @property
    def removed(self) -> Mapping[str, Any]:
        """Settings of an earlier version that are ignored and belong to the digest."""
        return self._removed

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TrainConfig:
        """Reads a YAML file and imports its plugins. A plugin file next to it is refused: opening a
        run folder never runs code that came with it."""
        from kinfolk.plugins import load_plugins

        document, folder = read_yaml(Path(path)), Path(path).resolve().parent
        config = cls.of_stored(document, str(path))
        for name in config.plugins:
            is_absolute = Path(name).is_absolute()
            is_near = not is_absolute or Path(name).resolve().is_relative_to(folder)
            if name.endswith(".py") and is_near:
                raise UsageError(
                    f"the plugin `{name}` of {path} is not imported, because it may have come with"
                    " that folder; keep plugins elsewhere"
                )
        load_plugins(config.plugins)
        return config

    def with_settings(self, settings: Sequence[str] | Mapping[str, Any]) -> TrainConfig:
        """A copy with `{"detector.alpha": 0.02}` or `["detector.alpha=0.02"]` (values are YAML)."""
        document = self.model_dump(mode="json")
        for key, value in parse_settings(settings).items():
            *path, last = key.split(".")
            place = document
            for part in path:
                if not isinstance(place.get(part), dict):
                    place[part] = {}
                place = place[part]
            if isinstance(place.get(last), dict) and isinstance(value, Mapping):
                value = {**place[last], **value}
            place[last] = value
        return type(self).of(document, "the settings")

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def parse_settings(settings: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(settings, Mapping):
        return dict(settings)
    parsed: dict[str, Any] = {}
    for setting in [settings] if isinstance(settings, str) else settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals or not key:
            raise UsageError(
                "a setting must have the form KEY=VALUE, as in optimizer.lr=0.1; received"
                f" {setting!r}"
            )
        try:
            value = parse_yaml(text)
        except yaml.YAMLError:
            raise UsageError(
                f"the value of `{key}` cannot be read: {text!r}; quote special characters"
            ) from None
        # 1e-3 is a string in YAML 1.1
        if isinstance(value, str) and re.fullmatch(r"\d+\.?\d*[eE][+-]?\d+", value):
            value = float(value)
        parsed[key] = value
    return parsed


REQUIRED_FILES = {
    "detector.pairs": "give the file of pairs with --known-kin FILE, such as pairs.parquet of"
    " `kinfolk audit`"
}


def validation_message(
    error: ValidationError,
    prefix: str = "",
    model: type[BaseModel] | None = None,
    where: str = "",
) -> str:
    """The first error as a sentence: "`optimizer.lr` (=-1) must be greater than 0". Unknown keys of
    `model`, read from `where`, come first."""
    errors = error.errors(include_url=False)
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    parts = [str(part) for part in first["loc"] if part not in ("int", "float")]
    place = prefix + ".".join(part for part in parts if not part.startswith("literal"))
    if first["type"] == "missing":
        how = REQUIRED_FILES.get(place, f"set it with `{place}=VALUE`")
        return f"`{place}` is required and was not given; {how}"
    if first["type"] == "extra_forbidden" and model is not None:
        *path, key = map(str, first["loc"])
        for part in path:
            model = section_of(model.model_fields[part])
            assert model is not None
        inner = [setting.key for setting in _settings(model) if "." in setting.key]
        return f"unknown key `{place}` in {where}{suggest(key, model.model_fields, inner)}"
    if first["type"] == "model_type":
        return f"`{place}` (={first['input']!r}) is a section; give a mapping of its keys"
    message = first["msg"].removeprefix("Value error, ")
    joint = " must be" if message.startswith("Input should be ") else ":"
    return f"`{place}` (={first['input']!r}){joint} {message.removeprefix('Input should be ')}"


def suggest(name: str, valid: Iterable[str], also: Iterable[str] = ()) -> str:
    valid = list(valid)
    inner = [other for other in also if other.split(".")[-1] == name]
    hint = f"; did you mean {' or '.join(inner)}?" if inner else did_you_mean(name, [*valid, *also])
    return f"{hint or '.'} Valid: {', '.join(valid) or 'none'}"


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


@dataclass(frozen=True)
class Setting:
    """A key of the configuration, with its type in words and its default as YAML."""

    key: str
    type: str
    default: str
    description: str

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]


def list_settings(prefix: str = "") -> list[Setting]:
    """All settings whose key begins with `prefix`.

    Example:
        >>> [setting.key for setting in list_settings("checkpoint.every")]
        ['checkpoint.every_epochs', 'checkpoint.every_minutes']
    """
    every = list(_settings(TrainConfig))
    found = [setting for setting in every if setting.key.startswith(prefix)]
    if not found:
        names = [*filter(None, sections()), *(each.key for each in every)]
        raise UsageError(f"there is no setting `{prefix}`{suggest(prefix, names[:18], names)}")
    return found


def sections() -> dict[str, str]:
    """The sections with their docstrings; the settings of none come first."""
    found = {name: section_of(field) for name, field in TrainConfig.model_fields.items()}
    return {"": "The method and the length of the training."} | {
        name: " ".join((kind.__doc__ or "").split()) for name, kind in found.items() if kind
    }


def _settings(model: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    fields = model.model_fields.items()
    for name, field in sorted(fields, key=lambda item: section_of(item[1]) is not None):
        section = section_of(field)
        if section is not None:
            yield from _settings(section, f"{prefix}{name}.")
        else:
            default = json.dumps(field.get_default(call_default_factory=True))
            about = " ".join((field.description or "").split())
            yield Setting(f"{prefix}{name}", describe_type(field), default, about)


TYPES = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    dict: "mapping",
    type(None): "null",
}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def describe_type(field: FieldInfo) -> str:
    """The type in words, such as "number or null, > 0"."""
    signs = ((rule, name) for rule in field.metadata for name in BOUNDS if hasattr(rule, name))
    bounds = " and ".join(f"{BOUNDS[name]} {getattr(rule, name):g}" for rule, name in signs)
    return _join(_choices(field.annotation)) + (f", {bounds}" if bounds else "")


def _choices(kind: Any) -> list[str]:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return [str(part) for part in parts]
    if origin in (typing.Union, types.UnionType):
        return [choice for part in parts for choice in _choices(part)]
    if origin is tuple:
        number = "list" if parts[-1] is Ellipsis else f"{len(parts)} values"
        return [f"{number}, each {_join(_choices(parts[0]))}"]
    return [TYPES[origin or kind]]


def _join(choices: Sequence[str]) -> str:
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last
