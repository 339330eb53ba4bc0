"""Whether data has changed since a run began. Files whose size and modification time are unchanged
are not read again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kinfolk.data.captions import same_type
from kinfolk.data.decode import digest
from kinfolk.data.sample_table import Samples, first_unequal, key_difference, value_difference
from kinfolk.data.source import Item, Source
from kinfolk.errors import KinfolkError, shown

SPLIT_RANK = {"train": 0, "val": 1, "test": 2}


def check_unchanged(
    samples: Samples, source: Source, refused: Iterable[tuple[str, str]] = ()
) -> None:
    """Raises `KinfolkError` naming the first difference between `samples` (as stored) and `source`
    (as it is).

    Args:
        refused: the stored quarantine; the source still lists these files, but they do not count as
            added.
    """
    known, out = set(samples.keys), {path for path, _ in refused}
    items = source.items()
    order = [
        index
        for index in arrange(items)
        if items[index].key in known or items[index].key not in out
    ]
    found = key_difference(samples.keys, [items[index].key for index in order])
    found = (
        found
        or content_change(samples, source, order)
        or _annotation_change(samples, source, order)
    )
    if found is not None:
        raise KinfolkError(
            f"the data has changed since the run began: {found}; restore it, or start a new run"
        )


def arrange(items: Sequence[Item]) -> list[int]:
    """The items in the order of their ids: split "train" first, then "val", "test" and others by
    name; within a split in source order."""
    return sorted(
        range(len(items)),
        key=lambda index: (SPLIT_RANK.get(items[index].split, 3), items[index].split),
    )


def content_change(samples: Samples, source: Source, order: Sequence[int]) -> str | None:
    """A sentence on the first sample whose bytes have changed, or None; row r of `samples` is item
    `order[r]` of `source`."""
    items = source.items()
    sizes, times = samples.sizes_bytes.tolist(), samples.modified_ns.tolist()
    for row, index in enumerate(order):
        if items[index].same_as is not None:
            continue
        status = source.stat(index)
        if status is not None and times[row] != 0 and status == (sizes[row], times[row]):
            continue
        key = samples.keys[row]
        if status is None and source.path(index) is not None:
            return f"sample {row} ({shown(key)}) is now missing"
        if status is not None and status[0] != sizes[row]:
            return value_difference(row, key, "bytes", sizes[row], status[0])
        try:
            now = digest(source.load(index))
        except Exception as error:  # a Dataset may raise anything
            return f"sample {row} ({shown(key)}) can't be read any more: {error}"
        if now != samples.digests[row]:
            return value_difference(row, key, "digest", samples.digests[row], now)
    return None


def _annotation_change(samples: Samples, source: Source, order: Sequence[int]) -> str | None:
    items = source.items()
    if samples.classes != source.classes:
        return f"the classes were {samples.classes}, are now {source.classes}"
    labels = [-1] * len(samples) if samples.labels is None else samples.labels.tolist()
    columns: list[tuple[str, Sequence[Any], Sequence[Any]]] = [
        ("split", samples.splits, [items[index].split for index in order]),
        (
            "label",
            [None if label < 0 else label for label in labels],
            [source.label(index) for index in order],
        ),
        (
            "caption",
            samples.captions or [None] * len(order),
            same_type([items[index].caption for index in order]),
        ),
        ("group", samples.groups or [None] * len(order), [items[index].group for index in order]),
    ]
    for name, was, now in columns:
        if (row := first_unequal(was, now)) is not None:
            return value_difference(row, samples.keys[row], name, was[row], now[row])
    return None
