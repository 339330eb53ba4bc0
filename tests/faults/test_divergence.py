"""A training that diverges: what is saved is finite, and the message says what is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kinfolk as kf
from kinfolk.errors import KinfolkError, KinfolkWarning
from kinfolk.frameworks import CLIP
from kinfolk.models.weights import load_encoder, save_encoder
from kinfolk.training.checkpoint import not_finite, read_checkpoint
from kinfolk.training.module import NonFiniteLossError, TrainingModule
from kinfolk.training.run_folder import Run
from kinfolk.training.train import train
from tests.faults.methods import TINY
from tests.training.pairs_of import SMALL as SMALL_PAIRS
from tests.training.pairs_of import write_pairs


@pytest.fixture
def images(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    np.savez(
        tmp_path / "a.npz",
        x_train=random.integers(0, 256, (36, 8, 8, 3), dtype=np.uint8),
        y_train=np.arange(36) % 3,
    )
    return tmp_path / "a.npz"


def infinite_variance(model: torch.nn.Module) -> None:
    norm = next(part for part in model.modules() if isinstance(part, torch.nn.BatchNorm2d))
    assert norm.running_var is not None
    norm.running_var[0] = torch.inf


@torch.no_grad()
def enlarge(model: torch.nn.Module) -> None:
    """Finite weights whose products overflow."""
    for norm in model.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.weight.fill_(3e38)


def diverge(
    images: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    spoil: Callable[[torch.nn.Module], None] = infinite_variance,
    method: str = "simclr",
    **more: Any,
) -> str:
    """The message of a run whose network is spoilt after `step`, which its loss did not show."""
    take = TrainingModule.optimizer_step

    def spoiling(self: TrainingModule, *args: Any, **others: Any) -> None:
        take(self, *args, **others)
        if self.global_step == step - 1:  # counted after this
            spoil(self.framework)

    monkeypatch.setattr(TrainingModule, "optimizer_step", spoiling)
    settings = {**TINY, "knn.every": 0, **more}
    with pytest.raises(NonFiniteLossError) as caught:
        train(
            str(images),
            out,
            epochs=2,
            batch_size=12,
            method=method,
            settings=settings,
            progress=False,
        )
    return str(caught.value)


def test_a_state_that_is_not_finite_is_not_saved(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run")
    message = diverge(images, run.path, monkeypatch, step=3)
    assert "running_var of simclr is not finite at step 3" in message
    assert "no checkpoint is saved" in message
    assert (
        f"{run.checkpoint} holds the state after step 2 (0 of 2 epochs done), with last-1.ckpt"
        " before it" in message
    )
    for path, step in ((run.checkpoint, 2), (run.older_checkpoints()[0], 1)):
        checkpoint = read_checkpoint(path)
        assert checkpoint["kinfolk"]["step"] == step
        assert all(
            value.isfinite().all()
            for value in checkpoint["state_dict"].values()
            if value.is_floating_point()
        )


def test_the_message_says_that_there_is_none(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = diverge(images, tmp_path / "run", monkeypatch, step=1)
    assert "no checkpoint had been saved yet" in message
    assert not (tmp_path / "run" / "checkpoints").exists() or not any(
        (tmp_path / "run" / "checkpoints").iterdir()
    )
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_the_state_of_the_optimiser_counts() -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not_finite(layer, [optimizer]) is None
    optimizer.state[layer.weight]["momentum_buffer"][0, 0] = torch.nan
    assert not_finite(layer, [optimizer]) == "the optimiser's momentum_buffer of weight"


def test_finite_weights_with_infinite_features_are_not_saved(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run")
    message = diverge(images, run.path, monkeypatch, step=3, spoil=enlarge)
    assert "an image feature of simclr is not finite at step 3" in message
    assert read_checkpoint(run.checkpoint)["kinfolk"]["step"] == 2
    with pytest.warns(KinfolkWarning, match="interrupted"):
        assert np.isfinite(kf.embed(run.path, str(images))).all()


def test_finite_weights_with_infinite_caption_embeddings_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @torch.no_grad()
    def enlarge_text_head(framework: torch.nn.Module) -> None:
        assert isinstance(framework, CLIP)
        next(framework.text_head.parameters()).fill_(3e38)

    message = diverge(
        write_pairs(tmp_path / "d", 32),
        tmp_path / "run",
        monkeypatch,
        step=3,
        spoil=enlarge_text_head,
        method="clip",
        **SMALL_PAIRS,
    )
    assert "a caption embedding of clip is not finite at step 3" in message
    assert read_checkpoint(Run(tmp_path / "run").checkpoint)["kinfolk"]["step"] == 2


def test_a_learning_rate_far_too_high_leaves_no_checkpoint(tmp_path: Path) -> None:
    """The first loss is finite and so are the weights after it."""
    random = np.random.default_rng(0)
    np.save(tmp_path / "a.npy", random.integers(0, 256, (96, 16, 16, 3), dtype=np.uint8))
    settings = {**TINY, "optimizer.lr": 1e30}
    with pytest.raises(NonFiniteLossError, match=r"no checkpoint is saved: .* is not finite"):
        train(
            str(tmp_path / "a.npy"),
            tmp_path / "run",
            epochs=1,
            batch_size=96,
            settings=settings,
            progress=False,
        )
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_infinite_features_are_neither_embedded_nor_exported(images: Path, tmp_path: Path) -> None:
    """A run of an earlier version, which saved such weights."""
    settings = {**TINY}
    run = train(
        str(images), tmp_path / "run", epochs=1, batch_size=12, settings=settings, progress=False
    )
    encoder, meta = load_encoder(run.path)
    enlarge(encoder)
    save_encoder(encoder, run.path, meta)
    for call in (kf.embed, kf.evaluate):
        with pytest.raises(
            KinfolkError,
            match=r"gives features that are not finite, for 36 of 36 samples; .* lower learning "
            r"rate",
        ):
            call(run.path, str(images))
    with pytest.raises(
        KinfolkError, match="gives features that are not finite, so it is not exported"
    ):
        kf.export(run.path, "safetensors")
    assert not (run.path / "export").exists()


@pytest.mark.parametrize("keep", [1, 3])
def test_so_many_are_kept(images: Path, tmp_path: Path, keep: int) -> None:
    settings = {
        **TINY,
        "checkpoint.keep": keep,
        "checkpoint.every_minutes": None,
    }
    run = train(
        str(images), tmp_path / "run", epochs=4, batch_size=12, settings=settings, progress=False
    )
    steps = [
        read_checkpoint(path)["kinfolk"]["step"]
        for path in (run.checkpoint, *run.older_checkpoints())
    ]
    assert steps == [12, 9, 6][:keep]
