"""The queue of MoCo.

Dimension key: Q places of the queue, D embedding, b rows of a push, of all ranks together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kinfolk import distributed
from kinfolk.errors import require, require_at_least
from kinfolk.stores.per_sample import Exact, is_broken, refuse_recomputation, unless_broken


class Queue(Exact):
    """The last Q features that were pushed, those of all ranks in the order of ranks; fewer while
    it is not full.

    Args:
        size, dim: Q and D.

    State: `features` (Q, D), `ids` (Q,) with −1 for an empty place, `pointer` to the place of the
    next row, `filled` places.

    Example:
        >>> queue = Queue(size=3, dim=2)
        >>> queue.push(torch.eye(2), torch.tensor([7, 8]))
        >>> queue.push(torch.eye(2), torch.tensor([9, 7]))
        >>> queue.entries()[1].tolist()
        [7, 8, 9]
    """

    on_host = ("pointer", "filled")
    features: Tensor
    ids: Tensor
    pointer: Tensor
    filled: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        require_at_least(1, size=size, dim=dim)
        self.size, self.dim = size, dim
        self.register_buffer("features", torch.zeros(size, dim))
        self.register_buffer("ids", torch.full((size,), -1))
        self.register_buffer("pointer", torch.tensor(0))
        self.register_buffer("filled", torch.tensor(0))

    def __len__(self) -> int:
        return int(self.filled)

    def entries(self) -> tuple[Tensor, Tensor]:
        """(F, D) features and (F,) ids of the F filled places; views."""
        return self.features[: len(self)], self.ids[: len(self)]

    def candidates(self, features: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The entries; of an empty queue, the rows of all ranks that are about to enter it."""
        if len(self):
            return self.entries()
        features, ids = distributed.gather_all(features, ids)
        return features, ids

    @torch.no_grad()
    def push(self, features: Tensor, ids: Tensor, is_finite: Tensor | None = None) -> None:
        """Appends (b, D) rows with their ids (b,), those of all ranks; of more than Q rows the last
        Q remain. On an accelerator the places of a broken step stay as they were, and count as
        filled."""
        must = f"of the shape ({len(ids)}, {self.dim}): a row for each of `ids`"
        fits = features.shape == (*ids.shape, self.dim) and ids.ndim == 1
        require(fits, "features", tuple(features.shape), must)
        refuse_recomputation("a loss over a queue")
        if is_broken(is_finite):
            return
        features, ids = distributed.gather_all(features, ids)
        number = len(ids)
        places = torch.arange(number, device=ids.device)[-self.size :] + int(self.pointer)
        places %= self.size
        new = features[-self.size :].to(self.features.dtype)
        self.features[places] = unless_broken(is_finite, new, self.features[places])
        self.ids[places] = unless_broken(is_finite, ids[-self.size :], self.ids[places])
        self.pointer.add_(number).remainder_(self.size)
        self.filled.add_(number).clamp_(max=self.size)

    def sizes_of(self) -> Mapping[str, Mapping[str, int]]:
        return {"features": {"size": self.size, "dim": self.dim}}

    def __repr__(self) -> str:
        return f"Queue(size={self.size}, dim={self.dim})"
