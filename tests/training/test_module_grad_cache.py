"""GradCache: the loss, the gradient and the state of the whole batch, with the activations of one
chunk at a time."""

from __future__ import annotations

import copy
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from kinfolk.frameworks import Framework
from kinfolk.frameworks.registry import Context, build, parse
from kinfolk.training import module
from kinfolk.training.module import encoders_of, in_chunks
from kinfolk.training.train import train
from tests.ranks import spawn
from tests.training.small import BARE

SAMPLES, SIDE = 5000, 4


class TextTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(50, 16), nn.Linear(16, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(self.words(tokens).mean(1).tanh())
        return out


def encoder(*more: nn.Module, size: int = 12) -> nn.Sequential:
    parts = nn.Sequential(
        nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 32), nn.GELU(), *more, nn.Linear(32, size)
    )
    parts.output_size = size  # type: ignore[assignment]
    return parts


def framework(method: str, *more: nn.Module, **options: Any) -> Framework:
    torch.manual_seed(0)
    text = (TextTower(), nn.Linear(12, 8)) if "clip" in method else None
    head = nn.Linear(12, 8)
    detector = {"alpha": 0.02, "init": "quantile"} if "glofnd" in method else {}
    made = build(
        parse(method), encoder(*more), head, Context(SAMPLES, None, text), options, detector
    )
    made.set_progress(3, 30)
    return made


