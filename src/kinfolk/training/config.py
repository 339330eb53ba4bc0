"""The configuration of a training: its sections with their fields and defaults, and the reading of
`section.key=value`.

Unknown keys are refused with the nearest valid ones. The whole configuration, defaults included, is
written to config.yaml.
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

WIDEST = 1 << 14
"""The largest width of a network; more is a slip, and would ask for all memory."""


class Section(BaseModel):
    """Abstract. A part of the configuration. Unknown keys are refused, and values do not change
    after construction."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


class DataConfig(Section):
    """Where the samples come from, and how they are stored."""

    source: str | None = Field(
        default=None,
        description=(
            "Folder, array file, table, archive, shards, or the name of a bundled data set."
        ),
    )
    image_size: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Side of the cached images; null: 8/7 of `views.size`, or their own size if smaller."
        ),
    )
    labels_from_folders: bool | None = Field(
        default=False,
        description=(
            "Use sub-folders as classes; null: in a folder of images, and other data by their"
            " labels."
        ),
    )
    exclude: str | None = Field(
        default=None,
        description="Samples to leave out: a .csv with the column `key`, or a .txt of keys.",
    )
    hierarchy: str | None = Field(
        default=None,
        description="File of child and parent classes, or cifar100; used with `depth`.",
    )
    depth: int | None = Field(
        default=None,
        ge=0,
        description=(
            "Replace labels by their ancestors at this depth of `hierarchy`; 0 is the root."
        ),
    )
    image_column: str = Field(default="image", description="Column of a table with the images.")
    label_column: str | None = Field(
        default=None, description="Column with the labels; null: `label`, if there is one."
    )
    caption_column: str | None = Field(
        default=None, description="Column with the captions; null: `caption`, if there is one."
    )
    anchor_column: str | None = Field(
        default=None,
        description="Column of a table of text pairs with the anchors; null: `anchor`.",
    )
    positive_column: str | None = Field(
        default=None, description="Column with the positives of the anchors; null: `positive`."
    )
    group_column: str | None = Field(
        default=None,
        description=(
            "Column with groups of samples that are never negatives of each other; null: `group`."
        ),
    )
    split_column: str | None = Field(
        default=None, description="Column with the splits; null: `split`, if there is one."
    )
    pixel_cap: int = Field(
        default=50_000_000, ge=1, description="Images with more pixels are refused by their header."
    )
    workers: int | None = Field(
        default=None, ge=0, description="Processes that decode images; null: one per core."
    )
    streaming: bool = Field(
        default=False,
        description=(
            "Read shards or files in every epoch, for data whose pixels are larger than the disk."
        ),
    )
    shuffle_buffer: int = Field(
        default=10_000,
        ge=1,
        description="Samples of consecutive shards that are shuffled together when streaming.",
    )
    cache_dir: str | None = Field(
        default=None,
        description=(
            "Folder of decoded pixels; null: memory, or the run folder if memory is too small."
        ),
    )


class ViewsConfig(Section):
    """How the views of an image are made."""

    preset: str | None = Field(
        default=None,
        description=(
            "Set of augmentations, see the page Data; null: simclr, and for captions clip with"
            " crops from half the image and flips."
        ),
    )
    size: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Side in pixels; null: that of the images, from 16 to 224, at most 64 on a CPU."
        ),
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Single settings of the preset to replace, as in `views.options.blur=0`.",
    )


class ModelConfig(Section):
    """The encoder."""

    name: str = Field(
        default="auto",
        description=(
            "resnet10 to resnet152, timm/NAME or torchvision/NAME; auto: resnet18, on a CPU"
            " resnet10. Of text pairs: transformer (auto), or st/NAME of sentence-transformers."
        ),
    )
    stem: Literal["cifar", "imagenet"] | None = Field(
        default=None,
        description=(
            "First layers of a ResNet; null: cifar for views up to 64 pixels, on a CPU up to 40."
        ),
    )
    width: int | None = Field(
        default=None,
        ge=1,
        le=WIDEST,
        description="Channels of the first stage of a ResNet; null: 64, or 16 for resnet10.",
    )
    pretrained: bool = Field(
        default=False, description="Start from the published weights of timm or torchvision."
    )
    init: str | None = Field(
        default=None, description="File of initial weights: .safetensors, or a state dict."
    )


