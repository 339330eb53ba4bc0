"""A network that is too large is refused from its settings, before its memory is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinfolk.errors import UsageError
from kinfolk.models import build_encoder
from kinfolk.training.config import TrainConfig
from kinfolk.training.train import train


def test_a_width_beyond_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"`model.width` \(=100000000\) must be less than or equal to 16384"
    ):
        TrainConfig.of({"model": {"width": 100_000_000}})
    with pytest.raises(
        ValueError,
        match=r"`width` \(=16384\) must be in \[1, 512\]",
    ):
        build_encoder("resnet50", width=16384)
    with pytest.raises(UsageError, match=r"`width` \(=16384\) must be in"):
        train("digits", tmp_path / "run", settings={"model.width": 16384}, progress=False)
    assert not (tmp_path / "run" / "config.yaml").exists()
