"""A run that was interrupted has an encoder that can be used, and says from which epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

import kinfolk as kf
from kinfolk.errors import InterruptedRunError, KinfolkWarning
from kinfolk.training.checkpoint import STOP, CheckpointSaver
from kinfolk.training.train import train
from tests.training.small import BARE


@pytest.mark.parametrize(("step", "epoch"), [(1, 0), (3, 1)])
def test_the_encoder_of_an_interrupted_run_can_be_used(
    tmp_path: Path, step: int, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []

    def action(self: CheckpointSaver, device: object) -> int:
        steps.append(1)
        return STOP if len(steps) == step else 0

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointSaver, "_agreed_action", action)
        with pytest.raises(InterruptedRunError):
            train(
                "digits", tmp_path / "run", epochs=3, batch_size=512, settings=BARE, progress=False
            )
    with pytest.warns(
        KinfolkWarning,
        match=rf"the training was interrupted: .* after epoch {epoch} of 3 \(step {step}\)",
    ):
        features = kf.embed(tmp_path / "run")
    assert len(features) == 1797
    run = train(out=tmp_path / "run", resume=True, progress=False)
    assert len(run.epochs()) == 3
    assert len(kf.embed(run)) == 1797, "without a warning: it is finished"
