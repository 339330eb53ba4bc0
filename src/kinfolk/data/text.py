"""Texts as tokens by sample id: captions of images, tables of text pairs, and the byte-pair
tokenizer (Sennrich et al., ACL 2016, on bytes).

A text pair is a sample: its anchor takes the place of the image, its positive that of the caption.
`Samples.captions` holds (anchor, positive, negative, …) of each pair.

Dimension key: N samples, M captions or texts, T tokens, B batch, K explicit negatives of each pair.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from kinfolk.data.decode import digest
from kinfolk.data.images import ImageData
from kinfolk.data.labels import (
    Caption,
    captions_of,
    group_ids,
    normalise_caption,
    to_text,
    why_refused,
)
from kinfolk.data.sample_table import Samples
from kinfolk.data.source import Source, TableRows, all_refused, arrange, tabulate
from kinfolk.errors import KinfolkError, UsageError, import_optional, require, short
from kinfolk.files import explain_read_errors, write_text

# Captions


@final
class TextData:
    """The captions of all samples. `groups` (N,): see `labels.group_ids`."""

    def __init__(self, samples: Samples, tokenizer: Tokenizer) -> None:
        require_captions(samples)
        assert samples.captions is not None
        assert samples.group_ids is not None
        self.tokenizer, self._captions = tokenizer, samples.captions
        self.groups = torch.from_numpy(samples.group_ids.astype(np.int64))

    def get_groups(self, ids: Tensor) -> dict[str, Tensor]:
        return {"groups": self.groups[ids]}

    def draw(self, ids: Tensor, uniform: Tensor) -> Tensor:
        """(B, T) a caption of each sample, chosen by numbers in [0, 1) (B,)."""
        several = [captions_of(self._captions[sample]) for sample in ids.tolist()]
        drawn = zip(several, uniform.tolist(), strict=True)
        texts = [texts[min(int(u * len(texts)), len(texts) - 1)] for texts, u in drawn]
        return self.tokenizer.encode(texts)

    def all_of(self, ids: Tensor) -> tuple[list[str], Tensor]:
        """All captions of `ids`, and (M,) the sample of each."""
        found = [(x, text) for x in ids.tolist() for text in captions_of(self._captions[x])]
        return [text for _, text in found], torch.tensor([x for x, _ in found], dtype=torch.int64)


def require_captions(samples: Samples) -> None:
    if samples.captions is None:
        raise UsageError(
            "the data has no captions; give a table with a column `caption` (or name it), or shards"
            " with .txt files"
        )


def every_caption(samples: Samples, split: str | None = None) -> Iterator[str]:
    for caption, name in zip(samples.captions or (), samples.splits, strict=True):
        if split is None or name == split:
            yield from captions_of(caption)


# Tokens

PAD, START, END = "<pad>", "<start>", "<end>"
_ENDS = (END, "<|endoftext|>", "<end_of_text>", "</s>", "[SEP]", "<eos>")
_PADS = (PAD, "[PAD]", "<|pad|>", "!")
_CHUNK = 4096


@final
class Tokenizer:
    """Text → (T,) token ids: start, byte pairs, end, padding. A longer text is cut, and its end
    token stays."""

    def __init__(self, inner: Any, context: int) -> None:
        rule = "at least 4: start, end and a text between them"
        require(context >= 4, "context", context, rule)
        self._inner, self.context = inner, context
        self.vocab_size = int(inner.get_vocab_size(with_added_tokens=True))
        ends, pads = (
            [token for name in names if (token := inner.token_to_id(name)) is not None]
            for names in (_ENDS, _PADS)
        )
        if not ends:
            raise KinfolkError(
                "the tokenizer has no token for the end of a text; it must know one of"
                f" {', '.join(_ENDS)}"
            )
        self.end_id, self.pad_id = ends[0], (*pads, ends[0])[0]
        inner.encode_special_tokens = True  # "<end>" in a caption is plain text, not the end token
        inner.no_padding()
        inner.enable_truncation(context)

    def encode(self, texts: Sequence[str]) -> Tensor:
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
        return str(self._inner.decode(tokens.tolist(), skip_special_tokens=True)).strip()

    def save(self, path: str | Path) -> None:
        write_text(Path(path), self._inner.to_str(pretty=False))


def train_tokenizer(captions: Iterable[str], *, vocab_size: int, context: int) -> Tokenizer:
    """Text is normalised to NFC and lower case, as in CLIP."""
    rule = "at least 259: 3 special tokens and all bytes"
    require(vocab_size >= 259, "vocab_size", vocab_size, rule)
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
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no tokenizer at {path}; give a tokenizer.json")
    with explain_read_errors(str(path), "tokenizer.json"):
        return parse_tokenizer(path.read_text(encoding="utf-8"), context)


def parse_tokenizer(text: str, context: int) -> Tokenizer:
    return Tokenizer(_library().Tokenizer.from_str(text), context)


def _library() -> ModuleType:
    return import_optional("tokenizers", "tokenizers", "text", "a text")


# Text pairs

NAMES = (("anchor", "positive"), ("sentence1", "sentence2"))
"""The two columns of texts; the second names are those of benchmarks of text similarity."""
_NEGATIVE = re.compile(r"negative(_\d+)?")
_MULTIPLE = 8


def text_columns(
    names: Sequence[str], anchor: str | None = None, positive: str | None = None
) -> tuple[str, str] | None:
    pairs = ((anchor or first, positive or second) for first, second in NAMES)
    return next((pair for pair in pairs if set(pair) <= set(names)), None)


@final
class PairSource(Source):
    """The origin of an item is its score: the similarity of the two texts by people, NaN where
    unknown, or None."""

    has_texts = True

    def load(self, index: int) -> bytes:
        return texts_of(self._items[index].caption)[0].encode()


def texts_of(caption: Caption | None) -> tuple[str, ...]:
    assert isinstance(caption, tuple), "a table of text pairs"
    return caption


def open_pairs(
    path: Path,
    rows: Mapping[str, list[Any]],
    texts: tuple[str, str],
    pick: Callable[[str], list[Any] | None],
) -> PairSource:
    """The source of a table with the anchors and positives `texts`, explicit negatives `negative`,
    `negative_1`, …, and a similarity `score`. `pick` returns the column of a role. A row with a
    text that can't be used is refused."""
    name = f"`{path}`"
    negatives = [column for column in rows if _NEGATIVE.fullmatch(column)]
    columns = [*texts, *sorted(negatives, key=lambda column: int(column.partition("_")[2] or 0))]
    number = len(rows[texts[0]])
    if not number:
        raise KinfolkError(f"{name} has no rows")
    annotations = {role: pick(role) for role in ("label", "group", "split")}
    made = TableRows(number, {**annotations, "caption": None}, name)
    scores = [_score(cell, name) for cell in rows["score"]] if "score" in rows else [None] * number
    for row in range(number):
        key = f"row/{row + 1}"
        cells = {f"the text in the column {column!r}": rows[column][row] for column in columns}
        reasons = (_fault(cell, what) for what, cell in cells.items())
        if (reason := next(filter(None, reasons), None)) is not None:
            made.refused.append((key, reason))
        else:
            captions = tuple(str(to_text(cell)) for cell in cells.values())
            made.add(row, key, scores[row], caption=captions)
    return PairSource(name, made.items, classes=made.classes, refused=made.refused)