class TextConfig(Section):
    """The tokenizer and the text tower, for methods that learn from captions."""

    name: str = Field(
        default="transformer", description="transformer, open_clip/NAME or huggingface/NAME."
    )
    layers: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description=(
            "Layers of the transformer; null: 1 for up to 100,000 captions, 4 for up to a million"
            " and on a CPU, else 12."
        ),
    )
    width: int | None = Field(
        default=None,
        ge=1,
        le=WIDEST,
        description="Width of the transformer; null: 128, 256 or 512, by the same rule.",
    )
    heads: int | None = Field(
        default=None,
        ge=1,
        description="Attention heads of each layer; null: up to 8, each at least 32 wide.",
    )
    causal: bool = Field(
        default=True, description="Whether a token attends to earlier tokens only."
    )
    pretrained: bool = Field(default=False, description="Start from the published weights.")
    context: int | None = Field(
        default=None,
        ge=4,
        description=(
            "Largest number of tokens of a text, with start and end; null: fits 99 % of the"
            " captions, at most 77."
        ),
    )
    vocab_size: int | None = Field(
        default=None,
        ge=259,
        description=(
            "Largest number of tokens that the tokenizer learns; null: 4,096, 16,384 or 49,408,"
            " by the rule of `text.layers`."
        ),
    )
    tokenizer: str | None = Field(
        default=None, description="A tokenizer.json; null: learnt from the training captions."
    )


class HeadConfig(Section):
    """The projection head on top of the encoder."""

    hidden_size: int | None = Field(
        default=None,
        ge=1,
        le=WIDEST,
        description="Width of hidden layers; null: that of the features.",
    )
    out_size: int = Field(
        default=128, ge=1, le=WIDEST, description="Size of the embeddings that the loss compares."
    )
    layers: int | None = Field(
        default=None,
        ge=0,
        description=(
            "Linear layers; with 0 the loss compares the features themselves; null: 1 for captions,"
            " 3 for rcl and nnclr, else 2."
        ),
    )
    norm: bool = Field(default=True, description="BatchNorm after each hidden layer.")
    second: bool = Field(
        default=False, description="Attract false negatives on a second head of the same size."
    )
    last_norm: bool | None = Field(
        default=None,
        description=(
            "BatchNorm after the last layer, too; null: true for rcl and nnclr, else false."
        ),
    )
    last_affine: bool = Field(
        default=True, description="Whether that last BatchNorm has weight and bias."
    )


class OptimizerConfig(Section):
    """The optimiser and its learning-rate schedule."""

    name: Literal["sgd", "lars", "adamw"] = Field(default="adamw", description="The optimiser.")
    lr: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Learning rate before scaling; null: 0.003 for adamw, with captions 0.001, and 0.03 for"
            " sgd and lars."
        ),
    )
    lr_scaling: Literal["none", "linear", "sqrt"] | None = Field(
        default=None,
        description=(
            "Scaling with the batch size: linear is lr·batch/256, sqrt is lr·√batch; null: none for"
            " adamw, linear for sgd and lars."
        ),
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="Momentum of sgd and lars.")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.999), description="Both decay rates of adamw."
    )
    nesterov: bool = Field(default=False, description="Nesterov's momentum, for sgd.")
    trust: float = Field(default=0.001, gt=0, description="Trust coefficient of lars.")
    weight_decay: float | None = Field(
        default=None,
        ge=0,
        description=(
            "Weight decay, none for biases and norms; null: 0.01 for adamw, with captions 0.1, and"
            " 0.0005 for sgd and lars."
        ),
    )
    schedule: Literal["cosine", "steps", "constant"] = Field(
        default="cosine", description="Course of the learning rate after the warm-up."
    )
    warmup_epochs: float | None = Field(
        default=None,
        ge=0,
        description="Epochs in which the learning rate rises from 0; null: 0, with captions 1.",
    )
    milestones: tuple[float, ...] = Field(
        default=(), description="Epochs at which the learning rate falls, for the schedule steps."
    )
    factor: float = Field(
        default=0.1, gt=0, description="What the learning rate is multiplied by at a milestone."
    )


