"""From a complete configuration to views, networks, framework, optimiser and tokenizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from kinfolk.data.images import ImageData
from kinfolk.data.labels import captions_of
from kinfolk.data.sample_table import Samples
from kinfolk.data.text import (
    PairTexts,
    TextData,
    TextViews,
    Tokenizer,
    every_caption,
    parse_tokenizer,
    read_tokenizer,
    require_captions,
    train_tokenizer,
)
from kinfolk.data.views import Views
from kinfolk.detectors import Guide
from kinfolk.detectors.base import Detector
from kinfolk.errors import KinfolkError, UsageError, warn
from kinfolk.frameworks import FRAMEWORKS, Framework
from kinfolk.frameworks.registry import Context, build, parse
from kinfolk.models import SplitEncoder, SplitHead, build_encoder, build_text, projection_head
from kinfolk.models.encoders import adapt
from kinfolk.models.text import SENTENCE, sentence_tokenizer, sentence_transformer
from kinfolk.models.weights import TOWERS, load_parts
from kinfolk.optimizers import (
    build_optimizer,
    build_scheduler,
    lr_factor,
    move_to_own_group,
    scale_lr,
)
from kinfolk.seeding import derive_seed
from kinfolk.training.config import TrainConfig
from kinfolk.training.defaults import (
    contrasts_texts,
    head_settings,
    learns_from_text,
    method_arguments,
    optimizer_settings,
)
from kinfolk.training.guides import guide_features, require_rows, text_guide
from kinfolk.training.run_folder import Run

MOST_TOKENIZED = 100_000
"""About how many text pairs the tokenizer is learned from."""


@dataclass(frozen=True)
class Parts:
    """Objects passed to `kf.train` instead of names, trained in place."""

    model: nn.Module | None = None
    detector: Detector | None = None

    def settings(self, action: str | None) -> dict[str, Any]:
        found: dict[str, Any] = {"python.action": None if self.detector is None else action}
        for name, part in vars(self).items():
            found[f"python.{name}"] = None if part is None else type(part).__qualname__
        return found

    def require(self, config: TrainConfig) -> None:
        for name, part in vars(self).items():
            expected = getattr(config.python, name)
            if expected is not None and part is None:
                raise UsageError(
                    f"the {name} of this run ({expected}) was passed from Python; pass it again as"
                    f" `{name}`"
                )


NO_PARTS = Parts()


def build_views(config: TrainConfig) -> Views:
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
    """With `resumed`, no initial weights are read."""
    parts.require(config)
    method = parse(config.method)
    if config.python.action is not None:
        method = replace(method, action=config.python.action)
    labels = None if data.labels is None else data.of_ids(data.labels)
    framework_args, detector_args = method_arguments(config)
    if isinstance(guide := detector_args.get("features"), str | Path):
        if data.texts is None:
            detector_args["features"] = guide_features(guide, data, cache)
        else:
            detector_args |= text_guide(guide, data, cache)
    if resumed:
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
        second = _head(config, encoder) if config.head.second else None
        if config.model.init is not None and not resumed:
            load_initial_weights(config, encoder, head, text)
        keys: Sequence[str] = data.samples.keys[: data.num_train]
        if num_negatives := data.num_ids - data.num_train:
            keys = [*keys, *(f"negative/{number}" for number in range(num_negatives))]
        context = Context(data.num_ids, labels, text, keys, second)
        framework = build(
            method, encoder, head, context, framework_args, detector_args, parts.detector
        )
    except KinfolkError:
        raise
    except ValueError as error:  # the constructors' own checks: argument, rule and value
        raise UsageError(f"{method} cannot be built: {error}") from error
    for part in framework.modules():
        if isinstance(part, Guide) and part.features is not None:
            require_rows("the guide", part.features, data.num_ids, max(len(data), data.num_ids))
    framework.set_eval_labels(labels)
    for objective in framework.objectives:
        objective.compiles = config.trainer.compile is True
    return framework


def networks(
    config: TrainConfig, channels: tuple[int, ...], module: nn.Module | None = None
) -> tuple[nn.Module, nn.Module]:
    """`module`: an encoder from Python."""
    if module is not None:
        if len(channels) > 1:
            raise UsageError(
                f"{config.method} needs one encoder per group of channels, so it takes no module as"
                " `model`; give a name"
            )
        adapted = adapt(module, input_size=config.views.size or 0)
        return adapted, _head(config, adapted)
    model = config.model
    assert model.stem is not None, "fitted to the data"
    options: dict[str, Any] = model.model_dump(include={"stem", "width", "pretrained"})
    encoders, heads = list[nn.Module](), list[nn.Module]()
    for number in channels:
        encoders.append(build_encoder(model.name, in_channels=number, **options))
        heads.append(_head(config, encoders[-1]))
    if len(channels) == 1:
        return encoders[0], heads[0]
    sizes = [int(encoder.output_size) for encoder in encoders]  # type: ignore[arg-type]
    return SplitEncoder(encoders, channels), SplitHead(heads, sizes)


def _head(config: TrainConfig, encoder: nn.Module) -> nn.Module:
    head, size = head_settings(config), int(encoder.output_size)  # type: ignore[arg-type]
    if head.layers == 0:
        return nn.Identity()
    options = head.model_dump(exclude={"hidden_size", "out_size", "second"})
    return projection_head(size, head.hidden_size or size, head.out_size, **options)


def text_networks(config: TrainConfig, tokenizer: Tokenizer) -> tuple[nn.Module, nn.Module]:
    """The text tower and its head, a linear map without bias as in CLIP, if there are images."""
    names = {"context", "width", "layers", "heads", "causal", "pretrained"}
    options: dict[str, Any] = config.text.model_dump(include=names)
    tower = build_text(
        config.model.name if contrasts_texts(config) else config.text.name,
        vocab_size=tokenizer.vocab_size,
        end_id=tokenizer.end_id,
        **options,
    )
    size = tower.output_size
    assert isinstance(size, int)
    if config.head.layers == 0:
        return tower, nn.Identity()
    return tower, projection_head(size, size, config.head.out_size, layers=1, bias=False)


def load_initial_weights(
    config: TrainConfig,
    encoder: nn.Module,
    head: nn.Module,
    text: tuple[nn.Module, nn.Module] | None,
) -> None:
    path = config.model.init
    assert path is not None
    parts = nn.Module()
    parts.encoder, parts.head = encoder, head
    if text is not None:
        parts.text_encoder, parts.text_head = text
    filled = load_parts(parts, path)
    if "text_encoder" in filled and not (config.text.tokenizer or _tokenizer_next_to(path)):
        warn(
            f"the text tower of {path} was trained with a tokenizer that is not known here; give"
            " the tokenizer.json of its training as `text.tokenizer`"
        )
    others = [(name, part) for name, part in parts.named_children() if name not in filled]
    if rest := [name for name, part in others if next(part.parameters(), None) is not None]:
        has = ", ".join(filled)
        warn(f"{path} has weights for {has}; {', '.join(rest)} start from random weights")


def read_text(
    images: ImageData, config: TrainConfig, run: Run, resumed: bool
) -> TextData | PairTexts | None:
    if not learns_from_text(config):
        return None
    require_captions(images.samples)
    tokenizer = _tokenizer(images.samples, config, run, resumed)
    if images.texts is not None:
        images.texts.tokenizer = tokenizer
        return images.texts
    return TextData(images.samples, tokenizer)


def _tokenizer(samples: Samples, config: TrainConfig, run: Run, resumed: bool) -> Tokenizer:
    text = config.text
    assert text.context is not None, "fitted to the data"
    file = run.tokenizer if resumed else text.tokenizer or _tokenizer_next_to(config.model.init)
    if file is not None:
        return read_tokenizer(file, text.context)
    if contrasts_texts(config) and config.model.name.startswith(SENTENCE):
        found = sentence_tokenizer(sentence_transformer(config.model.name))[0]
        return parse_tokenizer(found, text.context)
    assert text.vocab_size is not None
    texts = every_caption(samples, "train")
    if contrasts_texts(config):  # of many pairs, a part that is spread over the table
        assert samples.captions is not None
        part = samples.captions[: samples.num_train : 1 + samples.num_train // MOST_TOKENIZED]
        texts = (each for pair in part for each in captions_of(pair))
    return train_tokenizer(texts, vocab_size=text.vocab_size, context=text.context)


def _tokenizer_next_to(weights: str | None) -> Path | None:
    if weights is None or (Path(weights).name != TOWERS and Path(weights).suffix != ".ckpt"):
        return None
    places = (Run(folder).tokenizer for folder in Path(weights).absolute().parents[:2])
    return next((place for place in places if place.is_file()), None)


def build_optimizers(config: TrainConfig, framework: Framework, num_batches: int) -> dict[str, Any]:
    chosen = optimizer_settings(config)
    assert chosen.lr is not None
    assert chosen.lr_scaling is not None
    assert chosen.warmup_epochs is not None
    steps = math.ceil(num_batches / config.trainer.accumulate)
    lr = scale_lr(chosen.lr, config.batch_size * config.trainer.accumulate, chosen.lr_scaling)
    options = chosen.model_dump(include={"weight_decay", "momentum", "nesterov", "betas", "trust"})
    optimizer = build_optimizer(chosen.name, framework, lr, **options)
    for part in framework.own_rates:
        move_to_own_group(optimizer, part.parameters, part.lr)
    milestones = [round(epoch * steps) for epoch in chosen.milestones]
    warmup = round(chosen.warmup_epochs * steps)
    schedule = (config.epochs * steps, warmup, chosen.schedule, milestones, chosen.factor)
    others = [part.factor for part in framework.own_rates]
    scheduler = build_scheduler(optimizer, lambda step: lr_factor(step, *schedule), others=others)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
