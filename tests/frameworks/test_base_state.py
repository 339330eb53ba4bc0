"""State of frameworks: ids out of range are refused, and so is gradient checkpointing around a
queue or a bank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kinfolk.frameworks import IR, NNCLR, PCL, RCL, SPCL, Framework, MoCo


@pytest.mark.parametrize("wrong", [-1, 16])
@pytest.mark.parametrize("framework", ["rcl", "pcl", "spcl"])
def test_ids_out_of_range_are_refused_where_clusters_are_looked_up(
    framework: str, wrong: int
) -> None:
    """A negative one would have the cluster of another sample."""
    encoder, head = nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), nn.Linear(4, 4)
    clusters: dict[str, Any] = {"num_clusters": (4,), "warmup_epochs": 0}
    small: dict[str, Any] = {"queue_size": 8, **clusters}
    models: dict[str, Callable[[], Framework]] = {
        "rcl": lambda: RCL(encoder, head, 16, hierarchy="kmeans", predictor_size=4, **small),
        "pcl": lambda: PCL(encoder, head, 16, **small),
        "spcl": lambda: SPCL(encoder, head, 16, **clusters),
    }
    model = models[framework]()
    model.refresh(torch.randn(16, 4), 0.5)
    model(torch.randn(2, 4, 3, 2, 2), torch.arange(4))
    with pytest.raises(ValueError, match=rf"`ids` \(={wrong}\) must be in \[0, 16\)"):
        model(torch.randn(2, 4, 3, 2, 2), torch.tensor([0, 1, 2, wrong]))


def test_labels_of_too_few_samples_are_named_before_keys_are_counted() -> None:
    encoder, head = nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), nn.Linear(4, 4)
    how: dict[str, Any] = {"hierarchy": "kmeans", "num_clusters": (4,), "warmup_epochs": 0}
    model = RCL(encoder, head, 16, predictor_size=4, queue_size=8, **how)
    model.refresh(torch.randn(16, 4), 0.5)
    model.set_eval_labels(torch.zeros(8, dtype=torch.int64))
    with pytest.raises(ValueError, match="the number of samples of `set_eval_labels`"):
        model(torch.randn(2, 4, 3, 2, 2), torch.tensor([0, 1, 2, 9]))


@pytest.mark.parametrize("framework", ["moco", "nnclr", "ir"])
def test_a_checkpoint_around_a_framework_with_a_queue_or_bank_is_refused(framework: str) -> None:
    """In the backward pass it would contrast with a queue that holds the batch already."""
    encoder, head = nn.Sequential(nn.Flatten(), nn.Linear(12, 6)), nn.Linear(6, 4)
    models: dict[str, Callable[[], Framework]] = {
        "moco": lambda: MoCo(encoder, head, 16, queue_size=8),
        "nnclr": lambda: NNCLR(encoder, head, 16, queue_size=8, predictor_size=4),
        "ir": lambda: IR(encoder, head, 16, num_negatives=None),
    }
    model = models[framework]()
    views = torch.randn(model.num_views, 8, 3, 2, 2, requires_grad=True)
    loss = checkpoint(model, views, torch.arange(8), use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"called again in a backward pass, as by torch\.utils"):
        loss.backward()
