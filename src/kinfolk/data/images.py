"""The decoded data set: pixels by sample id."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import final

import numpy as np
import torch
from torch import Tensor

from kinfolk.data.samples import Samples


@final
class ImageData:
    """All images as uint8, in memory or memory-mapped; no file is opened after it is made.

    Args:
        samples: who is in it. Ids are positions; training samples come first.
        cache: (R, H, W, 3) uint8.
        rows: (N,) row of the cache of each sample, where samples share images; None: sample i is row i.
        quarantine: (path, reason) of every refused image.

    Attributes:
        verify: raises if rows of the cache are not as they were written; None where they are in memory.
    """

    verify: Callable[[Tensor], None] | None = None

    def __init__(self, samples: Samples, cache: Tensor, rows: Tensor | None, quarantine: list[tuple[str, str]]) -> None:
        self.samples, self.quarantine = samples, quarantine
        self._cache, self._rows = cache, rows
        self.height, self.width = int(cache.shape[1]), int(cache.shape[2])
        self.num_train = samples.num_train
        self.classes = samples.classes
        self.labels = None if samples.labels is None else torch.from_numpy(samples.labels.copy())
        self.groups = None if samples.group_ids is None else torch.from_numpy(samples.group_ids.copy())
        widths, heights = torch.from_numpy(samples.widths.copy()), torch.from_numpy(samples.heights.copy())
        self._aspects = widths.float() / heights.float()

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        size, refused = f"{self.height} × {self.width}", f"{len(self.quarantine):,} refused"
        return f"<ImageData of {len(self):,} images ({self.num_train:,} for training), {size}, {refused}>"

    def pixels(self, ids: Tensor) -> Tensor:
        """(B, H, W, 3) uint8, contiguous: the images of `ids` (B,), in one gather."""
        ids = ids.to("cpu", torch.int64)
        rows = ids if self._rows is None else self._rows.index_select(0, ids)
        if self.verify is not None:
            self.verify(rows)
        return self._cache.index_select(0, rows)

    def distinct(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(I,) places of the first of `ids` (B,) of each distinct image, by its bytes, and (B,) which of these each is a copy of."""
        numbers, of_B = torch.unique(self._numbers.index_select(0, ids.to("cpu", torch.int64)), return_inverse=True)
        return torch.full_like(numbers, len(ids)).scatter_reduce(0, of_B, torch.arange(len(ids)), "amin"), of_B

    def once(self, ids: Tensor) -> Tensor:
        """Those of `ids`, in their order, whose image is not that of one before: copies of a picture are no test of each other."""
        return ids[self.distinct(ids)[0].sort().values.to(ids.device)]

    @cached_property
    def _numbers(self) -> Tensor:
        return torch.from_numpy(np.unique(np.asarray(self.samples.digests), return_inverse=True)[1].reshape(-1))

    def aspect(self, ids: Tensor) -> Tensor:
        """(B,) width / height of the original images, before they were squashed into the cache."""
        return self._aspects.index_select(0, ids.to("cpu", torch.int64))
