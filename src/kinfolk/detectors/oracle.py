"""Oracle: kin are the samples with the same true label. A detector without mistakes, and the upper
bound for all others.

Dimension key: R rows of a block, C candidates, N data set.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from kinfolk.detectors.base import Detector, register
from kinfolk.errors import UsageError
from kinfolk.pairs import Block, Kin, is_integer, same_key


@register("oracle", "true labels; attracted: Khosla et al., NeurIPS 2020", "labels")
class Oracle(Detector):
    """Kin are the candidates with the anchor's label.

    Attracted on NT-Xent, it is SupCon. Labels are data, so they are not in `state_dict()`.

    Args:
        labels: (N,) integers by sample id; below 0: unknown, never kin.
        labels_file: a .npy file of such integers, instead of `labels`.

    Example:
        >>> import torch, kinfolk as kf
        >>> oracle = kf.Oracle(torch.tensor([0, 1, 0]))
        >>> loss_fn = kf.NTXentLoss(temperature=0.1, detector=oracle, action="attract")
        >>> loss_fn(torch.eye(3), torch.eye(3), torch.arange(3)).isfinite().item()
        True
    """

    num_samples: int

    def __init__(
        self, labels: Tensor | None = None, *, labels_file: str | Path | None = None
    ) -> None:
        super().__init__()
        if labels_file is not None:
            labels = _read_labels(Path(labels_file), None if labels is None else len(labels))
        if labels is None:
            raise UsageError(
                "the oracle needs labels and the data has none; use labelled data,"
                " --labels-from-folders, or `labels_file`"
            )
        if labels.ndim != 1 or not is_integer(labels) or not len(labels):
            raise ValueError(
                f"`labels` (={labels.dtype}, shape {tuple(labels.shape)}) must be integers of the"
                " shape (num_samples,)"
            )
        self.num_samples = len(labels)
        self.labels: Tensor
        self.register_buffer("labels", labels.to(torch.int64), persistent=False)

    def find(self, block: Block) -> Kin:
        return Kin(same_key(self.labels[block.row_ids], self.labels[block.candidate_ids]))

    def silent_reason(self, first_epoch: int = 0) -> str | None:
        shared = bool((torch.bincount(self.labels[self.labels >= 0]) > 1).any())
        why = "no two samples have the same known label; use data with labels of classes"
        return None if shared else why


def _read_labels(path: Path, expected: int | None) -> Tensor:
    """(N,) integers of a .npy file."""
    import numpy as np

    if not path.is_file():
        raise UsageError(
            f"`labels_file` (={path}) does not exist; give a .npy file with one integer for each"
            " training sample"
        )
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"`labels_file` (={path}) is not a readable .npy file of integers"
            f" ({' '.join(str(error).split())})"
        ) from error
    if (
        not isinstance(array, np.ndarray)
        or array.ndim != 1
        or array.dtype.kind not in "iu"
        or (expected or len(array)) != len(array)
    ):
        shape = getattr(array, "shape", None)
        raise UsageError(
            f"`labels_file` (={path}, shape {shape}) must hold an integer for each of the"
            f" {expected or 'N'} training samples, in order"
        )
    return torch.from_numpy(array.astype(np.int64))
