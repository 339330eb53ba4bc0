"""The training batches of every epoch, as a function of seed, epoch and position, so that no random
state has to be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kinfolk.data.stream import StreamedPixels, StreamOrder
from kinfolk.data.transfer import Transfer, transfer_batches
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.seeding import generator

NUM_READERS = 4
"""Batches that are read at the same time: of streamed data, so that no decoder waits for the last
image of a batch, and for a GPU."""


class PixelSource(Protocol):
    """What the loader needs from the data, e.g. `ImageData`."""

    @property
    def num_train(self) -> int: ...
    def pixels(self, ids: Tensor) -> Tensor: ...
    def aspect(self, ids: Tensor) -> Tensor: ...


Order = Callable[[torch.Generator, int], "Tensor | None"]
"""(generator, batch size) → the ids of an epoch, batch after batch, or None for a random order;
e.g. `Framework.batches`."""


class TextSource(Protocol):
    """What the loader needs from the captions, e.g. `TextData`."""

    def draw(self, ids: Tensor, uniform: Tensor) -> Tensor: ...
    def get_groups(self, ids: Tensor) -> dict[str, Tensor]: ...


def check_batch_size(batch_size: int, num_train: int, world_size: int) -> None:
    """Refuses a batch that is larger than the data, or that the ranks cannot share equally."""
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
    """Yields this rank's part of every joined batch, and can continue in the middle of an epoch.

    The joined batch of a step is `batch_size` ids of the epoch's permutation, or of `order`, which
    is called at the start of the epoch. Rank r gets the r-th part, so that the parts in the order
    of ranks are the batch that one process would have. The last, smaller batch of an epoch is
    dropped. Batches are read ahead in threads; for a GPU the next batch is also copied and prepared
    while the current one is computed (see `transfer.py`).

    Streamed data (`data.stream`) is read in the order of its shards. An image that turns out to be
    corrupt is left out of its batch, which is then smaller. The order does not depend on refused
    images, so a position always stands for the same samples.

    Args:
        data: pixels and aspect ratios by sample id.
        batch_size: over all ranks together.
        seed: of the training.
        rank, world_size: of this process.
        order: see `Order`; None: a random order.
        text: captions of the samples.
        transfer: copies the batches to the training device; None: they stay on the CPU.

    Yields:
        `pixels` (B, H, W, 3) uint8, `aspect` (B,), `ids` (B,), and `epoch` and `step` (within the
        epoch) as numbers; with `text` also `tokens` (B, T), of one caption for each sample, and
        what it knows of the samples, such as `groups` (B,).

    State: `epoch` and `position`, the number of batches of this epoch that have been yielded.
    """

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
        """Number of batches in a whole epoch, also after resuming in the middle of one."""
        return self.data.num_train // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Moves to the beginning of an epoch."""
        self.epoch, self.position = epoch, 0

    def ids(self, epoch: int, step: int) -> Tensor:
        """(B,) the sample ids of this rank in one step."""
        return self._part(self._order(epoch), step)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """From the current position to the end of the epoch. Position and epoch are read when the
        first batch is requested."""
        epoch, order = self.epoch, self._order(self.epoch)
        threads = 1 if self._stream is None and not self.transfer.is_ahead else NUM_READERS
        steps = range(self.position, len(self))
        for batch in transfer_batches(
            partial(self._read, order, epoch), steps, self.transfer, threads
        ):
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]

    def _order(self, epoch: int) -> Tensor | StreamOrder:
        chosen = (
            None
            if self.order is None
            else self.order(generator(self.seed, "batches", epoch), self.batch_size)
        )
        if chosen is None and self._stream is not None:
            return self._stream.order(self.seed, epoch)
        if chosen is None:
            return torch.randperm(
                self.data.num_train, generator=generator(self.seed, "shuffle", epoch)
            )
        assert len(chosen) == len(self) * self.batch_size, (
            "an order must have as many batches as the learning rate schedule"
        )
        return chosen

    def _part(self, order: Tensor | StreamOrder, step: int) -> Tensor:
        share = self.batch_size // self.world_size
        start = step * self.batch_size + self.rank * share
        return order[start : start + share]

    def _read(self, order: Tensor | StreamOrder, epoch: int, step: int) -> dict[str, Any]:
        ids = self._part(order, step)
        if self._stream is None:
            pixels, aspect, kept = (
                self.data.pixels(ids),
                self.data.aspect(ids),
                torch.arange(len(ids)),
            )
        else:
            pixels, aspect, kept = self._stream.read(ids)
            if not len(pixels):
                raise KinfolkError(
                    f"all {len(ids)} images of batch {step + 1} of epoch {epoch + 1} were refused;"
                    " see the quarantine file"
                )
        ids = ids[kept]
        batch = {"pixels": pixels, "aspect": aspect, "ids": ids, "epoch": epoch, "step": step}
        # drawn for the joined batch, so that the ranks' captions are those one process would have
        if self.text is not None:
            uniform = torch.rand(
                self.batch_size, generator=generator(self.seed, "captions", epoch, step)
            )
            share = self.batch_size // self.world_size
            mine = uniform[self.rank * share : (self.rank + 1) * share][kept]
            batch |= {"tokens": self.text.draw(ids, mine), **self.text.get_groups(ids)}
        return batch
