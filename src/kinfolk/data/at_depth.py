"""A source whose labels are those at a depth of a hierarchy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

from kinfolk.data.cifar100 import SUPERCLASSES
from kinfolk.data.decode import Place
from kinfolk.data.hierarchy import CIFAR100, Hierarchy, open_hierarchy
from kinfolk.data.source import Item, Pixels, Source
from kinfolk.errors import KinfolkError, UsageError


def at_depth(source: Source, hierarchy: str | None, depth: int | None) -> Source:
    """The source with its labels replaced by those at `depth` of `hierarchy` (see `open_hierarchy`); as it is where neither is given."""
    if hierarchy is None and depth is None:
        return source
    if hierarchy is None or depth is None:
        raise UsageError("`hierarchy` and `depth` must be given together: the tree of classes, and where to cut it")
    return AtDepth(source, open_hierarchy(hierarchy), depth)


@final
class AtDepth(Source):
    """A source with the labels of another, replaced by those at a depth of a hierarchy. All else is the other's."""

    def __init__(self, source: Source, hierarchy: Hierarchy, depth: int) -> None:
        self._source = source
        classes = _classes(source, hierarchy)
        self._place, self.classes = hierarchy.at(classes, depth)
        self.name, self.refused, self.native_size = source.name, source.refused, source.native_size

    def items(self) -> Sequence[Item]:
        return self._source.items()

    def load(self, index: int) -> bytes | Pixels:
        return self._source.load(index)

    def label(self, index: int) -> int | None:
        label = self._source.label(index)
        return None if label is None or label < 0 else self._place[label]

    def path(self, index: int) -> Place | None:
        return self._source.path(index)

    def stat(self, index: int) -> tuple[int, int] | None:
        return self._source.stat(index)

    def keep(self, folder: str | Path) -> None:
        self._source.keep(folder)

    def release(self) -> None:
        self._source.release()


def _classes(source: Source, hierarchy: Hierarchy) -> list[str]:
    """The names of the source's classes: its own, or the numbers of its labels. CIFAR-100's numbers stand for its names, in their
    alphabetical order."""
    if source.classes is not None:
        return source.classes
    labels = [item.label for item in source.items() if item.label is not None]
    if not labels:
        raise UsageError(f"{source.name} has no labels that a hierarchy could replace; give labelled data")
    numbers = [str(number) for number in range(max(labels) + 1)]
    if hierarchy.name != CIFAR100:
        return numbers
    fine = sorted(name for members in SUPERCLASSES.values() for name in members)
    if len(numbers) > len(fine):
        raise KinfolkError(f"{source.name} has the label {numbers[-1]}, and CIFAR-100 has 100 classes; use a hierarchy of its own")
    return fine[: len(numbers)]
