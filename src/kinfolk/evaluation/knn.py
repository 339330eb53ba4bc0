"""Weighted k-nearest-neighbour classification, in blocks of rows.

Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination, 2018, section 3.4: each of the k most similar
training samples votes for its class with the weight exp(s / temperature), where s is the cosine similarity.

Dimension key: N training samples, M test samples, R rows of a block, F features, K neighbours, C classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from kinfolk.errors import KinfolkError

if TYPE_CHECKING:
    import numpy as np

    Array = Tensor | np.ndarray

_BLOCK_ELEMENTS = {"cpu": 1 << 23, "default": 1 << 28}
"""Similarities held at a time: 32 MB on the CPU, 1 GB on an accelerator."""


def knn_accuracy(
    train_x: Array,
    train_y: Array,
    test_x: Array | None = None,
    test_y: Array | None = None,
    k: int = 20,
    temperature: float = 0.1,
    device: torch.device | str | None = None,
) -> float:
    """Share of test samples that are classified correctly by their k nearest training samples, in [0, 1].

    Without a test part, each training sample is classified by all others (leave one out). Unlabelled samples (label −1) are ignored. If
    there are fewer than `k` training samples, all of them vote. A tie goes to the lower class.

    Args:
        train_x, test_x: (N, F), (M, F). They are normalised to unit length.
        train_y, test_y: (N,), (M,) classes; −1 means unlabelled.
        k: number of neighbours.
        temperature: temperature of the votes. With a small one, the nearest neighbour decides.
        device: where to compute; None: where `train_x` is.
    """
    if (test_x is None) != (test_y is None):
        raise ValueError("`test_x` and `test_y` must be given together")
    train_x, train_y = _labelled(train_x, train_y, "train")
    if test_x is None or test_y is None:
        return float((knn_predict(train_x, train_y, None, k, temperature, device) == train_y).double().mean())
    test_x, test_y = _labelled(test_x, test_y, "test")
    return float((knn_predict(train_x, train_y, test_x, k, temperature, device) == test_y.to(train_y.device)).double().mean())


@torch.no_grad()
def knn_predict(
    train_x: Array,
    train_y: Array,
    test_x: Array | None = None,
    k: int = 20,
    temperature: float = 0.1,
    device: torch.device | str | None = None,
) -> Tensor:
    """(M,) predicted class of each row of `test_x`. Without `test_x`: (N,), each row of `train_x` by all others. See `knn_accuracy`.

    The result is on the device of `train_x`, wherever it is computed."""
    if k < 1:
        raise ValueError(f"`k` (={k}) must be at least 1")
    if not temperature > 0:
        raise ValueError(f"`temperature` (={temperature}) must be above 0")
    train_x, train_y = _labelled(train_x, train_y, "train")
    leave_one_out = test_x is None
    if leave_one_out and len(train_x) < 2:
        raise KinfolkError("Nearest neighbours need at least two labelled samples, or a test part.")
    home = train_x.device
    train_NF = functional.normalize((train_x if device is None else train_x.to(device)).float(), dim=1)
    test_MF = train_NF if test_x is None else functional.normalize(_tensor(test_x).to(train_NF.device).float(), dim=1)
    if test_MF.shape[1] != train_NF.shape[1]:
        raise ValueError(f"`test_x` (={test_MF.shape[1]} features) must have as many as `train_x` (={train_NF.shape[1]})")
    if not bool(train_NF.isfinite().all() and test_MF.isfinite().all()):
        raise KinfolkError("The features contain values that are not finite, so nearest neighbours cannot be computed.")
    classes_C, class_N = torch.unique(train_y.to(train_NF.device), return_inverse=True)
    k = min(k, len(train_NF) - leave_one_out)
    rows = max(1, _BLOCK_ELEMENTS["cpu" if train_NF.device.type == "cpu" else "default"] // len(train_NF))
    predicted = []
    for start in range(0, len(test_MF), rows):
        sim_RN = test_MF[start : start + rows] @ train_NF.T
        if leave_one_out:
            own_R = torch.arange(len(sim_RN), device=sim_RN.device)
            sim_RN[own_R, start + own_R] = -torch.inf
        sim_RK, index_RK = sim_RN.topk(k)
        # Relative to the nearest neighbour, so that a small temperature does not overflow. The factor is common to all votes of a row.
        votes_RK = ((sim_RK - sim_RK[:, :1]) / temperature).exp()
        votes_RC = votes_RK.new_zeros(len(sim_RN), len(classes_C)).scatter_add_(1, class_N[index_RK], votes_RK)
        predicted.append(classes_C[votes_RC.argmax(1)])
    return torch.cat(predicted).to(home) if predicted else classes_C[:0].to(home)


def _tensor(array: Array) -> Tensor:
    if isinstance(array, Tensor):
        return array
    return torch.as_tensor(array if array.flags.writeable else array.copy())  # torch warns about arrays that are not writeable


def _labelled(x: Array, y: Array, part: str) -> tuple[Tensor, Tensor]:
    x, y = _tensor(x), _tensor(y)
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise ValueError(
            f"`{part}_x` (={tuple(x.shape)}) and `{part}_y` (={tuple(y.shape)}) must have the shapes (samples, features), (samples,)"
        )
    y = y.to(x.device)
    known = y >= 0
    if not bool(known.any()):
        raise KinfolkError(f"The {part} part has no labelled samples; nearest neighbours need labels.")
    return (x, y) if bool(known.all()) else (x[known], y[known])
