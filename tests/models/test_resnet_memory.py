"""A network that is too large is refused from its settings, before its memory is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kinfolk.errors import UsageError
from kinfolk.models import build_encoder
from kinfolk.models.resnet import BasicBlock, Bottleneck, num_weights
from kinfolk.training.config import TrainConfig
from kinfolk.training.train import train


@pytest.mark.parametrize(
    ("name", "block", "depths"),
    [("resnet18", BasicBlock, (2, 2, 2, 2)), ("resnet50", Bottleneck, (3, 4, 6, 3))],
)
def test_the_weights_are_counted(
    name: str, block: type[BasicBlock] | type[Bottleneck], depths: tuple[int, ...]
) -> None:
    encoder = build_encoder(name, width=8)
    counted = sum(
        part.weight.numel() for part in encoder.modules() if isinstance(part, torch.nn.Conv2d)
    )
    first = encoder.state_dict()["conv1.weight"].numel()
    assert first + num_weights(block, depths, 8) == counted


def test_a_width_beyond_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"`model.width` \(=100000000\) must be less than or equal to 16384"
    ):
        TrainConfig.of({"model": {"width": 100_000_000}})
    with pytest.raises(
        ValueError,
        match=r"`width` \(=16384\) gives a network of 1.54e\+12 weights, which need .* choose a "
        r"smaller one",
    ):
        build_encoder("resnet50", width=16384)
    with pytest.raises(
        UsageError, match=r"simclr cannot be built: `width` \(=16384\) gives a network"
    ):
        train("digits", tmp_path / "run", settings={"model.width": 16384}, progress=False)
    assert not (tmp_path / "run" / "config.yaml").exists()
