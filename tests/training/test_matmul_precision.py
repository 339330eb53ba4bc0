"""Products of float32 matrices in TF32: when a training uses them, and what they change in a
loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kinfolk as kf
from kinfolk.evaluation.probes import knn_accuracy
from kinfolk.training import epoch_end
from kinfolk.training.config import TrainerConfig
from kinfolk.training.launch import float32_products, resolve_trainer
from kinfolk.training.module import TrainingModule
from kinfolk.training.train import train
from tests.training.small import BARE

BITS = {"tf32": 13, "bf16": 16}
"""Bits of a float32 that a product of this precision does not read."""
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


class Rounded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds the operands of matrix products, as tensor cores do; everything else stays as it
    is."""

    def __init__(self, precision: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drop, self.products = BITS[precision], 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            self.products += 1
            args = [self.round(x) for x in args]
        return func(*args, **(kwargs or {}))

    def round(self, x: Tensor) -> Tensor:
        bits = x.contiguous().view(torch.int32) + (1 << (self.drop - 1))
        return (bits >> self.drop << self.drop).view(torch.float32)


def steps(loss_fn: Any, count: int = 4) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Losses, gradients and the state after some steps."""
    losses, gradients = [], []
    for seed in range(count):
        g = torch.Generator().manual_seed(seed)
        one = torch.randn(64, 128, generator=g).requires_grad_()
        loss = loss_fn(
            one,
            one.detach() + torch.randn(64, 128, generator=g),
            torch.randperm(80, generator=g)[:64],
        )
        losses.append(loss.detach())
        gradients.append(torch.autograd.grad(loss, one)[0])
    return losses, gradients, dict(loss_fn.state_dict())


@pytest.mark.parametrize(("precision", "tolerance"), [("tf32", 1e-3), ("bf16", 8e-3)])
@pytest.mark.parametrize(
    "make",
    [
        lambda: kf.NTXentLoss(temperature=0.1),
        lambda: kf.SogCLRLoss(num_samples=80, temperature=0.1),
        lambda: kf.NTXentLoss(temperature=0.1, detector=kf.GloFND(num_samples=80, alpha=0.05)),
    ],
    ids=["ntxent", "sogclr", "glofnd"],
)
def test_rounded_products_change_little(
    make: Callable[[], Any], precision: str, tolerance: float
) -> None:
    expected = steps(make())
    with Rounded(precision) as mode:
        found = steps(make())
    assert mode.products >= 3 * 4, "similarities and both gradients"
    for one, other in zip(found[0], expected[0], strict=True):
        assert abs(one / other - 1) < tolerance
    for one, other in zip(found[1], expected[1], strict=True):
        cosine = torch.cosine_similarity(one.flatten(), other.flatten(), 0)
        assert 1 - cosine < 10 * tolerance
    for name, value in found[2].items():
        assert value.dtype == torch.float32
        # The mean: a candidate at a threshold may be counted as above it in one and not in the
        # other.
        assert (value - expected[2][name]).nan_to_num().abs().mean() < 2 * tolerance


@pytest.mark.parametrize(
    ("precision", "given", "expected"),
    [
        ("32", "auto", "highest"),
        ("32-true", "auto", "highest"),
        ("bf16-mixed", "auto", "high"),
        ("16-mixed", "auto", "high"),
        ("bf16-mixed", "highest", "highest"),
        ("32", "medium", "medium"),
    ],
)
def test_by_default_it_follows_the_precision(precision: Any, given: Any, expected: str) -> None:
    config = TrainerConfig(accelerator="cpu", precision=precision, matmul_precision=given)
    assert resolve_trainer(config).matmul_precision == expected


def test_the_setting_holds_in_every_step_and_ends_with_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, inside = torch.get_float32_matmul_precision(), set()

    def fail(self: Any, batch: Any, batch_idx: int) -> None:
        inside.add(torch.get_float32_matmul_precision())
        raise KeyError

    monkeypatch.setattr(TrainingModule, "training_step", fail)
    settings = {**BARE, "trainer.accelerator": "cpu", "trainer.matmul_precision": "medium"}
    with pytest.raises(KeyError):
        train("digits", tmp_path / "run", epochs=1, settings=settings, progress=False)
    assert inside == {"medium"}
    assert torch.get_float32_matmul_precision() == before


def test_clusters_and_nearest_neighbours_are_computed_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, set[str]] = {"refresh": set(), "knn": set(), "step": set()}

    def record(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*given: Any, **named: Any) -> Any:
            found[what].add(torch.get_float32_matmul_precision())
            return call(*given, **named)

        return recorded

    monkeypatch.setattr(kf.Cave, "refresh", record("refresh", kf.Cave.refresh))
    monkeypatch.setattr(epoch_end, "knn_accuracy", record("knn", knn_accuracy))
    step = record("step", TrainingModule.training_step)
    monkeypatch.setattr(TrainingModule, "training_step", step)
    settings = {**BARE, "trainer.accelerator": "cpu", "trainer.matmul_precision": "high"}
    settings |= {"method": "simclr+cave", "detector.num_clusters": 4, "knn.every": 1}
    train("digits", tmp_path / "run", epochs=1, settings=settings, progress=False)
    assert found == {"refresh": {"highest"}, "knn": {"highest"}, "step": {"high"}}


def test_a_precision_chosen_for_one_backend_stays() -> None:
    if not hasattr(torch.backends.mkldnn, "matmul"):
        pytest.skip("torch before 2.9 has one precision for all backends")
    cuda, mkldnn = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    torch.set_float32_matmul_precision("highest")
    cuda.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        with float32_products("medium"):
            pass
        assert (cuda.fp32_precision, mkldnn.fp32_precision) == ("tf32", "ieee")
    finally:
        torch.set_float32_matmul_precision("highest")