class TrainerConfig(Section):
    """Devices, precision, and the loggers."""

    accelerator: str = Field(
        default="auto", description="cuda, mps or cpu; auto: the best there is."
    )
    precision: str = Field(
        default="auto",
        description=(
            "32, bf16-mixed or 16-mixed; auto: bf16-mixed where the hardware supports it, else 32."
        ),
    )
    matmul_precision: Literal["auto", "highest", "high", "medium"] = Field(
        default="auto",
        description=(
            "Products of float32 matrices: highest is float32, high TF32, medium bf16; auto: high"
            " with bf16 or 16 bits."
        ),
    )
    devices: int | Literal["auto"] = Field(default="auto", description="Devices of each machine.")
    num_nodes: int = Field(default=1, ge=1, description="Number of machines.")
    strategy: str = Field(
        default="auto", description="Strategy of Lightning; auto: ddp with several devices."
    )
    accumulate: int = Field(
        default=1, ge=1, description="Batches for each step of the optimiser; adds no negatives."
    )
    chunk_size: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Samples per device whose activations are held at a time (GradCache); null: all."
        ),
    )
    channels_last: bool = Field(default=True, description="Memory layout of views and encoder.")
    compile: bool | Literal["auto"] = Field(
        default="auto", description="Compile the loss with torch.compile; auto: on a GPU."
    )
    compile_encoder: bool | Literal["auto"] = Field(
        default="auto",
        description=(
            "Compile the encoder with torch.compile; auto: on a GPU where Triton is installed."
        ),
    )
    cudnn_benchmark: bool = Field(
        default=True, description="Let cuDNN try its algorithms on the first batches; CUDA only."
    )
    sync_batchnorm: bool | Literal["auto"] = Field(
        default="auto",
        description="BatchNorm over the joined batch of all devices; auto: with several GPUs.",
    )
    timeout_minutes: float = Field(
        default=240,
        gt=0,
        description="How long ranks wait for each other before the training fails.",
    )
    gradient_clip: float | None = Field(
        default=None, gt=0, description="Largest norm of the gradient; null: it is not clipped."
    )
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = Field(
        default=("tensorboard",), description="Loggers next to metrics.jsonl; none for no logger."
    )
    log_every: int = Field(
        default=10, ge=1, description="Steps between two entries in the loggers."
    )

    @field_validator("loggers", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        """A single logger may be given by its name, and `none` or an empty name for no logger."""
        return (() if value in ("", "none") else (value,)) if isinstance(value, str) else value


class KnnConfig(Section):
    """The nearest-neighbour accuracy measured during training, where there are labels."""

    every: int = Field(default=1, ge=0, description="Epochs between two measurements; 0: never.")
    k: int = Field(default=20, ge=1, description="Number of neighbours.")
    temperature: float = Field(default=0.1, gt=0, description="Temperature of the votes.")
    max_samples: int = Field(
        default=20_000, ge=1, description="Largest number of training samples that vote."
    )
    nmi_seeds: int = Field(
        default=0, ge=0, description="Number of k-means runs whose NMI with the labels is measured."
    )
    nmi_normaliser: Literal["arithmetic", "geometric", "min", "max"] = Field(
        default="arithmetic",
        description=(
            "What NMI is divided by: a mean of both entropies, the smaller or the larger one."
        ),
    )


class CheckpointConfig(Section):
    """When a checkpoint is saved. The end of the training and an interruption always save one."""

    every_epochs: int = Field(default=1, ge=1, description="Epochs between two checkpoints.")
    every_minutes: float | None = Field(
        default=10, gt=0, description="Minutes between two checkpoints within an epoch; null: none."
    )
    keep: int = Field(
        default=2,
        ge=1,
        description="Number of newest checkpoints to keep: last.ckpt, last-1.ckpt, …",
    )
    best: bool = Field(
        default=False,
        description="Also keep best.ckpt, of the epoch with the highest kNN accuracy.",
    )


class SnapshotConfig(Section):
    """Embeddings of a few training samples at a few epochs, for the maps of the report."""

    epochs: int = Field(
        default=4,
        ge=0,
        description="Number of snapshots, from the first epoch to the last; 0: none.",
    )
    samples: int = Field(default=1000, ge=1, description="Samples of each snapshot.")


class PythonConfig(Section):
    """Objects that were passed to `kf.train` instead of a name, by their class. Set by
    `kf.train`."""

    model: str | None = Field(default=None, description="Class of the encoder.")
    detector: str | None = Field(default=None, description="Class of the detector.")
    action: Literal["eliminate", "attract", "reweight"] | None = Field(
        default=None, description="Action of that detector."
    )


class TrainConfig(Section):
    """All settings of a training.

    Example:
        >>> config = TrainConfig().with_settings(["optimizer.lr=0.1", "epochs=3"])
        >>> config.optimizer.lr, config.epochs
        (0.1, 3)
    """

    method: str = Field(
        default="simclr",
        description="`framework[+detector[:variant][:action]]`; `kinfolk methods` lists them.",
    )
    epochs: int = Field(
        default=100,
        ge=1,
        description="Epochs of the whole training; 30 on a CPU if it is not given.",
    )
    batch_size: int = Field(
        default=256,
        ge=2,
        description=(
            "Samples of a batch over all devices; less for small data sets if it is not given."
        ),
    )
    seed: int = Field(default=0, description="Seed of weights, order, views and all other draws.")
    data: DataConfig = DataConfig()
    views: ViewsConfig = ViewsConfig()
    model: ModelConfig = ModelConfig()
    text: TextConfig = TextConfig()
    head: HeadConfig = HeadConfig()
    framework: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the framework, as in `framework.temperature=0.2`; see its page.",
    )
    detector: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the detector, as in `detector.alpha=0.01`; see its page.",
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    knn: KnnConfig = KnnConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    snapshots: SnapshotConfig = SnapshotConfig()
    plugins: tuple[str, ...] = Field(
        default=(), description="Modules or .py files that register detectors and frameworks."
    )
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

        A plugin file that lies beside the configuration is refused: opening a run folder never runs
        code that came with it.
        """
        config, folder = cls.of(read_yaml(Path(path)), str(path)), Path(path).resolve().parent
        for name in config.plugins:
            if name.endswith(".py") and (
                not Path(name).is_absolute() or Path(name).resolve().is_relative_to(folder)
            ):
                raise UsageError(
                    f"the plugin `{name}` of {path} is not imported, because it may have come with"
                    " that folder; keep plugins elsewhere"
                )
        load_plugins(config.plugins)
        return config

    def with_settings(self, settings: Sequence[str] | Mapping[str, Any]) -> TrainConfig:
        """A copy with `section.key` set to a value: `["detector.alpha=0.02"]` (values are YAML) or
        `{"detector.alpha": 0.02}`."""
        document = self.model_dump(mode="json")
        for key, value in parse_settings(settings).items():
            *path, last = key.split(".")
            place = document
            for part in path:
                inner = place.setdefault(part, {})
                if not isinstance(inner, dict):
                    raise UsageError(
                        f"`{key}` cannot be set: `{part}` is not a section but a single setting"
                    )
                place = inner
            if isinstance(place.get(last), dict):
                if not isinstance(value, Mapping):
                    raise UsageError(
                        f"`{key}` is a section; set one of its keys, as in `{key}.KEY=VALUE`"
                    )
                value = {**place[last], **value}
            place[last] = value
        return type(self).of(document, "the settings")

    def to_yaml(self) -> str:
        """The whole configuration, defaults included, in the order of the fields."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def parse_settings(settings: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """`["optimizer.lr=0.1"]` → `{"optimizer.lr": 0.1}`; values are YAML, so lists, true and null
    work."""
    if isinstance(settings, Mapping):
        return dict(settings)
    if isinstance(settings, str):
        settings = [settings]
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise UsageError(
                "a setting must have the form KEY=VALUE, as in optimizer.lr=0.1; received"
                f" {setting!r}"
            )
        try:
            parsed[key.strip()] = _number(parse_yaml(text))
        except yaml.YAMLError:
            raise UsageError(
                f"the value of `{key.strip()}` cannot be read: {text!r}; quote it if it holds"
                " special characters"
            ) from None
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
    """The end of a message about an unknown name: the nearest of `valid` and `also`, and the list
    of all valid names."""
    valid = list(valid)
    inner = [other for other in also if other.split(".")[-1] == name]
    hint = (
        f"; did you mean {' or '.join(inner)}?"
        if inner
        else did_you_mean(name, [*valid, *also]) or "."
    )
    return f"{hint} Valid: {', '.join(valid) if valid else 'none'}"


def refuse_unknown(
    document: Mapping[str, Any], model: type[BaseModel], where: str, prefix: str = ""
) -> None:
    """Raises for the first key that `model` or one of its sections does not have."""
    fields = model.model_fields
    for key, value in document.items():
        if key not in fields:
            raise UsageError(
                f"unknown key `{prefix}{key}` in"
                f" {where}{suggest(str(key), fields, _inner_keys(model))}"
            )
        section = fields[key].annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            if not isinstance(value, Mapping):
                raise UsageError(
                    f"`{prefix}{key}` (={value!r}) is a section with the keys"
                    f" {', '.join(section.model_fields)}"
                )
            refuse_unknown(value, section, where, f"{prefix}{key}.")


def refuse_not_finite(document: Mapping[str, Any], prefix: str = "") -> None:
    """Raises for a number that is not finite, in any section: JSON would turn it into null."""
    for key, value in document.items():
        if isinstance(value, Mapping):
            refuse_not_finite(value, f"{prefix}{key}.")
        elif any(
            isinstance(each, float) and not math.isfinite(each)
            for each in (value if isinstance(value, list | tuple) else (value,))
        ):
            raise UsageError(f"`{prefix}{key}` (={value}) must be a finite number")


REQUIRED_FILES = {
    "detector.pairs": (
        "give the file of pairs with --known-kin FILE, such as pairs.parquet of `kinfolk audit`"
    )
}


def validation_message(error: ValidationError, prefix: str = "") -> str:
    """The first error of a validation as a sentence: "`optimizer.lr` (=-1) must be greater than
    0"."""
    first = error.errors(include_url=False)[0]
    place = prefix + ".".join(
        str(part)
        for part in first["loc"]
        if part not in ("int", "float") and not str(part).startswith("literal")
    )
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
