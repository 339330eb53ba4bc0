"""Captions as they are written, and which of them can't be used."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

LONGEST = 10_000
"""A caption of so many characters, or more, is a document or a mistake."""

Caption = str | tuple[str, ...]
"""The caption of a sample, or several, of which one is drawn at each visit."""


def all_of(caption: Caption | None) -> tuple[str, ...]:
    """The captions of one sample, none or more."""
    return () if caption is None else (caption,) if isinstance(caption, str) else caption


def normalised(caption: str) -> str:
    """What two captions must share to be the same: composed Unicode (NFC), lower case, single spaces."""
    return " ".join(unicodedata.normalize("NFC", caption).lower().split())


def why_refused(caption: str | None) -> str | None:
    """The reason why a caption can't be used, or None. Bytes that are not UTF-8 stand in it as lone surrogates."""
    if caption is None or not caption.strip():
        return "the caption is empty"
    if len(caption) >= LONGEST:
        return f"the caption has {len(caption):,} characters; it must have fewer than {LONGEST:,}"
    if not is_text(caption):
        return "the caption is not valid UTF-8"
    if not any(letter.isprintable() and not letter.isspace() for letter in caption):
        return "the caption is empty: nothing in it can be seen"
    return None


def sort_out(value: Any) -> tuple[Caption | None, list[tuple[int, str]]]:
    """The usable part of a cell, and (number, reason) of each of its captions that is not; number 0 is the cell as a whole.

    A cell with a list has several captions, those that are good stay. A cell without a good one has none.
    """
    if not isinstance(value, list | tuple):
        text = decoded(value)
        reason = why_refused(text)
        return (text, []) if reason is None else (None, [(0, reason)])
    texts = [decoded(each) for each in value]
    faults = [(number, reason) for number, text in enumerate(texts, 1) if (reason := why_refused(text)) is not None]
    bad = {number for number, _ in faults}
    good = tuple(text for number, text in enumerate(texts, 1) if text is not None and number not in bad)
    return (good, faults) if good else (None, [*faults, (0, "it has no caption")])


def decoded(value: Any) -> str | None:
    """A cell as text: bytes as UTF-8, with lone surrogates for what is none."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return None if value is None or value != value else str(value)


def is_text(value: str) -> bool:
    """Whether every table can hold it: no lone surrogates."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def alike(captions: Sequence[Caption | None]) -> list[Caption | None]:
    """All of one kind: where a sample has several captions, a single one is a tuple too."""
    if not any(isinstance(caption, tuple) for caption in captions):
        return list(captions)
    return [None if caption is None else all_of(caption) for caption in captions]
