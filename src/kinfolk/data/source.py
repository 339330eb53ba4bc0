"""The interface of all data sources: samples with keys, splits, labels and image bytes or
pixels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from kinfolk.data.captions import Caption
from kinfolk.data.decode import Place

Pixels = npt.NDArray[Any]


@dataclass(frozen=True)
class Item:
    """One sample of a source.

    Args:
        key: unique within the source and stable.
        label: index of the class; None if there is none or if only `Source.label` knows it.
        caption: a text, or several as a tuple.
        same_as: index of the earlier item whose image this one shares (several captions of one
            image).
    """

    key: str
    label: int | None = None
    split: str = "train"
    caption: Caption | None = None
    group: str | None = None
    same_as: int | None = None


class Source(ABC):
    """Images with keys, splits and perhaps labels. Nothing is read before `load`.

    Attributes:
        name: used in messages.
        classes: names of the labels, if known.
        refused: (path, reason) of what was refused without being read, e.g. because it is missing
            or not a regular file.
        native_size: (height, width) if all images have the same size, else None.
    """

    has_texts: bool = False
    """Whether its samples are text pairs instead of images; see `text_pairs`."""

    name: str
    classes: list[str] | None
    refused: list[tuple[str, str]]
    native_size: tuple[int, int] | None

    _items: list[Item]

    @abstractmethod
    def load(self, index: int) -> bytes | Pixels:
        """The bytes of the image file of item `index`, or its pixels (H, W) or (H, W, 1 | 3 | 4),
        uint8."""

    def items(self) -> Sequence[Item]:
        """All samples, in a stable order."""
        return self._items

    def label(self, index: int) -> int | None:
        """The label of item `index`; called after `load(index)`."""
        return self._items[index].label

    def path(self, index: int) -> Place | None:
        """The file, or part of a file, that holds item `index`, for workers to read; None if there
        is none."""
        return None

    def stat(self, index: int) -> tuple[int, int] | None:
        """(size in bytes, modification time in ns) of the file of item `index`, without reading it;
        None if unknown."""
        return None

    def keep(self, folder: str | Path) -> None:  # noqa: B027
        """Writes to a cache folder what makes the next opening faster. Default: nothing."""

    def release(self) -> None:
        """Frees the items once the table of samples has been made."""
        self._items = []
