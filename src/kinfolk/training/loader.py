"""The training batches of every epoch, as a function of seed, epoch and position.

Dimension key: B batch of this rank, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kinfolk.data.images import Transfer, transfer_batches
from kinfolk.data.stream import StreamedPixels, StreamOrder
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.seeding import generator

NUM_READERS = 4
"""Batches that are read at a time, of streamed data and for a GPU."""


class PixelSource(Protocol):
    """See `ImageData`."""

    @property
    def num_train(self) -> int: ...
    def pixels(self, ids: Tensor) -> Tensor: ...
    def aspect(self, ids: Tensor) -> Tensor: ...


Order = Callable[[torch.Generator, int], "Tensor | None"]
"""(generator, batch size) → the ids of an epoch, batch after batch, or None for a random order."""


class TextSource(Protocol):
    """See `TextData`."""

    def draw(self, ids: Tensor, uniform: Tensor) -> Tensor: ...
    def get_groups(self, ids: Tensor) -> dict[str, Tensor]: ...


def check_batch_size(batch_size: int, num_train: int, world_size: int) -> None:
    if batch_size > num_train:
        raise UsageError(
            f"`batch_size` (={batch_size}) must be at most the number of training samples"
            f" (={num_train})"
        )
    if batch_size % world_size:
        raise UsageError(
            f"`batch_size` (={batch_size}) must be a multiple of the number of devices"
            f" (={world_size}), which share it"
        )


class BatchLoader:
    """Yields this rank's part of every global batch, read ahead in threads: `pixels` (B, H, W, 3)
    uint8, `aspect`, `ids`, `epoch` and `step`; with `text` also `tokens` (B, T) of one caption for
    each sample. A global batch is `batch_size` ids of the epoch's permutation, of `order`, or of
    the shards of streamed data; rank r gets its r-th part. The last, smaller batch of an epoch is
    dropped, and so is an image of a stream that turns out to be corrupt."""

    def __init__(
        self,
        data: PixelSource,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        order: Order | None = None,
        text: TextSource | None = None,
        transfer: Transfer | None = None,
    ) -> None:
        check_batch_size(batch_size, data.num_train, world_size)
        self.data, self.batch_size, self.seed = data, batch_size, seed
        self.rank, self.world_size, self.order, self.text = rank, world_size, order, text
        self.transfer = Transfer(torch.device("cpu")) if transfer is None else transfer
        self._stream: StreamedPixels | None = getattr(data, "stream", None)
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        return self.data.num_train // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.position = epoch, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        read = partial(self._read, self._order(self.epoch), self.epoch)
        threads = 1 if self._stream is None and not self.transfer.is_ahead else NUM_READERS
        steps = range(self.position, len(self))
        for batch in transfer_batches(read, steps, self.transfer, threads):
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]

    def _order(self, epoch: int) -> Tensor | StreamOrder:
        chosen = None
        if self.order is not None:
            chosen = self.order(generator(self.seed, "batches", epoch), self.batch_size)
        if chosen is None and self._stream is not None:
            return self._stream.order(self.seed, epoch)
        if chosen is None:
            draw = generator(self.seed, "shuffle", epoch)
            return torch.randperm(self.data.num_train, generator=draw)
        assert len(chosen) == len(self) * self.batch_size, (
            "an order must have as many batches as the learning rate schedule"
        )
        return chosen

    def _read(self, order: Tensor | StreamOrder, epoch: int, step: int) -> dict[str, Any]:
        share = self.batch_size // self.world_size
        start = step * self.batch_size + self.rank * share
        ids = order[start : start + share]
        if self._stream is None:
            pixels, aspect = self.data.pixels(ids), self.data.aspect(ids)
            kept = torch.arange(len(ids))
        else:
            pixels, aspect, kept = self._stream.read(ids)
            if not len(pixels):
                raise KinfolkError(
                    f"all {len(ids)} images of batch {step + 1} of epoch {epoch + 1} were refused;"
                    " see the quarantine file"
                )
        ids = ids[kept]
        batch = {"pixels": pixels, "aspect": aspect, "ids": ids, "epoch": epoch, "step": step}
        if self.text is not None:  # drawn for the global batch, as in one process
            draw = generator(self.seed, "captions", epoch, step)
            uniform = torch.rand(self.batch_size, generator=draw)
            mine = uniform.chunk(self.world_size)[self.rank][kept]
            batch |= {"tokens": self.text.draw(ids, mine), **self.text.get_groups(ids)}
        return batch
