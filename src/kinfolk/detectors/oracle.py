"""Oracle: the labels themselves say who is kin. The upper bound of every detector, and the reference for precision and recall."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kinfolk.detectors.base import Detector, Found
from kinfolk.pairs import Block, Roles


class Oracle(Detector):
    """Kin are the candidates with the anchor's label.

    Attracted, it is SupCon. No state: labels are data, so they are not in `state_dict()`.

    Args:
        labels: (N,) integers, addressed by sample id; −1: unknown, never kin.

    Example:
        >>> import torch, kinfolk as kf
        >>> loss_fn = kf.NTXent(temperature=0.1, detector=kf.Oracle(torch.tensor([0, 1, 0])), action="attract")
        >>> loss_fn(torch.eye(3), torch.eye(3), torch.arange(3)).isfinite().item()
        True
    """

    paper: ClassVar[str] = "upper bound; attracted: Khosla et al., NeurIPS 2020"
    needs: ClassVar[str] = "labels"

    def __init__(self, labels: Tensor) -> None:
        super().__init__()
        if labels.ndim != 1 or labels.is_floating_point():
            raise ValueError(f"`labels` (={labels.dtype}, shape {tuple(labels.shape)}) must be integers of the shape (num_samples,)")
        self.labels: Tensor
        self.register_buffer("labels", labels.to(torch.int64), persistent=False)

    def find(self, block: Block) -> Found:
        row_R1, col_1C = self.labels[block.row_ids].unsqueeze(1), self.labels[block.candidate_ids].unsqueeze(0)
        return Found((Roles(kin_RC=(row_R1 == col_1C) & (row_R1 >= 0)),))

    def __repr__(self) -> str:
        return f"Oracle(labels=<{len(self.labels)} labels, {len(self.labels.unique())} distinct>)"  # type: ignore[no-untyped-call]
