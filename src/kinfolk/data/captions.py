"""Captions: which of them can be used, when two are the same, and columns of texts in Arrow's
compact layout.

A `TextColumn` is one block of characters instead of a Python object per text; processes share it if
the block is a memory-mapped file.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, final, overload

import numpy as np
import numpy.typing as npt

_CHUNK = 1 << 16
_LONGEST = (1 << 31) - 1
_DIGEST = re.compile("[0-9a-f]{16}")


@final
class TextColumn(Sequence[Any]):
    """A column that reads like a list of texts, with None for a missing one. Lists of texts read as
    tuples, eight bytes as 16 hex digits.

    Args:
        array: of strings, dictionary-encoded strings, lists of strings, or eight bytes each.

    Example:
        >>> column = TextColumn.of(["a", None, "b"])
        >>> column[2], list(column[:2]), column == ["a", None, "b"]
        ('b', ['a', None], True)
    """

    def __init__(self, array: Any) -> None:
        self.array = array

    @classmethod
    def of(cls, values: Sequence[Any], *, few: bool = False) -> TextColumn:
        """The compact form of any sequence of texts. `few`: there are few different ones, so each
        is stored as a number."""
        import pyarrow as pa

        if isinstance(values, TextColumn):
            return values
        if any(isinstance(value, tuple) for value in values):
            return cls(_single(pa.array(values, pa.large_list(pa.large_string()))))
        if len(values) and all(
            isinstance(value, str) and _DIGEST.fullmatch(value) for value in values
        ):
            return cls(_single(pa.array([bytes.fromhex(value) for value in values], pa.binary(8))))
        array = _single(pa.array(values, pa.large_string()))
        if few:
            coded = _single(array.dictionary_encode())
            narrow = pa.int8() if len(coded.dictionary) < 128 else pa.int32()
            return cls(pa.DictionaryArray.from_arrays(coded.indices.cast(narrow), coded.dictionary))
        return cls(array.cast(pa.string()) if array.nbytes < _LONGEST else array)

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> TextColumn: ...
    def __getitem__(self, place: int | slice) -> Any:
        if not isinstance(place, slice):
            return _value(self.array[int(place)].as_py())
        start, stop, step = place.indices(len(self))
        return (
            TextColumn(self.array.slice(start, max(0, stop - start)))
            if step == 1
            else self.take(np.arange(start, stop, step))
        )

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), _CHUNK):
            yield from map(_value, self.array.slice(start, _CHUNK).to_pylist())

    def __eq__(self, other: object) -> bool:
        if (
            isinstance(other, TextColumn)
            and self.array.type == other.array.type
            and _dictionary(self) == _dictionary(other)
        ):
            return bool(self.array.equals(other.array))
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TextColumn({list(self[:4])!r}{'…' if len(self) > 4 else ''})"

    @property
    def nbytes(self) -> int:
        """Size of the column in bytes, in memory or in a mapped file."""
        return int(self.array.nbytes)

    def take(self, rows: npt.NDArray[np.int64]) -> TextColumn:
        """The texts at `rows`."""
        import pyarrow as pa

        return TextColumn(_single(self.array.take(pa.array(rows))))

    def rows_of(self, value: str) -> npt.NDArray[np.int64]:
        """The rows whose text is `value`, in order."""
        import pyarrow.compute as pc

        return np.flatnonzero(
            pc.fill_null(pc.equal(self.array, value), False).to_numpy(zero_copy_only=False)
        )

    def count(self, value: Any) -> int:
        """How often `value` occurs."""
        return (
            len(self.rows_of(value))
            if isinstance(value, str) and not _is_digest(self.array)
            else super().count(value)
        )

    def plain(self) -> list[bytes]:
        """The lengths of all texts (−1 for a missing one) and their characters, which do not depend
        on the layout of the column.

        For lists of texts, the lengths of the lists come first.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        if pa.types.is_list(self.array.type) or pa.types.is_large_list(self.array.type):
            return [
                _lengths(pc.list_value_length(self.array)),
                *TextColumn(self.array.flatten()).plain(),
            ]
        if _is_digest(self.array) and not self.array.null_count:
            start, number = self.array.offset, len(self)
            return [
                np.full(number, 16, dtype="<i8").tobytes(),
                bytes(self.array.buffers()[1][8 * start : 8 * (start + number)]).hex().encode(),
            ]
        texts = (
            pa.array(list(self), pa.large_string())
            if _is_digest(self.array)
            else self.array.cast(pa.large_string())
        )
        lengths = _lengths(pc.binary_length(texts))
        texts = texts.fill_null("")
        _, places, characters = texts.buffers()
        if characters is None or not len(texts):
            return [lengths]
        first, last = np.frombuffer(places, dtype=np.int64)[
            [texts.offset, texts.offset + len(texts)]
        ].tolist()
        return [lengths, bytes(characters[first:last])]

    @cached_property
    def numbers(self) -> npt.NDArray[np.int64]:
        """A number for each text, equal where the texts are equal; for eight bytes, the bytes
        themselves, without a copy."""
        if _is_digest(self.array) and not self.array.null_count:
            bytes_ = self.array.buffers()[1]
            return np.frombuffer(
                bytes_, dtype=np.int64, count=len(self), offset=8 * self.array.offset
            )
        return (
            np.unique(np.asarray([value or "" for value in self]), return_inverse=True)[1]
            .reshape(-1)
            .astype(np.int64)
        )


