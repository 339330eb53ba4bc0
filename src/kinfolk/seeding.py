"""A random generator is a function of seed and key, so no random state has to be saved."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def derive_seed(seed: int, *key: int | str) -> int:
    """A 63-bit seed, equal in every process, on every platform and in every version."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (seed, *key):
        if isinstance(part, bool) or not isinstance(part, int | str):
            raise TypeError(
                f"`key` holds {part!r} ({type(part).__name__}); only int and str parts are stable"
                " across processes"
            )
        text = str(part).encode()
        digest.update(f"{'i' if isinstance(part, int) else 's'}{len(text)}:".encode() + text)
    return int.from_bytes(digest.digest(), "big") >> 1


def generator(seed: int, *key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """For example `generator(0, "views", epoch, step)`."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, *key))


def draw_ids(total: int, most: int, seed: int, *key: int | str) -> torch.Tensor:
    """Of all, or of `most` at random; ascending."""
    return torch.randperm(total, generator=generator(seed, *key))[:most].sort().values


def step_generator(seed: int, count: int) -> torch.Generator:
    """For the `count`-th step of a module that stores its random 62-bit `seed`."""
    return torch.Generator().manual_seed(seed ^ count)


@contextlib.contextmanager
def preserve_random_state() -> Iterator[None]:
    """GPUs are included only if CUDA is in use: reading their state would initialise CUDA, and the
    process could not fork."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices):
        yield
