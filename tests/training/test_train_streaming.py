"""Trainings on streamed data: the same result after a kill, per-sample methods, refreshes from what
the epoch collected, captions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kinfolk.data.prepare import read_quarantine
from kinfolk.errors import KinfolkError
from kinfolk.training import epoch_end, module
from kinfolk.training.checkpoint import read_checkpoint
from kinfolk.training.run_folder import Run
from kinfolk.training.train import train
from tests.data.test_shards import png, shard
from tests.data.test_stream import make_shards
from tests.training.children import run_child, run_ranks
from tests.training.small import SMALL, assert_same

SETTINGS: dict[str, Any] = {
    "data.streaming": True,
    "data.shuffle_buffer": 24,
    "data.image_size": 16,
    "data.workers": 0,
    **SMALL,
    "detector.alpha": 0.05,
    "detector.init": "quantile",
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """70 images in four shards, one of them corrupt: four batches of 16 an epoch."""
    return make_shards(tmp_path_factory.mktemp("data") / "shards", 20, 25, 10, 15, bad=(5,))


def arguments(data: Path, **more: Any) -> dict[str, Any]:
    settings = {**SETTINGS, **more.pop("settings", {})}
    if "method" in more and "glofnd" not in more["method"]:
        settings = {
            key: value
            for key, value in settings.items()
            if not key.startswith("detector.") or key in more.get("own", ())
        }
    more.pop("own", None)
    return {
        "data": str(data),
        "method": "sogclr+glofnd",
        "epochs": 3,
        "batch_size": 16,
        "progress": False,
        "settings": settings,
        **more,
    }


@pytest.fixture(scope="module")
def whole(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(out=tmp_path_factory.mktemp("runs") / "whole", **arguments(shards))


def test_a_training_leaves_the_corrupt_image_out_by_name(whole: Run) -> None:
    assert [row["step"] for row in whole.epochs()] == [4, 8, 12]
    assert [key for key, _ in read_quarantine(whole.quarantine)] == ["000.tar/0005"]
    assert not list(whole.path.rglob("*.u8")), "no pixels are kept"
    state = read_checkpoint(whole.checkpoint)["state_dict"]
    seen = next(
        value
        for name, value in state.items()
        if "threshold" in name and value.ndim == 1 and len(value) == 70
    )
    assert len(seen.unique()) > 30, "each sample has a state of its own"


@pytest.mark.parametrize("moment", ["kill step 1", "kill step 6"])
def test_killed_anywhere_and_resumed_is_the_same(
    whole: Run, shards: Path, tmp_path: Path, moment: str
) -> None:
    out = tmp_path / "run"
    assert run_child(out, moment, each_step=True, **arguments(shards)) == -9
    again = train(out=out, resume=True, progress=False)
    assert_same(whole, again)


def test_a_batch_that_lost_an_image_has_as_many_chunks(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several ranks the number of chunks must be the same, or those with a BatchNorm over all
    ranks would wait for each other."""
    asked: list[int] = []
    original = module.in_chunks

    def noted(modules: Any, number: int) -> Any:
        asked.append(number)
        return original(modules, number)

    monkeypatch.setattr(module, "in_chunks", noted)
    train(out=tmp_path / "run", **arguments(shards, epochs=2, settings={"trainer.chunk_size": 15}))
    assert asked == [2] * 8


def test_a_changed_shard_is_refused_on_resume(tmp_path: Path) -> None:
    data = make_shards(tmp_path / "shards", 20, 20)
    assert run_child(tmp_path / "run", "kill step 3", each_step=True, **arguments(data)) == -9
    (data / "001.tar").unlink()
    with pytest.raises(KinfolkError, match="the data has changed since the run began"):
        train(out=tmp_path / "run", resume=True, progress=False)


CLUSTERED: dict[str, Any] = {
    "method": "simclr+ifnd",
    "own": ("detector.num_clusters", "detector.warmup_epochs"),
    "settings": {"detector.num_clusters": [4, 8]},
}


def test_clusters_come_from_the_embeddings_of_the_epoch(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[str] = []
    for name in ("embed_in_parts", "embed"):
        original = getattr(epoch_end, name)

        def noted(*args: Any, name: str = name, original: Any = original, **more: Any) -> Any:
            passes.append(name if name == "embed_in_parts" else f"{name} {len(args[3])}")
            return original(*args, **more)

        monkeypatch.setattr(epoch_end, name, noted)
    run = train(out=tmp_path / "run", **arguments(shards, **CLUSTERED))
    rows = run.epochs()
    refreshed = [row for row in rows if "refresh_seconds" in row]
    assert refreshed
    assert rows[0] not in refreshed
    assert "embed_in_parts" not in passes, "no pass over all images, not even after the last epoch"
    assert any(each.startswith("embed ") and int(each.split()[1]) <= 7 for each in passes), (
        "what the epoch left out is read"
    )
    assert (
        run_child(
            tmp_path / "killed", "kill step 7", each_step=True, **arguments(shards, **CLUSTERED)
        )
        == -9
    )
    assert_same(run, train(out=tmp_path / "killed", resume=True, progress=False))


def test_two_ranks_collect_the_same_embeddings_and_name_the_corrupt_image_once(
    shards: Path, tmp_path: Path
) -> None:
    common = arguments(shards, epochs=2, **CLUSTERED)
    common["settings"] |= {"trainer.precision": "32"}
    assert run_ranks(tmp_path / "run", "", "", **common) == [0, 0]
    run = Run(tmp_path / "run")
    assert [row["step"] for row in run.epochs()] == [4, 8]
    assert any("refresh_seconds" in row for row in run.epochs())
    assert [key for key, _ in read_quarantine(run.quarantine)] == ["000.tar/0005"]


def test_captions_are_streamed_too(tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    for n in range(20):
        files |= {f"{n:03d}.png": png(n), f"{n:03d}.txt": f"image {n % 7} of {n}".encode()}
    shard(tmp_path / "shards" / "a.tar", files)
    settings = {
        "text.layers": 1,
        "text.width": 16,
        "text.heads": 2,
        "text.context": 16,
        "text.vocab_size": 300,
    }
    common = arguments(
        tmp_path / "shards", method="clip", epochs=1, batch_size=8, settings=settings
    )
    run = train(out=tmp_path / "run", **common)
    cached = train(
        out=tmp_path / "cached",
        **{**common, "settings": {**common["settings"], "data.streaming": False}},
    )
    assert [row["step"] for row in run.epochs()] == [row["step"] for row in cached.epochs()] == [2]
    assert run.tokenizer.read_bytes() == cached.tokenizer.read_bytes()


def test_a_folder_is_streamed_and_evaluated_like_a_cached_one(tmp_path: Path) -> None:
    from tests.data.images import noise, save

    for n in range(24):
        save(tmp_path / "data" / "ab"[n % 2] / f"{n:02d}.png", noise(8, 8, n))
    runs = []
    for streaming in (True, False):
        settings = {"data.streaming": streaming, "data.labels_from_folders": True}
        runs.append(
            train(
                out=tmp_path / f"run-{streaming}",
                **arguments(tmp_path / "data", epochs=1, batch_size=8, settings=settings),
            )
        )
    a, b = (run.epochs()[0] for run in runs)
    assert a["loss"] == b["loss"], "of a folder the order is that of the cached mode"
    assert a["knn"] == b["knn"]
