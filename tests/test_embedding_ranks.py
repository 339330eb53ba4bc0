"""Embedding in parts: every rank computes a stretch, all have the whole, with the statistics of
rank zero."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kinfolk.data.views import Views
from kinfolk.embedding import embed, embed_in_parts
from tests.ranks import end_rank, spawn
from tests.test_embedding import Framework, Images

NUM_SAMPLES = 11


def made(rank: int) -> Framework:
    torch.manual_seed(0)
    framework = Framework()
    norm = framework.encoder.body[1]
    assert isinstance(norm, torch.nn.BatchNorm2d)
    assert norm.running_mean is not None
    norm.running_mean += rank  # each rank has seen other images
    return framework.train()


@pytest.mark.parametrize("projected", [True, False])
def test_one_process_embeds_all(projected: bool) -> None:
    data, views = Images(NUM_SAMPLES + 3), Views("plain", 8)
    got = embed_in_parts(made(0), data, views, NUM_SAMPLES, projected=projected)
    assert torch.equal(
        got, embed(made(0), data, views, torch.arange(NUM_SAMPLES), projected=projected)
    )


def _child(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    framework = made(rank)

    found = embed_in_parts(
        framework,
        Images(NUM_SAMPLES + 3),
        Views("plain", 8),
        NUM_SAMPLES,
        batch_size=2,
    )
    assert framework.training
    torch.save(found, f"{folder}/{rank}.pt")
    end_rank()


def test_ranks_share_the_work(tmp_path: Path) -> None:
    spawn(_child, (str(tmp_path),), nprocs=2)
    want = embed(made(0), Images(NUM_SAMPLES + 3), Views("plain", 8), torch.arange(NUM_SAMPLES))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, want)
