"""Text towers: the transformer of CLIP (Radford et al., ICML 2021, section 2.4 and appendix F), and
those of other libraries.

Dimension key: B batch, T tokens, W width, H heads.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.errors import KinfolkError, UsageError, import_optional, require, require_at_least
from kinfolk.files import first_line


class TextTransformer(nn.Module):
    """A transformer over tokens, (B, T) → (B, W): the output at the first end token. Tokens after
    it have no influence.

    Args:
        vocab_size: token ids are below this number.
        context: T at most.
        end_id: the end token; every row must have one.
        causal: whether a token attends only to those before it, as in CLIP.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int,
        *,
        end_id: int,
        width: int = 512,
        layers: int = 12,
        heads: int = 8,
        causal: bool = True,
    ) -> None:
        super().__init__()
        require_at_least(1, vocab_size=vocab_size, context=context, width=width)
        require_at_least(1, layers=layers, heads=heads)
        require(width % heads == 0, "width", width, f"a multiple of `heads` (={heads})")
        require(0 <= end_id < vocab_size, "end_id", end_id, f"in [0, vocab_size={vocab_size})")
        self.output_size, self.context, self.end_id, self.causal = width, context, end_id, causal
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.ModuleList(TextBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self._initialise(width, layers)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        longest = tokens_BT.shape[1]
        require(longest <= self.context, "tokens", longest, f"at most `context` (={self.context})")
        end_B = ends(tokens_BT, self.end_id)
        length = _longest(tokens_BT, end_B)
        x_BTW = self.tokens(tokens_BT[:, :length]) + self.positions[:length]
        seen_BT = torch.arange(length, device=end_B.device) <= end_B[:, None]
        for block in self.blocks:
            x_BTW = block(x_BTW, None if self.causal else seen_BT)
        out: Tensor = self.norm(x_BTW[torch.arange(len(end_B), device=end_B.device), end_B])
        return out

    def _initialise(self, width: int, layers: int) -> None:
        nn.init.normal_(self.tokens.weight, std=0.02)  # all as in CLIP's code
        nn.init.normal_(self.positions, std=0.01)
        start = width**-0.5
        branch = start * (2 * layers) ** -0.5
        for block in self.blocks:
            stds = {"attend": start, "mix": branch, "rise": (2 * width) ** -0.5, "fall": branch}
            for name, std in stds.items():
                linear = getattr(block, name)
                nn.init.normal_(linear.weight, std=std)
                nn.init.zeros_(linear.bias)


class TextBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rise, self.fall = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTW: Tensor, seen_BT: Tensor | None) -> Tensor:
        """`seen_BT`: tokens that may be attended to; None: those before each."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.attend(self.norm1(x_BTW)).chunk(3, -1)
        )
        mask = None if seen_BT is None else seen_BT[:, None, None, :]
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x_BTW = x_BTW + self.mix(found.transpose(1, 2).flatten(2))
        out: Tensor = x_BTW + self.fall(F.gelu(self.rise(self.norm2(x_BTW))))
        return out


def ends(tokens_BT: Tensor, end_id: int) -> Tensor:
    return (tokens_BT == end_id).to(torch.uint8).argmax(1)


def _longest(tokens_BT: Tensor, end_B: Tensor) -> int:
    """Where a batch is cut; an accelerator would have to wait for its longest text."""
    return int(end_B.max()) + 1 if tokens_BT.device.type == "cpu" else tokens_BT.shape[1]


CLIP_VOCAB, CLIP_END = 49408, 49407


class OpenClipText(nn.Module):
    """The text tower of an open_clip model, (B, T) → (B, output_size), with its projection; removes
    the rest of `model`."""

    def __init__(self, model: nn.Module, output_size: int) -> None:
        super().__init__()
        for name in ("visual", "logit_scale", "logit_bias"):  # the loss has its own scale
            if getattr(model, name, None) is not None:
                delattr(model, name)
        self.model, self.output_size = model, output_size

    def forward(self, tokens_BT: Tensor) -> Tensor:
        out: Tensor = self.model.encode_text(tokens_BT.long())  # type: ignore[operator]
        return out


SENTENCE = "st/"  # a model of sentence-transformers


class SentenceEncoder(nn.Module):
    """A model of sentence-transformers, (B, T) → (B, output_size)."""

    def __init__(self, model: nn.Module, end_id: int) -> None:
        super().__init__()
        tokenizer: Any = model.tokenizer
        # the model does not see an end that its tokenizer does not add
        self.adds_end = tokenizer("a")["input_ids"][-1:] == [end_id]
        new = getattr(model, "get_embedding_dimension", None)
        size: Any = new or model.get_sentence_embedding_dimension
        self.model, self.end_id, self.output_size = model, end_id, int(size())

    def forward(self, tokens_BT: Tensor) -> Tensor:
        end_B = ends(tokens_BT, self.end_id) - (0 if self.adds_end else 1)
        length = _longest(tokens_BT, end_B)
        seen_BT = (torch.arange(length, device=end_B.device) <= end_B[:, None]).long()
        given = {"input_ids": tokens_BT[:, :length].long(), "attention_mask": seen_BT}
        out: Tensor = self.model(given)["sentence_embedding"]
        return out

    def save(self, folder: Path) -> None:
        """Writes the folder that `SentenceTransformer(folder)` reads, in place of an older one."""
        unfinished, old = (folder.with_name(f"{folder.name}.{mark}") for mark in ("new", "old"))
        for each in (unfinished, old):
            shutil.rmtree(each, ignore_errors=True)
        with _without_bars():
            self.model.save_pretrained(str(unfinished), create_model_card=False)  # type: ignore[operator]
        if folder.exists():
            folder.rename(old)
        unfinished.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def sentence_transformer(name: str) -> Any:
    """A folder, or a model that is downloaded; on the CPU."""
    library = import_optional("sentence_transformers", "sentence-transformers", "sentence")
    place = name.removeprefix(SENTENCE)
    try:
        with _without_bars():
            return library.SentenceTransformer(place, device="cpu")
    except Exception as error:  # of the library, of transformers, of the hub
        why = f"{first_line(error)}; give st/FOLDER, or st/NAME of a model that can be downloaded"
        raise KinfolkError(f"{name!r} can't be loaded: {why}") from error


@contextmanager
def _without_bars() -> Iterator[None]:
    logging = importlib.import_module("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def sentence_tokenizer(model: Any) -> tuple[str, int]:
    """The text of tokenizer.json, and the largest number of tokens."""
    inner = getattr(model.tokenizer, "backend_tokenizer", None)
    if inner is None:
        raise KinfolkError(
            "the model has no fast tokenizer (tokenizer.json); train it with"
            " kinfolk.integrations.sentence_transformers"
        )
    text = str(inner.to_str())
    if getattr(model[0], "do_lower_case", False):  # a setting of sentence-transformers
        document = json.loads(text)
        normalizers = [{"type": "Lowercase"}, *filter(None, [document.get("normalizer")])]
        document["normalizer"] = {"type": "Sequence", "normalizers": normalizers}
        text = json.dumps(document)
    return text, int(model.max_seq_length or 512)


def build_text(
    name: str,
    *,
    vocab_size: int,
    context: int,
    end_id: int,
    pretrained: bool = False,
    **sizes: Any,
) -> nn.Module:
    """Builds the text tower `name`: transformer, open_clip/NAME, or st/NAME, which has its weights.

    Args:
        vocab_size, context, end_id: of the tokenizer.
        pretrained: downloads the package's published weights.
        sizes: further arguments of `TextTransformer`.
    """
    package, _, model = name.partition("/")
    if name == "transformer":
        if pretrained:
            raise UsageError("`pretrained` has no weights for the text tower 'transformer'")
        return TextTransformer(vocab_size, context, end_id=end_id, **sizes)
    if name.startswith(SENTENCE):
        return SentenceEncoder(sentence_transformer(name), end_id)
    if package == "open_clip" and model:
        return _open_clip(model, vocab_size, end_id, context, pretrained)
    raise UsageError(
        f"there is no text encoder {name!r}; use transformer, open_clip/NAME or st/NAME"
    )


def _open_clip(
    name: str, vocab_size: int, end_id: int, context: int, pretrained: bool
) -> OpenClipText:
    if (vocab_size, end_id) != (CLIP_VOCAB, CLIP_END):
        raise UsageError(
            f"'open_clip/{name}' needs CLIP's tokenizer ({CLIP_VOCAB:,} tokens, end {CLIP_END})"
            f" and not {vocab_size:,} tokens; give its tokenizer.json as `text.tokenizer`"
        )
    model = open_clip_model(name, pretrained)
    must = f"{model.context_length} for 'open_clip/{name}'"
    require(context == model.context_length, "text.context", context, must)
    return OpenClipText(model, int(model.visual.output_dim))


def open_clip_model(name: str, pretrained: bool = False) -> Any:
    library = import_optional("open_clip", "open_clip_torch")
    if name not in library.list_models():
        raise UsageError(
            f"open_clip has no model {name!r} (there are {', '.join(library.list_models()[:8])}, …)"
        )
    tags = (tag for model, tag in library.list_pretrained() if pretrained and model == name)
    return library.create_model(name, pretrained=next(tags, None))
