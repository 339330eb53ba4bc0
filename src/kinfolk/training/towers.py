"""The text side of a training: the captions as tokens, the text tower with its head, and weights to begin from."""

from __future__ import annotations

import warnings
from pathlib import Path

from torch import nn

from kinfolk.data.images import ImageData
from kinfolk.data.samples import Samples
from kinfolk.data.text import StreamedText, TextData, every_caption, require_captions
from kinfolk.data.tokenizer import Tokenizer, read_tokenizer, train_tokenizer
from kinfolk.errors import KinfolkWarning
from kinfolk.frameworks import FRAMEWORKS
from kinfolk.frameworks.method import parse
from kinfolk.models import build_text, projection_head
from kinfolk.models.pair import TOWERS, begin_from
from kinfolk.training.config import TrainConfig
from kinfolk.training.run import Run


def learns_from_text(config: TrainConfig) -> bool:
    """Whether the method's samples are pictures with captions."""
    return "text" in FRAMEWORKS[parse(config.method).framework].modalities


def read_text(images: ImageData, config: TrainConfig, run: Run, known: bool) -> TextData | StreamedText | None:
    """The captions of all samples; None for a method that needs none. `known`: the run has its tokenizer already."""
    if not learns_from_text(config):
        return None
    require_captions(images.samples)
    tokenizer = _tokenizer(images.samples, config, run, known)
    return TextData(images.samples, tokenizer) if images.stream is None else StreamedText(images.samples, tokenizer)


def _tokenizer(samples: Samples, config: TrainConfig, run: Run, known: bool) -> Tokenizer:
    """The run's own, or the one that is given, or that of the run whose towers it begins from, or one learnt from the training captions."""
    wanted = config.text
    file = run.tokenizer if known else wanted.tokenizer or _beside(config.model.init)
    if file is not None:
        return read_tokenizer(file, wanted.context)
    return train_tokenizer(every_caption(samples, "train"), vocab_size=wanted.vocab_size, context=wanted.context)


def _beside(weights: str | None) -> Path | None:
    """The tokenizer of the run that the towers, or the checkpoint, are of."""
    if weights is None or (Path(weights).name != TOWERS and Path(weights).suffix != ".ckpt"):
        return None
    places = (Run(folder).tokenizer for folder in Path(weights).absolute().parents[:2])
    return next((place for place in places if place.is_file()), None)


def text_networks(config: TrainConfig, tokenizer: Tokenizer) -> tuple[nn.Module, nn.Module]:
    """The text tower, and its head: a linear map without bias, as in CLIP, or nothing where the pictures have no head either."""
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


def begin(config: TrainConfig, encoder: nn.Module, head: nn.Module, text: tuple[nn.Module, nn.Module] | None) -> None:
    """Fills the networks from the file `model.init`; warns of those it has nothing for, and of a text tower without its tokens."""
    path = config.model.init
    assert path is not None
    parts = nn.Module()
    parts.encoder, parts.head = encoder, head
    if text is not None:
        parts.text_encoder, parts.text_head = text
    filled = begin_from(parts, path)
    if "text_encoder" in filled and config.text.tokenizer is None and _beside(path) is None:
        warnings.warn(
            f"the text tower of {path} learnt from tokens that are not known here, and new ones mean other words; give the tokenizer.json "
            "of its training as `text.tokenizer`",
            KinfolkWarning,
            stacklevel=2,
        )
    rest = [name for name, part in parts.named_children() if name not in filled and any(True for _ in part.parameters())]
    if rest:
        warnings.warn(f"{path} has weights for {', '.join(filled)}; {', '.join(rest)} begin anew", KinfolkWarning, stacklevel=2)
