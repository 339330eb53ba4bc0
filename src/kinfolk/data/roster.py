"""From the items of a source and what came of reading them to the table of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from kinfolk.data.cache import Contents
from kinfolk.data.captions import alike
from kinfolk.data.decode import Read
from kinfolk.foreign import shown
from kinfolk.data.groups import group_ids
from kinfolk.data.images import ImageData
from kinfolk.data.samples import Samples
from kinfolk.data.source import Source
from kinfolk.data.unchanged import arrange, content_change
from kinfolk.errors import KinfolkError


@final
class Roster:
    """The items of a source in the order of their ids, and the images they need.

    Attributes:
        images: item index of every image to read, in order of first use; items that share an image (`Item.same_as`) count once.
    """

    def __init__(self, source: Source) -> None:
        self._source, self._items = source, source.items()
        if not self._items:
            raise all_refused(source.name, source.refused)
        seen: set[str] = set()
        for item in self._items:
            if item.key in seen:
                raise KinfolkError(f"{source.name} has two samples with the key `{shown(item.key)}`; rename one of them")
            seen.add(item.key)
        self._order = arrange(self._items)
        self.images = list(dict.fromkeys(self._image_of(index) for index in self._order))

    def contents(self, reads: Sequence[Read]) -> Contents:
        """What a cache records: one row per good image, and all that was refused. `reads` belong to `images`."""
        good = [(index, read) for index, read in zip(self.images, reads, strict=True) if read.reason is None]
        bad = [
            (self._items[index].key, read.reason, read) for index, read in zip(self.images, reads, strict=True) if read.reason is not None
        ]
        refused = [(key, reason, read.size_bytes, read.modified_ns) for key, reason, read in bad]
        if not good:
            raise all_refused(self._source.name, [*self._source.refused, *((key, reason) for key, reason, *_ in refused)])
        samples = Samples(
            ids=np.arange(len(good)),
            keys=[self._items[index].key for index, _ in good],
            widths=np.array([read.width for _, read in good]),
            heights=np.array([read.height for _, read in good]),
            labels=None,
            classes=None,
            splits=[self._items[index].split for index, _ in good],
            sizes_bytes=np.array([read.size_bytes for _, read in good]),
            modified_ns=np.array([read.modified_ns for _, read in good]),
            digests=[read.digest for _, read in good],
        )
        return Contents(samples, list(self._source.refused), refused)

    def agrees(self, contents: Contents) -> bool:
        """Whether a cache with these contents holds exactly the images of this source. Labels are not its matter."""
        refused = {path: (size, time) for path, _, size, time in contents.refused}
        good = [index for index in self.images if self._items[index].key not in refused]
        bad = [index for index in self.images if self._items[index].key in refused]
        return (
            contents.unread == self._source.refused
            and len(bad) == len(refused)
            and all(self._source.stat(index) == refused[self._items[index].key] for index in bad)
            and contents.samples.keys == [self._items[index].key for index in good]
            and content_change(contents.samples, self._source, good) is None
        )

    def image_data(self, contents: Contents, cache: Tensor, keep: Callable[[Samples], Samples]) -> ImageData:
        """All samples with their pixels. `keep`: makes the compact form of the table."""
        reasons = {path: reason for path, reason, *_ in contents.refused}
        row_of = {key: row for row, key in enumerate(contents.samples.keys)}
        image_keys = [self._items[self._image_of(index)].key for index in self._order]
        good = [index for index, key in zip(self._order, image_keys, strict=True) if key in row_of]
        rows = np.array([row_of[key] for key in image_keys if key in row_of])
        bad = [(self._items[index].key, reasons[key]) for index, key in zip(self._order, image_keys, strict=True) if key in reasons]
        items, table = [self._items[index] for index in good], contents.samples
        labels = [self._source.label(index) for index in good]
        has_labels = any(label is not None for label in labels)
        captions = alike([item.caption for item in items]) if any(item.caption is not None for item in items) else None
        groups = [item.group for item in items] if any(item.group is not None for item in items) else None
        known = list(table.digests)
        digests = [known[row] for row in rows]
        samples = Samples(
            ids=np.arange(len(good)),
            keys=[item.key for item in items],
            widths=table.widths[rows],
            heights=table.heights[rows],
            labels=np.array([-1 if label is None else label for label in labels]) if has_labels else None,
            classes=self._source.classes,
            splits=[item.split for item in items],
            sizes_bytes=table.sizes_bytes[rows],
            modified_ns=table.modified_ns[rows],
            digests=digests,
            captions=captions,
            groups=groups,
            group_ids=None if captions is None and groups is None else group_ids(digests, captions, groups),
        )
        is_plain = len(rows) == len(cache) and bool((rows == np.arange(len(rows))).all())
        return ImageData(keep(samples), cache, None if is_plain else torch.from_numpy(rows), [*contents.unread, *bad])

    def _image_of(self, index: int) -> int:
        same_as = self._items[index].same_as
        return index if same_as is None else same_as


def all_refused(name: str, refused: Sequence[tuple[str, str]]) -> KinfolkError:
    """The error for a source without a single good image."""
    if not refused:
        return KinfolkError(f"{name} holds no images")
    path, reason = refused[0]
    return KinfolkError(f"all {len(refused):,} images of {name} were refused; the first is {shown(path)}: {reason}")
