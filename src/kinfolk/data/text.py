"""Captions as tokens by sample id, and the byte-pair tokenizer that makes them, learnt from the
training captions or read from a file.

Sennrich et al., Neural Machine Translation of Rare Words with Subword Units, ACL 2016, on bytes, so
that every text can be encoded.

Dimension key: N samples, M captions or texts, T tokens of a context, B batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from kinfolk.data.labels import captions_of
from kinfolk.data.sample_table import Samples
from kinfolk.errors import KinfolkError, UsageError, install_hint
from kinfolk.files import write_text


@final
class TextData:
    """All captions as one array of token ids; each sample owns one or several rows.

    Args:
        samples: the table of samples; all of them have a caption.
        tokenizer: converts texts to tokens.

    Attributes:
        tokens: (M, T) int32, in the order of samples.
        owners: (M,) the sample of each caption.
        groups: (N,) known positives; see `labels.group_ids`.
    """

    def __init__(self, samples: Samples, tokenizer: Tokenizer) -> None:
        require_captions(samples)
        assert samples.captions is not None
        assert samples.group_ids is not None
        counts = torch.tensor([len(captions_of(caption)) for caption in samples.captions])
        self.tokenizer = tokenizer
        self.tokens = tokenizer.encode(list(every_caption(samples)))
        self.owners = torch.arange(len(samples)).repeat_interleave(counts)
        self.groups = torch.from_numpy(samples.group_ids.astype(np.int64))
        self._counts, self._starts = counts, counts.cumsum(0) - counts

    def known(self, ids: Tensor) -> dict[str, Tensor]:
        """What else the loss needs: `groups` (B,)."""
        return {"groups": self.groups[ids]}

    def draw(self, ids: Tensor, uniform: Tensor) -> Tensor:
        """(B, T) a caption for each of `ids` (B,), chosen by numbers in [0, 1) (B,) if there are
        several."""
        counts = self._counts[ids]
        return self.tokens[
            self._starts[ids] + (uniform * counts).to(torch.int64).clamp(max=counts - 1)
        ]

    def rows(self, ids: Tensor) -> Tensor:
        """(M',) the rows of `tokens` that belong to the samples `ids`."""
        chosen = torch.zeros(len(self._counts), dtype=torch.bool)
        chosen[ids] = True
        return chosen[self.owners].nonzero()[:, 0]


@final
class StreamedText:
    """Captions of streamed data, converted to tokens batch by batch, so that no tokens are kept.

    Args:
        samples: the table of samples; all of them have a caption.
        tokenizer: converts texts to tokens.

    Attributes:
        groups: (N,) known positives; see `labels.group_ids`.
    """

    def __init__(self, samples: Samples, tokenizer: Tokenizer) -> None:
        require_captions(samples)
        assert samples.group_ids is not None
        self.tokenizer, self._samples = tokenizer, samples
        self.groups = torch.from_numpy(samples.group_ids.astype(np.int64))

    def known(self, ids: Tensor) -> dict[str, Tensor]:
        """What else the loss needs: `groups` (B,)."""
        return {"groups": self.groups[ids]}

    def draw(self, ids: Tensor, uniform: Tensor) -> Tensor:
        """(B, T) a caption for each of `ids` (B,), chosen by numbers in [0, 1) (B,) if there are
        several."""
        captions = self._samples.captions
        assert captions is not None
        several = [captions_of(captions[id_]) for id_ in ids.tolist()]
        chosen = [
            texts[min(int(number * len(texts)), len(texts) - 1)]
            for texts, number in zip(several, uniform.tolist(), strict=True)
        ]
        return self.tokenizer.encode(chosen)


def require_captions(samples: Samples) -> None:
    """Raises if the data has no captions."""
    if samples.captions is None:
        raise UsageError(
            "the data has no captions; give a table with a column `caption` (or name it), or shards"
            " with .txt or .json files"
        )


def every_caption(samples: Samples, split: str | None = None) -> Iterator[str]:
    """Yields the captions of all samples, or of one split."""
    for caption, name in zip(samples.captions or (), samples.splits, strict=True):
        if split is None or name == split:
            yield from captions_of(caption)


PAD, START, END = "<pad>", "<start>", "<end>"
_ENDS = (END, "<|endoftext|>", "<end_of_text>", "</s>", "[SEP]", "<eos>")
_PADS = (PAD, "[PAD]", "<|pad|>", "!")
_CHUNK = 4096


@final
class Tokenizer:
    """Text → (T,) token ids: start, bytes joined to pairs, end, padding. A longer text is cut, and
    its end token stays.

    Args:
        inner: of the library `tokenizers`; see `train_tokenizer` and `read_tokenizer`.
        context: T.

    Attributes:
        vocab_size: ids are below it.
        end_id: stands after the last token of every text; the text tower's feature is read there.
        pad_id: fills the rest.
    """

    def __init__(self, inner: Any, context: int) -> None:
        if context < 4:
            raise ValueError(
                f"`context` (={context}) must be at least 4: start, end and a text between them"
            )
        self._inner, self.context = inner, context
        self.vocab_size = int(inner.get_vocab_size(with_added_tokens=True))
        end_id = self._find(_ENDS)
        if end_id is None:
            raise KinfolkError(
                "the tokenizer has no token for the end of a text; it must know one of"
                f" {', '.join(_ENDS)}"
            )
        pad_id = self._find(_PADS)
        self.end_id, self.pad_id = end_id, end_id if pad_id is None else pad_id
        inner.encode_special_tokens = True  # "<end>" in a caption is plain text, not the end token
        inner.no_padding()
        inner.enable_truncation(context)

    def __repr__(self) -> str:
        return f"<Tokenizer of {self.vocab_size:,} tokens, context {self.context}>"

    def encode(self, texts: Sequence[str]) -> Tensor:
        """(M, T) int32."""
        tokens_MT = torch.full((len(texts), self.context), self.pad_id, dtype=torch.int32)
        for start in range(0, len(texts), _CHUNK):
            encoded = self._inner.encode_batch(list(texts[start : start + _CHUNK]))
            for row, found in enumerate(encoded, start):
                ids = found.ids
                if not ids or ids[-1] != self.end_id:  # a given tokenizer that adds no end token
                    ids = [*ids[: self.context - 1], self.end_id]
                tokens_MT[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        return tokens_MT

    def decode(self, tokens: Tensor) -> str:
        """The text of (T,) ids, without special tokens."""
        return str(self._inner.decode(tokens.tolist(), skip_special_tokens=True)).strip()

    def save(self, path: str | Path) -> None:
        """Writes tokenizer.json atomically."""
        write_text(Path(path), self._inner.to_str(pretty=False))

    def _find(self, names: Iterable[str]) -> int | None:
        """The id of the first of these tokens that the tokenizer knows."""
        found = (self._inner.token_to_id(name) for name in names)
        return next((token for token in found if token is not None), None)


def train_tokenizer(captions: Iterable[str], *, vocab_size: int, context: int) -> Tokenizer:
    """Learns the pairs from `captions`; the same captions give the same tokenizer.

    Texts are normalised to NFC and lower case, as in CLIP. The vocabulary is smaller if the
    captions have no more pairs that occur twice.

    Args:
        vocab_size: largest number of tokens: 3 special tokens, 256 bytes, and pairs.
        context: T.
    """
    if vocab_size < 259:
        raise UsageError(
            f"`vocab_size` (={vocab_size}) must be at least 259: 3 special tokens and all bytes"
        )
    library = _library()
    inner = library.Tokenizer(library.models.BPE())
    normalizers, pre = library.normalizers, library.pre_tokenizers
    spaces = normalizers.Replace(library.Regex(r"\s+"), " ")
    inner.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Lowercase(), spaces, normalizers.Strip()]
    )
    inner.pre_tokenizer = pre.ByteLevel(add_prefix_space=True)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = iter(captions)
    inner.train_from_iterator(iter(lambda: list(islice(texts, _CHUNK)), []), trainer)
    ends = [(name, inner.token_to_id(name)) for name in (START, END)]
    inner.post_processor = library.processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=ends
    )
    return Tokenizer(inner, context)


def read_tokenizer(path: str | Path, context: int) -> Tokenizer:
    """Reads a tokenizer.json, written by `Tokenizer.save` or by the library `tokenizers`, that has
    an end token."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no tokenizer at {path}; give a tokenizer.json")
    library = _library()
    try:
        inner = library.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare exceptions
        raise KinfolkError(
            f"{path} is not a readable tokenizer.json: {' '.join(str(error).split())}"
        ) from error
    return Tokenizer(inner, context)


def parse_tokenizer(text: str, context: int) -> Tokenizer:
    """The tokenizer of the text of a tokenizer.json that a library wrote."""
    return Tokenizer(_library().Tokenizer.from_str(text), context)


def _library() -> ModuleType:
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise UsageError(
            f"texts need the package tokenizers; {install_hint('tokenizers', 'text')}"
        ) from error