def _fault(cell: Any, what: str) -> str | None:
    if isinstance(cell, list | tuple | dict):
        return f"{what} is a {type(cell).__name__}, not one text"
    return why_refused(to_text(cell), what, None)


def _score(cell: Any, name: str) -> float:
    try:
        return math.nan if cell is None or cell == "" else float(cell)
    except (TypeError, ValueError):
        raise KinfolkError(f"{name} has the score {short(repr(cell))}, not a number") from None


def read_pairs(source: Source) -> ImageData:
    if not source.items():
        raise all_refused(source.name, source.refused, "rows")
    items = [source.items()[index] for index in arrange(source.items())]
    pairs = [texts_of(item.caption) for item in items]
    anchors = [texts[0].encode() for texts in pairs]
    digests = [digest(anchor) for anchor in anchors]
    ones = np.ones(len(items), dtype=np.int64)
    samples = tabulate(
        items,
        source.classes,
        widths=ones,
        heights=ones,
        sizes_bytes=np.array([len(anchor) for anchor in anchors]),
        digests=digests,
    )
    groups = group_ids(digests, [texts[:2] for texts in pairs], samples.groups)
    samples, scores = replace(samples, group_ids=groups), [item.origin for item in items]
    data = ImageData(samples, torch.empty((0, 1, 1, 3), dtype=torch.uint8), None, source.refused)
    data.texts = PairTexts(samples, None if None in scores else torch.tensor(scores))
    return data


