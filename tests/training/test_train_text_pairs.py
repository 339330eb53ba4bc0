"""Training on text pairs, from the table to a run that is opened again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kinfolk.errors import UsageError
from kinfolk.frameworks import TextPairs
from kinfolk.training.load_run import measure_kin, open_run, restore
from kinfolk.training.train import train
from tests.faults.inject import differences
from tests.training.text_table import SMALL, rows, write_table


def run_on(data: Path | None, out: Path, resume: bool = False, **more: Any) -> Any:
    given: dict[str, Any] = {"settings": {**SMALL, **more.pop("settings", {})}} | more
    given = {} if resume else {"method": "pairs+glofnd", "epochs": 2, "batch_size": 8} | given
    return train(data, out, progress=False, resume=resume, **given)


def test_learns_pairs_and_measures_its_detector(tmp_path: Path) -> None:
    table = write_table(tmp_path / "t.csv")
    settings = {"detector.alpha": 0.1, "text.width": 32}
    run = run_on(table, tmp_path / "run", epochs=6, lr=0.01, settings=settings)
    epochs = run.epochs()
    assert epochs[-1]["loss"] < epochs[0]["loss"] / 2
    assert 0 <= epochs[-1]["knn"] <= 1
    assert epochs[-1]["flagged"] > 0
    opened = open_run(run.path)
    data = opened.data()
    found = measure_kin(opened, data, 0)
    assert found["anchor_to_positive"]["recall"] > 0
    framework = restore(run.path, opened.config, data)
    ids = torch.arange(5)
    torch.testing.assert_close(
        framework.features(data.pixels(ids)), torch.from_numpy(opened.features(data, ids.numpy()))
    )


def test_resumed_is_uninterrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = write_table(tmp_path / "t.csv", negatives=1)
    method = "pairs+ifnd"  # refreshed with the embeddings of anchors and negatives
    own = {"detector.num_clusters": [4], "detector.schedule": "constant"}
    whole = run_on(table, tmp_path / "whole", method=method, settings=own)
    forward, calls = TextPairs.forward, []

    def stumbling(self: TextPairs, *args: Any, **more: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 7:
            raise RuntimeError("power cut")
        return forward(self, *args, **more)

    monkeypatch.setattr(TextPairs, "forward", stumbling)
    with pytest.raises(RuntimeError, match="power cut"):
        run_on(table, tmp_path / "cut", method=method, settings=own)
    monkeypatch.setattr(TextPairs, "forward", forward)
    resumed = run_on(None, tmp_path / "cut", resume=True)
    assert differences(resumed.path, whole.path) == []
    changed = rows(1)
    changed[3]["negative_1"] = "something else"
    write_table(table, changed)
    with pytest.raises(Exception, match="the data has changed since the run began"):
        train(None, tmp_path / "cut", resume=True, epochs=3, progress=False)


def test_detectors_have_state_for_explicit_negatives(tmp_path: Path) -> None:
    run = run_on(write_table(tmp_path / "t.csv", negatives=2), tmp_path / "run", epochs=1)
    opened = open_run(run.path)
    data = opened.data()
    assert data.num_ids > data.num_train
    framework = restore(run.path, opened.config, data)
    assert all(detector.num_samples == data.num_ids for detector in framework.detectors)


def test_method_and_data_must_fit(tmp_path: Path) -> None:
    table = write_table(tmp_path / "t.csv")
    with pytest.raises(UsageError, match="is a table of text pairs, and simclr learns from images"):
        train(table, tmp_path / "a", progress=False)
    with pytest.raises(UsageError, match="pairs learns from text pairs, and digits has none"):
        train("digits", tmp_path / "b", method="pairs", progress=False)
    one = write_table(tmp_path / "one.csv", rows()[:1])
    with pytest.raises(UsageError, match="has 1 training pair; a training contrasts pairs with"):
        run_on(one, tmp_path / "c")
    with pytest.raises(UsageError, match="takes no module as `model`"):
        run_on(table, tmp_path / "d", model=torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="there is no text encoder 'resnet18'"):
        run_on(table, tmp_path / "e", model="resnet18")


def test_pairs_without_negatives_are_refused(tmp_path: Path) -> None:
    """They would be trained on nothing."""
    same = write_table(tmp_path / "t.csv", [{"anchor": "a", "positive": str(n)} for n in range(8)])
    with pytest.raises(UsageError, match=r"the 8 training pairs of .* are one group"):
        run_on(same, tmp_path / "a", method="pairs")
    switched = {"framework.known_groups": False}
    assert run_on(same, tmp_path / "b", method="pairs", settings=switched).epochs()
    table = [{**row, "split": "Trian"} for row in rows()]
    with pytest.raises(UsageError, match=r"has 0 training pairs; .* rest are trian"):
        run_on(write_table(tmp_path / "s.csv", table), tmp_path / "c")
    table = [*rows()[:9], {**rows()[9], "anchor": ""}]
    run = run_on(write_table(tmp_path / "e.csv", table), tmp_path / "d", method="pairs")
    assert "1 of 10 text pairs was refused" in (run.path / "train.log").read_text()


def test_long_texts_are_cut(tmp_path: Path) -> None:
    table = [{"anchor": f"{n} " + "word " * 20_000, "positive": f"{n} b"} for n in range(8)]
    run = run_on(write_table(tmp_path / "t.csv", table), tmp_path / "run", epochs=1, method="pairs")
    assert run.epochs()[-1]["loss"] > 0
