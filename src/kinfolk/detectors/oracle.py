"""Oracle: the labels themselves say who is kin. The upper bound of every detector, and the reference for precision and recall.

Dimension key: R rows of a block, C candidates, N data set.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kinfolk.detectors.base import Detector, Found
from kinfolk.kinship import Keys, Roles
from kinfolk.pairs import Block
from kinfolk.stores.exact import check_ids


class Oracle(Detector):
    """Kin are the candidates with the anchor's label.

    Attracted on NT-Xent, it is SupCon. No state: labels are data, so they are not in `state_dict()`.

    Args:
        labels: (N,) integers, addressed by sample id; below 0: unknown, never kin.

    Example:
        >>> import torch, kinfolk as kf
        >>> loss_fn = kf.NTXent(temperature=0.1, detector=kf.Oracle(torch.tensor([0, 1, 0])), action="attract")
        >>> loss_fn(torch.eye(3), torch.eye(3), torch.arange(3)).isfinite().item()
        True
    """

    paper: ClassVar[str] = "upper bound; attracted: Khosla et al., NeurIPS 2020"
    needs: ClassVar[str] = "labels"
    addresses: ClassVar[bool] = True

    def __init__(self, labels: Tensor) -> None:
        super().__init__()
        if labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool or not len(labels):
            raise ValueError(f"`labels` (={labels.dtype}, shape {tuple(labels.shape)}) must be integers of the shape (num_samples,)")
        self.labels: Tensor
        self.register_buffer("labels", labels.to(torch.int64), persistent=False)

    def find(self, block: Block) -> Found:
        return Found((Roles(kin=Keys(self._of(block.row_ids), self._of(block.candidate_ids))),))

    def _of(self, ids: Tensor) -> Tensor:
        """(1, …) the labels of samples, −1 where unknown."""
        check_ids(ids, len(self.labels), "there are that many `labels`")
        return self.labels[ids].clamp(min=-1).unsqueeze(0)

    def __repr__(self) -> str:
        return f"Oracle(labels=<{len(self.labels)} labels, {len(set(self.labels.tolist()) - {-1})} classes>)"