def _value(value: Any) -> Any:
    return (
        value.hex()
        if isinstance(value, bytes)
        else tuple(value)
        if isinstance(value, list)
        else value
    )


def _lengths(array: Any) -> bytes:
    return np.ascontiguousarray(
        array.fill_null(-1).to_numpy(zero_copy_only=False), dtype="<i8"
    ).tobytes()


def _is_digest(array: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_fixed_size_binary(array.type))


def _dictionary(column: TextColumn) -> Any:
    import pyarrow as pa

    return (
        column.array.dictionary.to_pylist() if pa.types.is_dictionary(column.array.type) else None
    )


def _single(array: Any) -> Any:
    """The column as one array, also if it consists of several chunks."""
    import pyarrow as pa

    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


LONGEST = 10_000
"""A caption of at least this many characters is a document or a mistake."""

Caption = str | tuple[str, ...]
"""The caption of a sample, or several, of which one is drawn each time the sample is used."""


def captions_of(caption: Caption | None) -> tuple[str, ...]:
    """The captions of one sample, none or more."""
    return () if caption is None else (caption,) if isinstance(caption, str) else caption


def normalised(caption: str) -> str:
    """The form in which equal captions are the same: composed Unicode (NFC), lower case, single
    spaces."""
    return " ".join(unicodedata.normalize("NFC", caption).lower().split())


def why_refused(
    caption: str | None, what: str = "the caption", longest: int | None = LONGEST
) -> str | None:
    """The reason why a caption can't be used, or None. Bytes that are not UTF-8 are represented by
    lone surrogates. `what` names the text; `longest`: None allows any number of characters."""
    if caption is None or not caption.strip():
        return f"{what} is empty"
    if longest is not None and len(caption) >= longest:
        return f"{what} has {len(caption):,} characters; it must have fewer than {longest:,}"
    if not is_text(caption):
        return f"{what} is not valid UTF-8"
    if not any(letter.isprintable() and not letter.isspace() for letter in caption):
        return f"{what} is empty: it has no visible characters"
    return None


def usable_captions(value: Any) -> tuple[Caption | None, list[tuple[int, str]]]:
    """The usable captions of a cell, and (number, reason) of each caption that can't be used;
    number 0 is the cell as a whole.

    Of a list of captions the usable ones are kept.
    """
    if not isinstance(value, list | tuple):
        text = decoded(value)
        reason = why_refused(text)
        return (text, []) if reason is None else (None, [(0, reason)])
    texts = [decoded(each) for each in value]
    faults = [
        (number, reason)
        for number, text in enumerate(texts, 1)
        if (reason := why_refused(text)) is not None
    ]
    bad = {number for number, _ in faults}
    good = tuple(
        text for number, text in enumerate(texts, 1) if text is not None and number not in bad
    )
    return (good, faults) if good else (None, [*faults, (0, "it has no caption")])


def decoded(value: Any) -> str | None:
    """A cell as text. Bytes are read as UTF-8; those that are not UTF-8 become lone surrogates."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return None if value is None or value != value else str(value)


def is_text(value: str) -> bool:
    """Whether the text can be stored in any table, that is, has no lone surrogates."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def same_type(captions: Sequence[Caption | None]) -> list[Caption | None]:
    """The captions in one type: if any sample has several, a single caption becomes a tuple too."""
    if not any(isinstance(caption, tuple) for caption in captions):
        return list(captions)
    return [None if caption is None else captions_of(caption) for caption in captions]
