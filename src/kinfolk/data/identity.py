"""Which samples a state per sample belongs to: one digest of the whole list."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kinfolk.data.samples import Samples

_PIECE = 1 << 14


def samples_digest(samples: Samples) -> str:
    """32 hexadecimal digits of keys, splits, contents, labels, classes, captions and groups, in the order of ids."""
    state = hashlib.blake2b(digest_size=16)
    for texts in (samples.keys, samples.splits, samples.digests, samples.captions, samples.groups, samples.classes):
        _add(state, texts)
    labels = np.full(len(samples), -1) if samples.labels is None else samples.labels
    state.update(np.ascontiguousarray(labels, dtype="<i8").tobytes())
    return state.hexdigest()


def _add(state: hashlib.blake2b, texts: Iterable[object] | None) -> None:
    """No two columns have the same bytes: each text stands with its quotes and escapes, each column with its end."""
    rest = iter(texts if texts is not None else ())
    while piece := list(islice(rest, _PIECE)):
        state.update("\n".join(map(repr, piece)).encode("utf-8", "surrogatepass") + b"\n")
    state.update(b"none" if texts is None else b"end")
