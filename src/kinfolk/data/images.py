"""The prepared data set, by sample id, and its batches on their way to the training device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

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
    """All images as uint8, in memory, memory-mapped or streamed. Ids are positions. `cache`: (R, H,
    W, 3), or the reader of streamed images; `rows`: (N,) the row of the cache of each sample, if
    samples share images; `quarantine`: (path, reason) of every refused image; `verify` raises if
    rows of a mapped cache are damaged; `texts`: of text pairs, whose `pixels` are (B, T) tokens of
    the anchors."""

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
        self._cache = cache if isinstance(cache, Tensor) else torch.empty(0)
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
        return self.num_train + (0 if self.texts is None else len(self.texts.negatives))

    def of_ids(self, values: Tensor) -> Tensor:
        """(num_ids,) of (N,): the values of training samples, and −1 for other ids."""
        train = values[: self.num_train]
        return nn.functional.pad(train, (0, self.num_ids - self.num_train), value=-1)

    def pixels(self, ids: Tensor) -> Tensor:
        """(B, H, W, 3) uint8, contiguous."""
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
        """The images of `ids` as a data set with ids from zero. Not for streamed data."""
        rows = torch.from_numpy(ids)
        shared = rows if self.rows is None else self.rows.index_select(0, rows)
        found = ImageData(self.samples.at(ids), self._cache, shared, self.quarantine)
        found.folder, found.verify = self.folder, self.verify
        found.texts = None if self.texts is None else self.texts.at(found.samples, rows)
        return found

    def distinct(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(I,) positions in `ids` (B,) of the first sample of each image, and (B,) which of these
        each is a copy of."""
        if self.stream is not None:  # their bytes are not known in advance
            return torch.arange(len(ids)), torch.arange(len(ids))
        contents = TextColumn.of(self.samples.digests).numbers[ids.cpu().numpy()]
        numbers, of_B = torch.unique(torch.from_numpy(contents), return_inverse=True)
        first = torch.full_like(numbers, len(ids))
        return first.scatter_reduce(0, of_B, torch.arange(len(ids)), "amin"), of_B

    def once(self, ids: Tensor) -> Tensor:
        return ids[self.distinct(ids)[0].sort().values.to(ids.device)]

    def aspect(self, ids: Tensor) -> Tensor:
        if self.stream is not None:
            return self.stream.aspect(ids.cpu())
        rows, samples = ids.cpu().numpy(), self.samples
        widths = torch.from_numpy(samples.widths[rows].astype(np.float32))
        return widths / torch.from_numpy(samples.heights[rows].astype(np.float32))


# Batches are read ahead in threads, pinned, and copied and prepared on a separate stream

Batch = dict[str, Any]


class SentBatch(NamedTuple):
    """A batch on the device, and the event after which it may be used."""

    batch: Batch
    event: Any


def _map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    return {k: change(value) if isinstance(value, Tensor) else value for k, value in batch.items()}


@final
class Transfer:
    """Copies batches to a device, and calls `prepare` with each there."""

    def __init__(
        self, device: torch.device, prepare: Callable[[Batch], Batch] | None = None
    ) -> None:
        self.device, self.prepare = device, prepare
        # whether it pays to send a batch before the one before it is finished
        self.is_ahead = device.type != "cpu"
        # Pinned memory and streams are CUDA's; other devices get plain copies.
        self.has_streams = device.type == "cuda" and torch.cuda.is_available()
        self.stream = torch.cuda.Stream(device) if self.has_streams else None  # type: ignore[no-untyped-call]

    def enter_thread(self) -> None:
        """A thread starts with GPU 0, where pinning would make a context of every rank."""
        if self.has_streams:
            torch.cuda.set_device(self.device)

    def pin(self, batch: Batch) -> Batch:
        return _map_tensors(batch, Tensor.pin_memory) if self.has_streams else batch

    def send(self, batch: Batch) -> SentBatch:
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            if self.device.type != "cpu":
                batch = _map_tensors(batch, lambda x: x.to(self.device, non_blocking=True))
            if self.prepare is not None:
                batch = self.prepare(batch)
            event = None if self.stream is None else self.stream.record_event()
        return SentBatch(batch, event)

    def receive(self, sent: SentBatch) -> Batch:
        """The current stream waits for the batch; the host does not."""
        if sent.event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(sent.event)
            for value in sent.batch.values():
                if isinstance(value, Tensor):
                    value.record_stream(current)  # its memory was allocated on the other stream
        return sent.batch


def transfer_batches(
    read: Callable[[int], Batch], steps: Sequence[int], transfer: Transfer, threads: int
) -> Generator[Batch, None, None]:
    """Batches in order, on the device; `threads` are read at a time."""
    todo = iter(steps)
    with ThreadPoolExecutor(threads, "kinfolk-batches", transfer.enter_thread) as reader:
        reading: deque[Future[Batch]] = deque()
        ahead: deque[SentBatch] = deque()

        def fetch(step: int) -> Batch:
            return transfer.pin(read(step))

        def fill() -> None:
            for step in islice(todo, threads - len(reading)):
                reading.append(reader.submit(fetch, step))

        def take() -> SentBatch:
            batch = reading.popleft().result()
            fill()
            return transfer.send(batch)

        fill()
        try:
            while ahead or reading:
                sent = ahead.popleft() if ahead else take()
                if transfer.is_ahead and reading and reading[0].done():
                    ahead.append(take())
                yield transfer.receive(sent)
        finally:
            for each in reading:
                each.cancel()


@final
class HostCopy:
    """`value` waits for this copy alone."""

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self._event: Any = None
        if tensor.device.type == "cuda" and torch.cuda.is_available():
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.current_stream(tensor.device).record_event()
        else:
            self._copy = tensor.to("cpu", non_blocking=tensor.device.type == "cuda")

    def value(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._copy


@final
class HostWriter:
    """Calls `write` one batch behind, so that it hardly waits."""

    def __init__(self, write: Callable[..., object]) -> None:
        self.write = write
        self._pending: list[HostCopy] = []

    def add(self, *results: Tensor) -> None:
        copies = [HostCopy(result) for result in results]
        self.finish()
        self._pending = copies
        if all(result.device.type == "cpu" for result in results):
            self.finish()

    def finish(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            self.write(*(copy.value() for copy in pending))
