"""What `auto` means on machines that are not here: GPUs, notebooks, precisions."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from kinfolk.errors import KinfolkWarning, UsageError
from kinfolk.training import launch
from kinfolk.training.config import TrainConfig, TrainerConfig, parse_settings
from kinfolk.training.train import _strategy


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two GPUs, and a list of the calls that would initialise CUDA."""
    calls: list[str] = []

    def initialises(name: str, answer: object) -> Any:
        def call(*args: object, **kwargs: object) -> object:
            calls.append(name)
            return answer

        return call

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in (
        "is_available",
        "is_bf16_supported",
        "get_device_properties",
        "get_rng_state",
        "_lazy_init",
    ):
        monkeypatch.setattr(torch.cuda, name, initialises(name, True))
    monkeypatch.setattr(launch, "in_notebook", lambda: False)
    return calls


def test_a_precision_that_would_convert_the_state_is_refused() -> None:
    for precision in ("bf16-true", "16-true", "64-true", "64"):
        with pytest.raises(UsageError, match=rf"\(='{precision}'\) must be .* 'bf16-mixed'"):
            TrainConfig().with_settings({"trainer.precision": precision})


def test_a_precision_may_be_a_number() -> None:
    config = TrainConfig().with_settings(parse_settings(["trainer.precision=32"]))
    assert config.trainer.precision == "32"
    assert TrainConfig.of(config.model_dump(mode="json")) == config


def test_all_gpus_share_the_statistics_of_batchnorm(gpus: list[str]) -> None:
    found = launch.resolve_trainer(TrainerConfig())
    assert (
        found.accelerator,
        found.devices,
        found.precision,
        found.sync_batchnorm,
        found.compile,
    ) == ("cuda", 2, "bf16-mixed", True, True)
    assert launch.resolve_trainer(TrainerConfig(devices=1)).sync_batchnorm is False
    assert launch.resolve_trainer(TrainerConfig(sync_batchnorm=False)).sync_batchnorm is False


def test_a_notebook_uses_one_gpu_and_says_how_to_use_more(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "in_notebook", lambda: True)
    with pytest.warns(KinfolkWarning, match=r"one of 2 GPUs .* in a terminal"):
        assert launch.resolve_trainer(TrainerConfig()).devices == 1


def test_several_devices_of_a_notebook_are_refused(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "in_notebook", lambda: True)
    with pytest.raises(UsageError, match=r"`trainer.devices` \(=2\) must be 1 in a notebook"):
        launch.resolve_trainer(TrainerConfig(devices=2))


def test_encoders_are_compiled_only_where_it_works(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kinfolk.training.launch.importlib.util.find_spec", lambda name: object())
    assert launch.resolve_trainer(TrainerConfig()).compile_encoder is True
    assert launch.resolve_trainer(TrainerConfig(chunk_size=8)).compile_encoder is False
    assert launch.resolve_trainer(TrainerConfig(accelerator="cpu")).compile_encoder is False
    with pytest.raises(
        UsageError,
        match=r"`trainer.compile_encoder` \(=true\) does not work with `trainer.chunk_size`",
    ):
        launch.resolve_trainer(TrainerConfig(compile_encoder=True, chunk_size=8))


def test_ranks_wait_for_each_other_as_long_as_configured() -> None:
    strategy = _strategy(TrainerConfig(devices=2, timeout_minutes=7))
    assert isinstance(strategy, DDPStrategy)
    assert strategy._timeout == timedelta(minutes=7)
    assert _strategy(TrainerConfig(devices=1)) == "auto"


def test_the_encoder_is_compiled_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names in the state dict stay as they are."""
    from kinfolk.frameworks.registry import Context, build, parse
    from kinfolk.training.module import TrainingModule

    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled.append(self))
    encoder = nn.Linear(3, 3)
    framework = build(parse("moco"), encoder, nn.Linear(3, 2), Context(8), {"queue_size": 4}, {})
    trainer = TrainerConfig(compile_encoder=True)
    config = TrainConfig(method="moco", batch_size=4, epochs=1, trainer=trainer)
    given: Any = (framework, SimpleNamespace(num_train=8), None, config, lambda *_: None)
    names = list(framework.state_dict())
    module = TrainingModule(*given)
    assert len(compiled) == 2, "the encoder and its momentum copy"
    assert compiled[0] is encoder
    assert list(module.framework.state_dict()) == names


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("method", ["simclr+fnc", "cmc"])
def test_every_loss_is_compiled_where_the_trainer_says_so(
    method: str, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kinfolk.contrast import BlockLoss, block_loss
    from kinfolk.objectives import base
    from kinfolk.training.build import build_framework

    compiled: list[int] = []

    def noted() -> BlockLoss:
        compiled.append(1)
        return block_loss

    monkeypatch.setattr(base, "compile_block_loss", noted)
    settings = {"method": method, "trainer.compile": compiles, "model.name": "resnet10"}
    settings |= {"model.stem": "cifar", "model.width": 4, "views.size": 8, "head.out_size": 4}
    data: Any = SimpleNamespace(num_train=8, num_ids=8, labels=None, texts=None)
    data.samples = SimpleNamespace(keys=[])
    framework = build_framework(TrainConfig().with_settings(settings), data)
    for _ in range(2):
        framework(torch.randn(framework.num_views, 4, 3, 8, 8), torch.arange(4)).backward()
    assert len(compiled) == (len(framework.objectives) if compiles else 0), "once for each loss"
