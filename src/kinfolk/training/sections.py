"""The sections of a training's configuration: fields, defaults and what they may be."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Abstract. A part of the configuration; unknown keys are refused and nothing changes after it is made."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class DataConfig(Section):
    """Where the samples come from, and how they are kept."""

    source: str | None = Field(default=None, description="folder, array file, table, archive or the name of a bundled data set")
    image_size: int | None = Field(
        default=None, ge=1, description="side of the cached pictures; None: 8/7 of `views.size`, or their own if less"
    )
    labels_from_folders: bool = Field(default=False, description="class sub-folders become labels")
    hierarchy: str | None = Field(default=None, description="file of child and parent classes, or cifar100; with `depth`")
    depth: int | None = Field(default=None, ge=0, description="labels become their ancestors at this depth of `hierarchy`; 0: the root")
    image_column: str = "image"
    label_column: str | None = Field(
        default=None, description="this and the following: None takes the column of that name where there is one"
    )
    caption_column: str | None = None
    group_column: str | None = None
    split_column: str | None = None
    pixel_cap: int = Field(default=50_000_000, ge=1, description="larger pictures are refused by their header")
    workers: int | None = Field(default=None, ge=0, description="decoding processes; None: one per core")
    streaming: bool = Field(
        default=False,
        description="read shards or files in every epoch instead of keeping all pixels decoded: for data larger than the disk",
    )
    shuffle_buffer: int = Field(default=10_000, ge=1, description="samples of consecutive shards that are shuffled together when streaming")
    cache_dir: str | None = Field(
        default=None, description="folder of the pixel cache; None: memory, or the run's folder where that is too small"
    )


class ViewsConfig(Section):
    """How two views are made of a picture; `options` override single settings of the preset."""

    preset: str = "simclr"
    size: int | None = Field(default=None, ge=1, description="None: the pictures' own, from 16 to 224 pixels")
    options: dict[str, Any] = Field(default_factory=dict)


class ModelConfig(Section):
    """The encoder."""

    name: str = "resnet18"
    stem: Literal["cifar", "imagenet"] | None = Field(default=None, description="None: cifar for views of up to 64 pixels")
    width: int | None = Field(default=None, ge=1, description="channels of the first stage; None: the network's own")
    pretrained: bool = False
    init: str | None = Field(default=None, description="file of weights to begin from: .safetensors or a state dict")


class TextConfig(Section):
    """The tokenizer and the text tower, for methods that learn from captions; the defaults are CLIP's."""

    name: str = "transformer"
    layers: int = Field(default=12, ge=1)
    width: int = Field(default=512, ge=1)
    heads: int = Field(default=8, ge=1)
    causal: bool = True
    pretrained: bool = False
    context: int = Field(default=77, ge=4, description="tokens of a text at most, start and end included")
    vocab_size: int = Field(default=49408, ge=259, description="tokens the tokenizer learns at most")
    tokenizer: str | None = Field(default=None, description="a tokenizer.json; None: learnt from the training captions")


class HeadConfig(Section):
    """The projection head on top of the encoder."""

    hidden_size: int | None = Field(default=None, ge=1, description="None: the encoder's output size")
    out_size: int = Field(default=128, ge=1)
    layers: int = Field(default=2, ge=0, description="0: none, the encoder's output is contrasted")
    norm: bool = True
    last_norm: bool = False
    last_affine: bool = Field(
        default=True, description="whether that last norm has weight and bias; without, no direction is common to all"
    )


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
    """What is handed on to Lightning, and where the run is logged."""

    accelerator: str = "auto"
    precision: str = Field(default="auto", description="auto: bf16 where it pays, else 32 bits")
    devices: int | Literal["auto"] = "auto"
    num_nodes: int = Field(default=1, ge=1)
    strategy: str = "auto"
    accumulate: int = Field(default=1, ge=1, description="batches for each optimiser step; adds no negatives")
    chunk_size: int | None = Field(
        default=None,
        ge=1,
        description="samples of a device whose activations are held at a time (GradCache); the loss sees the whole batch",
    )
    channels_last: bool = True
    compile: bool | Literal["auto"] = Field(default="auto", description="the loss through torch.compile; auto: on a GPU")
    sync_batchnorm: bool = False
    gradient_clip: float | None = Field(default=None, gt=0)
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    log_every: int = Field(default=10, ge=1, description="steps between two lines of the loggers")


class KnnConfig(Section):
    """The nearest-neighbour accuracy measured during training, where there are labels."""

    every: int = Field(default=1, ge=0, description="epochs between two measurements; 0: never")
    k: int = Field(default=20, ge=1)
    temperature: float = Field(default=0.1, gt=0)
    max_samples: int = Field(default=20_000, ge=1, description="at most so many training samples in the bank")
    nmi_seeds: int = Field(default=0, ge=0, description="k-means of the bank's features whose NMI with the labels is measured too")
    nmi_normaliser: Literal["arithmetic", "geometric", "min", "max"] = Field(
        default="arithmetic", description="mean of the entropies that every NMI of the training is divided by, or the smaller or larger one"
    )


class CheckpointConfig(Section):
    """When the state is saved; the end of the training and an interruption always save."""

    every_epochs: int = Field(default=1, ge=1)
    every_minutes: float | None = Field(default=10, gt=0, description="also within an epoch, as soon as so much time has passed; None: not")
    keep: int = Field(default=2, ge=1, description="the newest so many: last.ckpt, last-1.ckpt, …")
    best: bool = Field(default=False, description="also best.ckpt, that of the epoch with the highest kNN accuracy")


class SnapshotConfig(Section):
    """The embeddings of a few training samples, kept now and then for the maps of the report."""

    epochs: int = Field(default=4, ge=0, description="so many, from the first epoch to the last; 0: none")
    samples: int = Field(default=1000, ge=1, description="of each")
