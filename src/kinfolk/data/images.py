"""The prepared data set: pixels, labels and aspect ratios by sample id."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from kinfolk.data.sample_table import Samples, TextColumn

if TYPE_CHECKING:
    from kinfolk.data.stream import StreamedPixels
    from kinfolk.data.text import PairTexts


@final
class ImageData:
    """All images as uint8, in memory, memory-mapped or streamed.

    Args:
        samples: ids are positions; training samples come first.
        cache: (R, H, W, 3) uint8; for streamed data, the reader of images.
        rows: (N,) the row of the cache of each sample, if samples share images.
        quarantine: (path, reason) of every refused image.

    Attributes: folder: of the pixel cache; None if the pixels are in memory. verify: raises if rows
    of the cache are damaged. texts: of text pairs, which have no images: `pixels` are then (B, T)
    tokens of the anchors.
    """

    folder: Path | None = None
    verify: Callable[[Tensor], None] | None = None
    texts: PairTexts | None = None

    def __init__(
        self,
        samples: Samples,
        cache: Tensor | StreamedPixels,
        rows: Tensor | None,
        quarantine: list[tuple[str, str]],
    ) -> None:
        self.samples, self.quarantine, self.rows = samples, quarantine, rows
        self.stream = None if isinstance(cache, Tensor) else cache
        self._cache = (
            cache
            if isinstance(cache, Tensor)
            else torch.empty((0, *cache.shape[1:]), dtype=torch.uint8)
        )
        self.height, self.width = int(cache.shape[1]), int(cache.shape[2])
        self.num_train = samples.num_train
        self.classes = samples.classes
        self.labels, self.groups = (
            None if numbers is None else torch.from_numpy(numbers.astype(np.int64))
            for numbers in (samples.labels, samples.group_ids)
        )

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        return (
            f"<ImageData of {len(self):,} images ({self.num_train:,} for training),"
            f" {self.height} × {self.width}, {len(self.quarantine):,} refused>"
        )

    @property
    def num_ids(self) -> int:
        """Number of ids that state is kept for: of the training samples and explicit negative
        texts."""
        return self.num_train + (0 if self.texts is None else len(self.texts.negatives))

    def of_ids(self, values: Tensor) -> Tensor:
        """(num_ids,) of (N,) values: those of the training samples, and −1 for other ids."""
        return nn.functional.pad(
            values[: self.num_train], (0, self.num_ids - self.num_train), value=-1
        )

    def pixels(self, ids: Tensor) -> Tensor:
        """(B, H, W, 3) uint8, contiguous: the images of `ids` (B,)."""
        ids = ids.to("cpu", torch.int64)
        if self.texts is not None:
            return self.texts.anchors(ids)
        if self.stream is not None:
            return self.stream.pixels(ids)
        rows = ids if self.rows is None else self.rows.index_select(0, ids)
        if self.verify is not None:
            self.verify(rows)
        return self._cache.index_select(0, rows)

    def at(self, ids: npt.NDArray[np.int64]) -> ImageData:
        """The images of `ids` (B,) as a data set with ids from zero. Not for streamed data."""
        rows = torch.from_numpy(ids)
        shared = rows if self.rows is None else self.rows.index_select(0, rows)
        found = ImageData(self.samples.at(ids), self._cache, shared, self.quarantine)
        found.folder, found.verify = self.folder, self.verify
        found.texts = None if self.texts is None else self.texts.at(found.samples, rows)
        return found

    def distinct(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(I,) positions in `ids` (B,) of the first sample of each distinct image, and (B,) which
        of these each is a copy of."""
        # their bytes are not known in advance, so each counts as distinct
        if self.stream is not None:
            return torch.arange(len(ids)), torch.arange(len(ids))
        contents = TextColumn.of(self.samples.digests).numbers[ids.cpu().numpy()]
        numbers, of_B = torch.unique(torch.from_numpy(contents), return_inverse=True)
        first = torch.full_like(numbers, len(ids))
        return first.scatter_reduce(0, of_B, torch.arange(len(ids)), "amin"), of_B

    def once(self, ids: Tensor) -> Tensor:
        """`ids` without later copies of the same image, in their order."""
        return ids[self.distinct(ids)[0].sort().values.to(ids.device)]

    def aspect(self, ids: Tensor) -> Tensor:
        """(B,) width / height of the original images."""
        if self.stream is not None:
            return self.stream.aspect(ids.cpu())
        rows, samples = ids.cpu().numpy(), self.samples
        widths = torch.from_numpy(samples.widths[rows].astype(np.float32))
        return widths / torch.from_numpy(samples.heights[rows].astype(np.float32))