def step(made: Framework, batch: int, chunks: int) -> Tensor:
    """One step with its backward pass; all randomness is the same in every call."""
    g = torch.Generator().manual_seed(1)
    views = torch.randn(made.num_views, batch, 3, SIDE, SIDE, generator=g)
    ids = torch.randperm(SAMPLES, generator=g)[:batch]
    texts = (
        {"tokens": torch.randint(50, (batch, 5), generator=g), "groups": ids}
        if "text" in made.modalities
        else {}
    )
    torch.manual_seed(7)
    with in_chunks(encoders_of(made), chunks):
        loss: Tensor = made(views, ids, **texts)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def gradients(made: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad
        for name, parameter in made.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("method", ["simclr+glofnd", "sogclr+glofnd", "clip+glofnd"])
def test_1024_in_chunks_of_64_is_the_whole_batch(method: str) -> None:
    whole = framework(method)
    chunked = copy.deepcopy(whole)
    a, b = step(whole, 1024, 1), step(chunked, 1024, 16)
    torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    assert whole.stats.share > 0, "the detector takes part"
    expected, found = gradients(whole), gradients(chunked)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(
            chunked.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name
        )


@pytest.mark.parametrize("method", ["simclr", "moco", "nnclr", "ir", "pcl", "fastclip"])
def test_any_framework_and_a_batch_that_is_no_multiple(method: str) -> None:
    options: dict[str, Any] = {"queue_size": 64} if method in ("moco", "nnclr", "pcl") else {}
    options |= {"symmetric": True} if method == "moco" else {}
    whole = framework(method, **options)
    chunked = copy.deepcopy(whole)
    a, b = step(whole, 50, 1), step(chunked, 50, 4)
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    for name, value in gradients(whole).items():
        torch.testing.assert_close(gradients(chunked)[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_dropout_is_the_same_in_both_passes() -> None:
    """The gradient of the loss that was returned: a finite difference along one direction, with the
    same masks."""
    made = framework("simclr", nn.Dropout(0.5)).double()

    def loss_at() -> Tensor:
        torch.manual_seed(7)
        g = torch.Generator().manual_seed(1)
        views = torch.randn(2, 24, 3, SIDE, SIDE, generator=g).double()
        with in_chunks(encoders_of(made), 4):
            loss: Tensor = made(views, torch.arange(24))
        return loss

    loss_at().backward()  # type: ignore[no-untyped-call]
    weight = made.encoder[1].weight  # type: ignore[index]
    direction, small = torch.randn_like(weight), 1e-5
    slope = (weight.grad * direction).sum()
    with torch.no_grad():
        weight += small * direction
        above = loss_at()
        weight -= 2 * small * direction
        below = loss_at()
    torch.testing.assert_close((above - below) / (2 * small), slope, rtol=1e-5, atol=1e-8)


def test_batch_norm_counts_each_chunk_once_and_by_its_own_statistics() -> None:
    chunked = framework("simclr", nn.BatchNorm1d(32))
    norm = chunked.encoder[3]  # type: ignore[index]
    reference = copy.deepcopy(chunked)
    step(chunked, 32, 4)
    views = torch.randn(2, 32, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1)).flatten(
        0, 1
    )
    with torch.no_grad():
        for k in range(4):
            reference.encoder(views[k::4])
    assert int(norm.num_batches_tracked) == 4
    torch.testing.assert_close(norm.running_mean, reference.encoder[3].running_mean)  # type: ignore[index]
    torch.testing.assert_close(norm.running_var, reference.encoder[3].running_var)  # type: ignore[index]


def test_nothing_is_left_behind() -> None:
    made = framework("simclr")
    names = list(made.state_dict())
    step(made, 16, 4)
    assert "forward" not in made.encoder.__dict__
    assert list(made.state_dict()) == names


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of tensors that were made within it and alive at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def activations(batch: int, chunks: int) -> int:
    torch.manual_seed(0)
    network = nn.Sequential(*(layer for _ in range(20) for layer in (nn.Linear(64, 64), nn.Tanh())))
    rows = torch.randn(batch, 64)
    with Peak() as peak:
        with in_chunks([network], chunks):
            out = network(rows)
        out.square().mean().backward()
    return int(peak.most)


def test_memory_is_that_of_a_chunk() -> None:
    small, large, chunked = activations(256, 1), activations(4096, 1), activations(4096, 16)
    # joined, in order, squared, their gradients: these do grow with the batch
    embeddings = 6 * 4096 * 64 * 4
    assert large > 10 * small
    assert chunked < small + embeddings


def test_a_training_in_chunks_runs_and_notes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def noted(modules: Any, number: int) -> Any:
        asked.append(number)
        return in_chunks(modules, number)

    monkeypatch.setattr(module, "in_chunks", noted)
    common: dict[str, Any] = {
        "data": "digits",
        "method": "sogclr+glofnd",
        "epochs": 1,
        "batch_size": 512,
        "progress": False,
    }
    run = train(out=tmp_path / "run", settings={**BARE, "trainer.chunk_size": 128}, **common)
    (row,) = run.epochs()
    assert (row["step"], asked) == (2, [4, 4])
    assert "chunk_size: 128" in run.config.read_text(encoding="utf-8")


def rank_child(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    made = framework("simclr+glofnd")
    wrapped = DistributedDataParallel(made, broadcast_buffers=False)
    views = torch.randn(2, 32, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(5))
    mine = slice(0, 12) if rank == 0 else slice(12, 32)
    with in_chunks(encoders_of(made), 3):
        loss = wrapped(views[:, mine], torch.arange(32)[mine])
    loss.backward()
    torch.save({"loss": loss.detach(), "gradients": gradients(made)}, f"{folder}/{rank}.pt")
    # once in many times, freeing `wrapped` waits for a thread of gloo that waits for Python's lock
    os._exit(0)


def test_two_ranks_in_chunks_are_one_process(tmp_path: Path) -> None:
    spawn(rank_child, (str(tmp_path),), nprocs=2)
    whole = framework("simclr+glofnd")
    views = torch.randn(2, 32, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(5))
    loss = whole(views, torch.arange(32))
    loss.backward()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(found["loss"], loss.detach())
        for name, value in gradients(whole).items():
            torch.testing.assert_close(
                found["gradients"][name], value, rtol=1e-4, atol=1e-6, msg=name
            )
