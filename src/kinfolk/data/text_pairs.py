"""Tables of text pairs: anchor, positive and perhaps explicit negatives, as data of a training.

A pair is a sample. Its anchor takes the place of the image, so that everything that embeds images
embeds anchors, and its positive that of the caption. `Samples.captions` holds all texts of a pair:
(anchor, positive, negative, …). Texts become tokens when a batch is read; no tokens are kept.

Dimension key: N samples, B batch, K explicit negatives of each pair, T tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from kinfolk.data.decode import digest
from kinfolk.data.images import ImageData
from kinfolk.data.labels import Caption, group_ids, normalise_caption, to_text, why_refused
from kinfolk.data.sample_table import Samples
from kinfolk.data.source import Source, TableRows, all_refused, arrange
from kinfolk.data.text import Tokenizer
from kinfolk.errors import KinfolkError, UsageError, shown

NAMES = (("anchor", "positive"), ("sentence1", "sentence2"))
"""Names of the two columns of texts; the second is that of benchmarks of text similarity."""
_NEGATIVE = re.compile(r"negative(_\d+)?")
_MULTIPLE = 8


def text_columns(
    names: Sequence[str], anchor: str | None = None, positive: str | None = None
) -> tuple[str, str] | None:
    """The columns of anchors and positives in a table with the columns `names`; None if it has
    none. `anchor`, `positive`: names that a user gave."""
    for first, second in NAMES:
        found = anchor or first, positive or second
        if found[0] in names and found[1] in names:
            return found
    return None


def require_both(
    name: str, names: Sequence[str], image: str, anchor: str | None, positive: str | None
) -> None:
    """Raises if a table has one of the two columns of texts and not the other."""
    for pair in NAMES:
        given = (anchor or pair[0], positive or pair[1])
        missing = [column for column in given if column not in names]
        if len(missing) == 1:
            role = "anchor" if missing[0] == given[0] else "positive"
            present = next(column for column in given if column in names)
            raise UsageError(
                f"{name} has no column {image!r} of images, and has {present!r} but no column"
                f" {missing[0]!r}: a table of text pairs has the columns anchor and positive; its"
                f" columns are {', '.join(map(repr, names))}; another is chosen by --set"
                f" data.{role}_column=NAME"
            )


@final
class PairSource(Source):
    """The rows of a table of texts; see `open_pairs`. The origin of an item is its score: the
    similarity of the two texts by people, NaN where unknown, or None."""

    has_texts = True

    def load(self, index: int) -> bytes:
        return texts_of(self._items[index].caption)[0].encode()


def texts_of(caption: Caption | None) -> tuple[str, ...]:
    """(anchor, positive, negative, …) of a sample of `PairSource`."""
    assert isinstance(caption, tuple), "a table of text pairs"
    return caption


def open_pairs(
    path: Path,
    rows: Mapping[str, list[Any]],
    texts: tuple[str, str],
    pick: Callable[[str], list[Any] | None],
) -> PairSource:
    """The source of a table of texts. A row with an empty text, or one that is not UTF-8, is
    refused by name.

    Args:
        rows: its columns. Those called negative, negative_1, … are explicit negatives, `score` is a
            similarity.
        texts: the columns of anchors and positives.
        pick: the values of the column for a role ("label", "group", "split"), if there is one.
    """
    name = f"`{path}`"
    columns = [*texts, *sorted((each for each in rows if _NEGATIVE.fullmatch(each)), key=_order)]
    number = len(rows[texts[0]])
    if not number:
        raise KinfolkError(f"{name} has no rows")
    annotations = {role: pick(role) for role in ("label", "group", "split")}
    made = TableRows(number, {**annotations, "caption": None}, name)
    scores = [_score(cell, name) for cell in rows["score"]] if "score" in rows else [None] * number
    for row in range(number):
        key = f"row/{row + 1}"
        cells = [rows[column][row] for column in columns]
        reasons = (
            _fault(cell, f"the text in the column {column!r}")
            for column, cell in zip(columns, cells, strict=True)
        )
        if (reason := next(filter(None, reasons), None)) is not None:
            made.refused.append((key, reason))
        else:
            made.add(row, key, scores[row], caption=tuple(str(to_text(cell)) for cell in cells))
    return PairSource(name, made.items, classes=made.classes, refused=made.refused)


def _fault(cell: Any, what: str) -> str | None:
    if isinstance(cell, list | tuple | dict):
        return f"{what} is a {type(cell).__name__}, not one text"
    return why_refused(to_text(cell), what, None)


def _order(column: str) -> int:
    return int(column.partition("_")[2] or 0)


def _score(cell: Any, name: str) -> float:
    try:
        return math.nan if cell is None or cell == "" else float(cell)
    except (TypeError, ValueError):
        raise KinfolkError(
            f"{name} has the score {shown(repr(cell))}; the column `score` must hold numbers"
        ) from None


def read_pairs(source: Source) -> ImageData:
    """The samples of a `PairSource`. Nothing is tokenised before `PairTexts.tokenizer` is set."""
    items = source.items()
    if not items:
        raise all_refused(source.name, source.refused, "rows")
    order = arrange(items)
    pairs = [texts_of(items[index].caption) for index in order]
    labels = [-1 if (label := source.label(index)) is None else label for index in order]
    digests = [digest(texts[0].encode()) for texts in pairs]
    groups = [items[index].group for index in order]
    scores = [items[index].origin for index in order]
    given = groups if any(group is not None for group in groups) else None
    samples = Samples(
        ids=np.arange(len(order)),
        keys=[items[index].key for index in order],
        widths=np.ones(len(order), dtype=np.int64),
        heights=np.ones(len(order), dtype=np.int64),
        labels=np.array(labels) if max(labels) >= 0 else None,
        classes=source.classes,
        splits=[items[index].split for index in order],
        sizes_bytes=np.array([len(texts[0].encode()) for texts in pairs]),
        modified_ns=np.zeros(len(order), dtype=np.int64),
        digests=digests,
        captions=pairs,
        groups=given,
        group_ids=group_ids(digests, [texts[:2] for texts in pairs], given),
    )
    data = ImageData(samples, torch.empty((0, 1, 1, 3), dtype=torch.uint8), None, source.refused)
    data.texts = PairTexts(samples, None if None in scores else torch.tensor(scores))
    return data


@final
class PairTexts:
    """The texts of all pairs as tokens, batch by batch.

    Args:
        samples: the table of samples, with (anchor, positive, negative, …) as captions.
        scores: (N,) similarities by people, if there are any.

    Attributes:
        tokenizer: must be set before tokens are read.
        groups: (N,) known positives: samples that share a text or a group.
    """

    tokenizer: Tokenizer | None = None

    def __init__(self, samples: Samples, scores: Tensor | None = None) -> None:
        assert samples.captions is not None
        assert samples.group_ids is not None
        self._pairs, self.scores = samples.captions, scores
        self.groups = torch.from_numpy(samples.group_ids.astype(np.int64))
        self.num_train = samples.num_train

    def of(self, ids: Tensor) -> list[tuple[str, ...]]:
        """(anchor, positive, negative, …) of each of `ids` (B,)."""
        return [texts_of(self._pairs[sample]) for sample in ids.tolist()]

    def anchors(self, ids: Tensor) -> Tensor:
        """(B, T) tokens of the anchors of `ids` (B,)."""
        return self._tokens([texts[0] for texts in self.of(ids)])

    def draw(self, ids: Tensor, uniform: Tensor) -> Tensor:
        """(B, 1 + K, T) tokens of the positives and explicit negatives of `ids` (B,). Nothing is
        drawn: a pair has one positive."""
        rows = [texts[1:] for texts in self.of(ids)]
        tokens = self._tokens([text for row in rows for text in row])
        return tokens.view(len(rows), -1, tokens.shape[1])

    def known(self, ids: Tensor) -> dict[str, Tensor]:
        """What else the loss needs: `groups` (B,), and `negative_ids` (B, K) if there are explicit
        negatives."""
        negatives = {} if self.negative_ids is None else {"negative_ids": self.negative_ids[ids]}
        return {"groups": self.groups[ids], **negatives}

    @cached_property
    def negative_ids(self) -> Tensor | None:
        """(N, K) ids of the explicit negatives of the training pairs: that of the first training
        pair with this text, or one from N on; None without explicit negatives."""
        return self._numbered[0]

    @property
    def negatives(self) -> list[str]:
        """The texts with ids from N on, in their order."""
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
        ids: list[list[int]] = []
        for texts in pairs:
            row = []
            for text in texts[2:]:
                place = known.setdefault(normalise_caption(text), self.num_train + len(others))
                if place == self.num_train + len(others):
                    others.append(text)
                row.append(place)
            ids.append(row)
        return torch.tensor(ids), others

    def at(self, samples: Samples, rows: Tensor) -> PairTexts:
        """The texts of some samples: `samples` is the table at `rows`."""
        found = PairTexts(samples, None if self.scores is None else self.scores[rows])
        found.tokenizer = self.tokenizer
        return found

    def _tokens(self, texts: list[str]) -> Tensor:
        if self.tokenizer is None:
            raise UsageError(
                "these are texts, and this encoder takes images; give a run of the method pairs, or"
                " st/NAME"
            )
        return cut(self.tokenizer.encode(texts), self.tokenizer.end_id)


@final
class NumberedTexts:
    """All texts that have an id in a training, for `Refresh`: the anchors of the training pairs,
    then the explicit negatives.

    Args:
        texts: of the training.
    """

    stream: None = None

    def __init__(self, texts: PairTexts) -> None:
        self.texts, self.num_train = texts, texts.num_train + len(texts.negatives)

    def __len__(self) -> int:
        return self.num_train

    def pixels(self, ids: Tensor) -> Tensor:
        """(B, T) tokens."""
        first = self.texts.num_train
        anchors = iter(self.texts.of(ids[ids < first]))
        chosen = [
            next(anchors)[0] if sample < first else self.texts.negatives[sample - first]
            for sample in ids.tolist()
        ]
        return self.texts._tokens(chosen)

    def aspect(self, ids: Tensor) -> Tensor:
        """(B,) ones."""
        return torch.ones(len(ids))


@final
class TextViews:
    """In place of the views of images: tokens stay as they are. Two views of one text differ by
    the dropout of the encoder alone."""

    size = 1

    def __call__(
        self,
        tokens: Tensor,
        generator: torch.Generator | None = None,
        aspect: Tensor | None = None,
        num_views: int = 1,
        weak: tuple[int, ...] = (),
    ) -> Tensor:
        """(V, B, T)."""
        return tokens.expand(num_views, *tokens.shape)

    def evaluate(self, tokens: Tensor, aspect: Tensor | None = None) -> Tensor:
        """(B, T)."""
        return tokens

    def config(self) -> dict[str, Any]:
        """Nothing can be set."""
        return {}


def cut(tokens_BT: Tensor, end_id: int) -> Tensor:
    """The tokens without columns after the end of the longest text, rounded up to a multiple of
    8."""
    longest = int((tokens_BT == end_id).to(torch.uint8).argmax(1).max()) + 1
    return tokens_BT[:, : _MULTIPLE * math.ceil(longest / _MULTIPLE)]
