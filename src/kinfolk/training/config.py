"""The configuration of a training: checked sections, unknown keys refused, written out in full beside the result."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from kinfolk.errors import UsageError
from kinfolk.training.documents import read_yaml
from kinfolk.training.keys import nearest, parse_settings, refuse_not_finite, refuse_unknown, sentence
from kinfolk.training.sections import (
    CheckpointConfig,
    DataConfig,
    HeadConfig,
    KnnConfig,
    ModelConfig,
    OptimizerConfig,
    Section,
    SnapshotConfig,
    TextConfig,
    TrainerConfig,
    ViewsConfig,
)


class TrainConfig(Section):
    """Everything that determines a training.

    Example:
        >>> config = TrainConfig().with_settings(["optimizer.lr=0.1", "epochs=3"])
        >>> config.optimizer.lr, config.epochs
        (0.1, 3)
    """

    method: str = "simclr"
    epochs: int = Field(default=100, ge=1)
    batch_size: int = Field(default=256, ge=2, description="over all devices together")
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

    @classmethod
    def of(cls, document: Mapping[str, Any], where: str = "the configuration") -> TrainConfig:
        """Checks a nested mapping; the first fault is told in one sentence."""
        refuse_unknown(document, cls, where)
        refuse_not_finite(document)
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise UsageError(sentence(error)) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TrainConfig:
        """Reads a YAML document, such as a run's config.yaml."""
        return cls.of(read_yaml(Path(path)), str(path))

    def with_settings(self, settings: Sequence[str] | Mapping[str, Any]) -> TrainConfig:
        """A copy with `section.key` set to a value: `["detector.alpha=0.02"]` (values are YAML) or `{"detector.alpha": 0.02}`."""
        document = self.model_dump(mode="json")
        for key, value in parse_settings(settings).items():
            *path, last = key.split(".")
            place = document
            for part in path:
                inner = place.setdefault(part, {})
                if not isinstance(inner, dict):
                    raise UsageError(f"`{key}` cannot be set: `{part}` is no section{nearest(part, list(type(self).model_fields))}")
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
