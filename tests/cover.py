"""Fewer cases than a full product: every two values of different axes still meet."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

T = TypeVar("T")


def cover(cases: Iterable[T], parts: Callable[[T], Iterable[Hashable]]) -> list[T]:
    """Some of `cases` that together have all `parts` of all of them, chosen greedily and in a
    fixed order."""
    left = {number: (case, set(parts(case))) for number, case in enumerate(cases)}
    missing = set().union(*(found for _, found in left.values()))
    chosen: list[T] = []
    while missing:
        best = max(left, key=lambda number: (len(left[number][1] & missing), -number))
        case, found = left.pop(best)
        missing -= found
        chosen.append(case)
    return chosen


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of the values of several axes, such that every two values of different axes
    occur together.

    Example:
        >>> len(pairwise("abc", "xyz", (0, 1, 2)))
        9
    """
    places = product(*(range(len(axis)) for axis in axes))
    chosen = cover(places, lambda place: combinations(enumerate(place), 2))
    return [
        tuple(axis[number] for axis, number in zip(axes, place, strict=True))
        for place in sorted(chosen)
    ]
