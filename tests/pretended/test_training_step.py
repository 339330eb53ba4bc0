"""A whole training step on an accelerator: what the training module adds to framework and views
does not wait."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from kinfolk.data.views import Views
from kinfolk.frameworks.registry import Context, build, parse
from kinfolk.training.config import TrainConfig, TrainerConfig
from kinfolk.training.epoch_end import Refresh
from kinfolk.training.metrics_log import MetricsLog, ProgressBar
from kinfolk.training.module import NonFiniteLossError, TrainingModule
from kinfolk.training.run_folder import Run
from tests.pretended.device import AVAILABLE, CUDA, LOG, on_device, pretended

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="the pretended device needs g++")
N, B, D = 64, 16, 8


@pytest.fixture(autouse=True)
def device_without_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning and torch.Generator want to see a real device."""
    monkeypatch.setattr(TrainingModule, "device", property(lambda self: CUDA))
    monkeypatch.setattr("kinfolk.training.module.generator", lambda *key, device: torch.Generator())


class Data:
    """Only the number of samples matters here."""

    num_train = N
    stream = None

    def pixels(self, ids: Tensor) -> Tensor:
        raise NotImplementedError

    def aspect(self, ids: Tensor) -> Tensor:
        raise NotImplementedError


def ready_views(
    pixels: Tensor, generator: torch.Generator, aspect: Tensor | None = None, num_views: int = 2
) -> Tensor:
    """The batch already holds the views (B, V, D): making them is measured elsewhere."""
    return pixels.transpose(0, 1)


def small_config(method: str, epochs: int = 2) -> TrainConfig:
    trainer = TrainerConfig(channels_last=False, precision="32")
    return TrainConfig(method=method, batch_size=B, epochs=epochs, trainer=trainer)


def module() -> TrainingModule:
    torch.manual_seed(0)
    method = parse("sogclr+glofnd")
    framework = build(
        method,
        nn.Identity(),
        nn.Linear(D, D, bias=False),
        Context(N),
        {"temperature": 0.3},
        {"alpha": 0.2},
    )
    framework.set_eval_labels(torch.arange(N) % 4)
    views: Any = ready_views
    return TrainingModule(framework, Data(), views, small_config("sogclr+glofnd"), lambda *_: None)


def batch(step: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(step)
    pixels, ids = torch.randn(B, 2, D, generator=draw), torch.randperm(N, generator=draw)[:B]
    return {
        "pixels": on_device(pixels),
        "aspect": on_device(torch.ones(B)),
        "ids": on_device(ids),
        "epoch": 0,
        "step": step,
    }


def test_a_training_step_waits_for_nothing() -> None:
    trained = module()
    with pretended():
        trained.to("cuda")
        for step in range(2):
            given = batch(step)
            LOG.reset()
            trained.training_step(given, step).backward()  # type: ignore[no-untyped-call]
            assert not LOG.waits


def test_every_step_is_counted_with_its_labels() -> None:
    trained = module()
    with pretended():
        trained.to("cuda")
        for step in range(3):
            trained.training_step(batch(step), step)
            stats: Any = trained.framework.stats
            assert int(stats.anchors.held) == B
            assert int(stats.negatives.held) == B * 2 * (2 * B - 2)


def test_logging_and_progress_bar_do_not_wait_in_every_step(tmp_path: Path) -> None:
    trained, log = module(), MetricsLog(Run(tmp_path), [], log_every=10)
    bar = ProgressBar(Console(file=io.StringIO(), force_terminal=True), log, epochs=1)
    progress = SimpleNamespace(
        epoch_loop=SimpleNamespace(
            batch_progress=SimpleNamespace(total=SimpleNamespace(completed=0))
        )
    )
    trainer: Any = SimpleNamespace(
        accumulate_grad_batches=1,
        global_step=1,
        loggers=[],
        current_epoch=0,
        num_training_batches=4,
        is_global_zero=True,
        fit_loop=progress,
    )
    with pretended():
        trained.to("cuda")
        loss = trained.training_step(batch(0), 0).detach()
        for callback in (log, bar):
            callback.on_train_start(trainer, trained)
        waits = []
        for step in range(3):
            LOG.reset()
            for callback in (log, bar):
                callback.on_train_batch_end(trainer, trained, {"loss": loss}, None, step)
            waits.append(sum(LOG.waits.values()))
        bar.on_train_end(trainer, trained)
    assert waits[1:] == [0, 0], "the first loss is shown at once, the next ones after a while"


def test_a_loss_that_is_not_finite_is_found_at_the_next_check() -> None:
    trained = module()
    with pretended():
        trained.to("cuda")
        trained.training_step(batch(0), 0)
        trained.require_finite_losses()
        broken = batch(1)
        broken["pixels"] = broken["pixels"] * torch.nan
        trained.training_step(broken, 1)
        trained.training_step(batch(2), 2)
        with pytest.raises(NonFiniteLossError, match=r"not finite at step 0 \(epoch 1, batch 3\)"):
            trained.require_finite_losses()


def test_embeddings_that_streamed_data_is_clustered_by_are_collected_without_waiting() -> None:
    """Each batch is written on the host while the device computes the next one; a checkpoint has
    all of them."""
    torch.manual_seed(0)
    arguments = {"num_clusters": (3,), "schedule": "constant"}
    framework = build(
        parse("simclr+ifnd"),
        nn.Flatten(),
        nn.Linear(3 * D * D, D, bias=False),
        Context(N),
        {},
        arguments,
    )
    data: Any = SimpleNamespace(num_train=N, stream=object())
    views = Views("plain", D)
    trained = TrainingModule(
        framework,
        data,
        views,
        small_config("simclr+ifnd", epochs=3),
        lambda *_: None,
    )
    trainer: Any = SimpleNamespace(current_epoch=0)
    refresh, expected = Refresh(data), torch.zeros(N, D)
    batches = []
    for step in range(3):
        ids = torch.arange(B * step, B * step + B)
        pixels = torch.randint(
            0, 256, (B, D, D, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(step)
        )
        expected[ids] = framework.embed(views.evaluate(pixels)).detach()
        batches.append({"pixels": pixels, "aspect": torch.ones(B), "ids": ids})
    with pretended():
        trained.to("cuda")
        moved = [{name: on_device(value) for name, value in batch.items()} for batch in batches]
        views.evaluate(moved[0]["pixels"], moved[0]["aspect"])  # constants are copied once
        LOG.reset()
        for step, given in enumerate(moved):
            refresh.on_train_batch_end(trainer, trained, None, given, step)
            seen = 0 if refresh.collected is None else int(refresh.collected.seen.sum())
            assert seen == B * step, "one batch behind"
        assert not LOG.waits, LOG.waits
    saved = refresh.state_dict()["collected"]
    assert int(saved["seen"].sum()) == 3 * B
    torch.testing.assert_close(saved["features"], expected, rtol=1e-4, atol=1e-5)