@final
class PairTexts:
    """All pairs, as tokens once `tokenizer` is set. `scores` (N,): similarities by people."""

    tokenizer: Tokenizer | None = None

    def __init__(self, samples: Samples, scores: Tensor | None = None) -> None:
        assert samples.captions is not None
        assert samples.group_ids is not None
        self._pairs, self.scores = samples.captions, scores
        self.groups = torch.from_numpy(samples.group_ids.astype(np.int64))
        self.num_train = samples.num_train

    def of(self, ids: Tensor) -> list[tuple[str, ...]]:
        return [texts_of(self._pairs[sample]) for sample in ids.tolist()]

    def anchors(self, ids: Tensor) -> Tensor:
        return self.tokens([texts[0] for texts in self.of(ids)])

    def draw(self, ids: Tensor, uniform: Tensor) -> Tensor:
        """(B, 1 + K, T) tokens of the positives and explicit negatives."""
        tokens = self.tokens([text for texts in self.of(ids) for text in texts[1:]])
        return tokens.view(len(ids), -1, tokens.shape[1])

    def get_groups(self, ids: Tensor) -> dict[str, Tensor]:
        negatives = {} if self.negative_ids is None else {"negative_ids": self.negative_ids[ids]}
        return {"groups": self.groups[ids], **negatives}

    @property
    def negative_ids(self) -> Tensor | None:
        """(N, K) of explicit negatives: the first training pair with this text, or an id from N
        on."""
        return self._numbered[0]

    @property
    def negatives(self) -> list[str]:
        return self._numbered[1]

    @cached_property
    def _numbered(self) -> tuple[Tensor | None, list[str]]:
        if len(texts_of(self._pairs[0])) == 2:
            return None, []
        pairs = [texts_of(texts) for texts in islice(self._pairs, self.num_train)]
        known: dict[str, int] = {}
        for part in (1, 0):
            for sample, texts in enumerate(pairs):
                known.setdefault(normalise_caption(texts[part]), sample)
        others: list[str] = []
        for text in (text for texts in pairs for text in texts[2:]):
            if (name := normalise_caption(text)) not in known:
                known[name] = self.num_train + len(others)
                others.append(text)
        ids = [[known[normalise_caption(text)] for text in texts[2:]] for texts in pairs]
        return torch.tensor(ids), others

    def at(self, samples: Samples, rows: Tensor) -> PairTexts:
        found = PairTexts(samples, None if self.scores is None else self.scores[rows])
        found.tokenizer = self.tokenizer
        return found

    def tokens(self, texts: list[str]) -> Tensor:
        if self.tokenizer is None:
            raise UsageError(
                "these are texts, and this encoder takes images; give a run of the method pairs, or"
                " st/NAME"
            )
        return cut(self.tokenizer.encode(texts), self.tokenizer.end_id)


@final
class NumberedTexts:
    """The anchors of the training pairs, then the explicit negatives."""

    stream: None = None

    def __init__(self, texts: PairTexts) -> None:
        self.texts, self.num_train = texts, texts.num_train + len(texts.negatives)

    def __len__(self) -> int:
        return self.num_train

    def pixels(self, ids: Tensor) -> Tensor:
        first = self.texts.num_train
        anchors = iter(self.texts.of(ids[ids < first]))
        chosen = [
            next(anchors)[0] if sample < first else self.texts.negatives[sample - first]
            for sample in ids.tolist()
        ]
        return self.texts.tokens(chosen)

    def aspect(self, ids: Tensor) -> Tensor:
        return torch.ones(len(ids))


@final
class TextViews:
    """In place of the views of images; two views of one text differ by dropout."""

    size = 1

    def __call__(
        self,
        tokens: Tensor,
        generator: torch.Generator | None = None,
        aspect: Tensor | None = None,
        num_views: int = 1,
        weak: tuple[int, ...] = (),
    ) -> Tensor:
        return tokens.expand(num_views, *tokens.shape)

    def evaluate(self, tokens: Tensor, aspect: Tensor | None = None) -> Tensor:
        return tokens

    def config(self) -> dict[str, Any]:
        return {}


def cut(tokens_BT: Tensor, end_id: int) -> Tensor:
    """Up to the end of the longest text, rounded up to a multiple of 8."""
    longest = int((tokens_BT == end_id).to(torch.uint8).argmax(1).max()) + 1
    return tokens_BT[:, : _MULTIPLE * math.ceil(longest / _MULTIPLE)]
