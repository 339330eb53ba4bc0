"""Where images come from, behind one interface."""

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
    """One sample as its source announces it.

    Args:
        key: unique within the source and stable.
        label: index of the class; None where there is none or where only `Source.label` can tell.
        caption: or several, as a tuple.
        same_as: index of the earlier item whose image this one shares (several captions of one image).
    """

    key: str
    label: int | None = None
    split: str = "train"
    caption: Caption | None = None
    group: str | None = None
    same_as: int | None = None


class Source(ABC):
    """Images with keys, splits and perhaps labels. Nothing is decoded before `load`.

    Attributes:
        name: what messages call it.
        classes: names of the labels, where known.
        refused: (path, reason) of what was refused without being read: missing, not a regular file.
        native_size: (height, width) where all images have one size, else None.
    """

    name: str
    classes: list[str] | None
    refused: list[tuple[str, str]]
    native_size: tuple[int, int] | None

    @abstractmethod
    def items(self) -> Sequence[Item]:
        """All samples, in a stable order."""

    @abstractmethod
    def load(self, index: int) -> bytes | Pixels:
        """Item `index`: the bytes of an image file, or its pixels (H, W) or (H, W, 1 | 3 | 4), uint8."""

    @abstractmethod
    def label(self, index: int) -> int | None:
        """The label of item `index`; asked after `load(index)`."""

    @abstractmethod
    def path(self, index: int) -> Place | None:
        """The file that holds item `index` and nothing else, or the part of a file, for workers to read; None where there is none."""

    @abstractmethod
    def stat(self, index: int) -> tuple[int, int] | None:
        """(size in bytes, time of modification in ns) of item `index`, without reading it; None where it can't be told."""

    def keep(self, folder: str | Path) -> None:  # noqa: B027
        """Leaves in a cache folder what would spare the next opening some work. Default: nothing."""

    def release(self) -> None:  # noqa: B027
        """Forgets its items: the table of samples has taken their place, and a training lasts. Default: nothing."""
