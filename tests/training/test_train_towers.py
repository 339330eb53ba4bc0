"""Training on images with captions, from the table to recall."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kinfolk.cli import main
from kinfolk.data.sample_table import Samples
from kinfolk.errors import KinfolkWarning, UsageError
from kinfolk.frameworks import CLIP
from kinfolk.models import read_state
from kinfolk.objectives import NTXentLoss
from kinfolk.training.build import build_framework
from kinfolk.training.load_run import open_run
from kinfolk.training.loader import BatchLoader
from kinfolk.training.train import train
from tests.training.pairs_of import SMALL, write_pairs


def run_on(data: Path | None, out: Path, epochs: int = 2, resume: bool = False, **more: Any) -> Any:
    given: dict[str, Any] = (
        {}
        if resume
        else {"method": "clip", "epochs": epochs, "batch_size": 12, "settings": {**SMALL, **more}}
    )
    return train(data, out, progress=False, resume=resume, **given)


def test_from_a_table_to_recall(tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "d", 32)
    run = run_on(data, tmp_path / "run", epochs=6)
    assert run.tokenizer.is_file()
    temperatures = [row["temperature"] for row in run.epochs()]
    assert len(set(temperatures)) == 6
    assert all(0.01 <= temperature < 0.2 for temperature in temperatures)
    samples = Samples.read(run.samples)
    assert samples.group_ids is not None
    assert samples.group_ids[0] == samples.group_ids[1] == 0
    with pytest.raises(SystemExit, match="0"):
        main(["eval", str(run.path), "--protocol", "retrieval"])
    result = json.loads((run.path / "eval" / "retrieval.json").read_text())
    assert (result["images"], result["captions"]) == (8, 16)
    assert result["image_to_text"]["R@5"] > 2 * 5 / 16  # its colour at least
    towers = open_run(run.path).towers()
    assert towers.texts(["a red wall"]).shape == (1, 16)


def test_resumed_is_uninterrupted_and_trains_no_tokenizer_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_pairs(tmp_path / "d", 20)
    whole = run_on(data, tmp_path / "whole")
    forward, calls = CLIP.forward, []

    def stumbling(self: CLIP, *args: Any, **more: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("power cut")
        return forward(self, *args, **more)

    monkeypatch.setattr(CLIP, "forward", stumbling)
    with pytest.raises(RuntimeError, match="power cut"):
        run_on(data, tmp_path / "cut")
    monkeypatch.setattr(CLIP, "forward", forward)
    monkeypatch.setattr("kinfolk.training.build.train_tokenizer", None)
    resumed = run_on(None, tmp_path / "cut", resume=True)
    one, other = (read_state(run.path / "towers.safetensors") for run in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert whole.tokenizer.read_text() == resumed.tokenizer.read_text()


def test_begins_from_another_run(tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "d", 20)
    first = run_on(data, tmp_path / "first", epochs=1)
    frozen: dict[str, Any] = {
        "model.init": str(first.path / "towers.safetensors"),
        "optimizer.lr": 1e-12,
    }
    second = run_on(write_pairs(tmp_path / "other", 24), tmp_path / "second", epochs=1, **frozen)
    assert second.tokenizer.read_text() == first.tokenizer.read_text(), (
        "that of the towers, not one learnt anew"
    )
    one, other = (read_state(run.path / "towers.safetensors") for run in (first, second))
    torch.testing.assert_close(one["text_head.0.weight"], other["text_head.0.weight"])
    opened = open_run(second.path)
    images, tokenizer = opened.data(), opened.towers().tokenizer
    config = opened.config.with_settings({"model.init": str(first.model)})
    with pytest.warns(
        KinfolkWarning, match="head, text_encoder, text_head start from random weights"
    ):
        build_framework(config, images, tokenizer)
    moved = str(shutil.copy(first.path / "towers.safetensors", tmp_path))
    with pytest.warns(
        KinfolkWarning, match="give the tokenizer.json of its training as `text.tokenizer`"
    ):
        build_framework(config.with_settings({"model.init": moved}), images, tokenizer)


def test_data_without_captions_and_runs_without_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_pairs(tmp_path / "d", 20)
    with pytest.raises(UsageError, match="the data has no captions"):
        run_on(data.parent, tmp_path / "run")
    known: list[Tensor] = []
    monkeypatch.setattr(NTXentLoss, "set_groups", lambda self, groups: known.append(groups))
    run = train(
        data,
        tmp_path / "simclr",
        epochs=1,
        batch_size=12,
        settings={**SMALL, "views.preset": "simclr"},
        progress=False,
    )
    assert torch.equal(known[0], torch.arange(len(known[0])) // 2 * 2), (
        "the two rows of a image are no negatives of each other"
    )
    with pytest.raises(UsageError, match="which has no text tower"):
        open_run(run.path).towers()


class Captions:
    """Caption 10 · id + draw."""

    def draw(self, ids: Tensor, uniform: Tensor) -> Tensor:
        return (10 * ids + (uniform * 10).long())[:, None]

    def get_groups(self, ids: Tensor) -> dict[str, Tensor]:
        return {"groups": ids // 2}


class Pixels:
    num_train = 40

    def pixels(self, ids: Tensor) -> Tensor:
        return ids[:, None]

    def aspect(self, ids: Tensor) -> Tensor:
        return ids.float()


def test_captions_are_drawn_by_seed_epoch_and_step_for_the_joined_batch() -> None:
    whole = list(BatchLoader(Pixels(), 12, seed=3, text=Captions()))
    for batch in whole:
        assert torch.equal(batch["tokens"][:, 0] // 10, batch["ids"])
        assert torch.equal(batch["groups"], batch["ids"] // 2)
    parts = [
        list(BatchLoader(Pixels(), 12, seed=3, rank=rank, world_size=3, text=Captions()))
        for rank in range(3)
    ]
    for step, batch in enumerate(whole):
        assert torch.equal(torch.cat([part[step]["tokens"] for part in parts]), batch["tokens"])
    later = BatchLoader(Pixels(), 12, seed=3, text=Captions())
    later.set_epoch(1)
    draws = [
        torch.cat([batch["tokens"][batch["ids"].argsort(), 0] % 10 for batch in batches])
        for batches in (whole, list(later))
    ]
    assert not torch.equal(*draws)
