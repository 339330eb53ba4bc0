"""Which samples a state per sample belongs to: one digest of the whole list."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from kinfolk.data.text_column import TextColumn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kinfolk.data.samples import Samples

_PIECE = 1 << 16


def samples_digest(samples: Samples) -> str:
    """32 hexadecimal digits of keys, splits, contents, sizes, labels, classes, captions and groups, in the order of ids. Of streamed data,
    whose contents are not known, the sizes stand for them. How the table is kept, in lists or in columns, makes no difference."""
    state = hashlib.blake2b(digest_size=16)
    state.update(repr(samples.classes).encode("utf-8", "surrogatepass"))
    for texts in (samples.keys, samples.splits, samples.digests, samples.captions, samples.groups):
        _add(state, texts)
    labels = np.full(len(samples), -1) if samples.labels is None else samples.labels
    for numbers in (labels, samples.sizes_bytes):
        state.update(np.ascontiguousarray(numbers, dtype="<i8").tobytes())
    return state.hexdigest()


def _add(state: hashlib.blake2b, texts: Sequence[Any] | None) -> None:
    """No two columns have the same bytes: lengths come before the texts, piece by piece."""
    if texts is None:
        state.update(b"none")
        return
    column = TextColumn.of(texts)
    state.update(b"column" + len(column).to_bytes(8, "little"))
    for start in range(0, len(column), _PIECE):
        for part in column[start : start + _PIECE].plain():
            state.update(part)
