"""The embeddings that the training computes anyway, kept until all samples are looked at once.

Dimension key: N data set, D embedding, b samples of a write, V views.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kinfolk.stores.exact import Exact, check_ids, kept, means_by_id, skips


class Collected(Exact):
    """The mean over views of each sample's embedding as it was last computed; D is known from the first write on.

    Args:
        num_samples: N; ids are in [0, N).

    State: `features` (N, D), zero for a sample that was not seen; `seen` (N,).

    Example:
        >>> store = Collected(3)
        >>> store.write(torch.tensor([2]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> store.features.tolist()
        [[0.0, 0.0], [0.0, 0.0], [0.5, 0.5]]
    """

    features: Tensor
    seen: Tensor

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self.num_samples = num_samples
        self.register_buffer("features", torch.zeros(num_samples, 0))
        self.register_buffer("seen", torch.zeros(num_samples, dtype=torch.bool))

    @torch.no_grad()
    def write(self, ids: Tensor, anchors: Tensor, sound: Tensor | None = None) -> None:
        """Keeps the mean of the (b·V, D) `anchors`, sample-major, of each of `ids` (b,); of a sample that is there twice, the mean.

        `sound`: whether the step was; see `kept`."""
        check_ids(ids, self.num_samples)
        if not len(ids) or skips(sound):
            return
        mean_bD = anchors.view(len(ids), -1, anchors.shape[-1]).mean(1)
        if not self.features.shape[1]:
            self.features = mean_bD.new_zeros(self.num_samples, mean_bD.shape[1], dtype=torch.float32)
        self.features[ids] = kept(sound, means_by_id(ids, mean_bD.to(self.features.dtype)), self.features[ids])
        self.seen[ids] = True if sound is None else self.seen[ids] | sound

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        saved = state_dict.get(f"{prefix}features")
        if saved is not None and len(saved) != self.num_samples:
            error_msgs: list[str] = others[-1]
            error_msgs.append(
                f"`{prefix}features` holds {len(saved)} samples, but `num_samples` is {self.num_samples}: use the same data set"
            )
            return
        if saved is not None and saved.shape != self.features.shape:
            self.features = self.features.new_zeros(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *others)
