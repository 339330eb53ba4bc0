"""`kinfolk audit` from the shell's side: what is written, what is said, and the exit codes."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kinfolk.cli import main
from kinfolk.clustering import PatchFeatures


def run(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return int(left.value.code or 0)


@pytest.fixture
def features(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(12, 4)).astype(np.float16))
    return tmp_path / "x.npy"


@pytest.fixture(autouse=True)
def few_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = partial(PatchFeatures.fit, num_patches=20, samples=2000)
    monkeypatch.setattr(PatchFeatures, "fit", fit)


def test_audit_writes_its_files_and_a_summary(
    features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "y.txt").write_text("\n".join("ab" * 6))
    for i in range(12):
        folder = tmp_path / "photos" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 14), (20 * i, 0, 0)).save(folder / f"{i:02}.png")
    out = tmp_path / "out"
    assert (
        run(
            "audit",
            features,
            "--out",
            out,
            "--alpha",
            "0.2",
            "--pairs",
            "2",
            "--labels",
            tmp_path / "y.txt",
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "12 samples" in said
    assert "Precision" in said
    assert {
        "pairs.parquet",
        "pairs.csv",
        "thresholds.parquet",
        "audit.html",
        "groups.csv",
        "hubs.csv",
    } <= {p.name for p in out.iterdir()}
    assert run("audit", features, "--out", out) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (
        run(
            "audit",
            features,
            "--out",
            out,
            "--overwrite",
            "--alpha",
            "0.2",
            "--images",
            tmp_path / "photos",
            "--labels-from-folders",
        )
        == 0
    )
    assert "data:image/webp" in (out / "audit.html").read_text()
    assert "Equal labels" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (
            ["gone.npy"],
            2,
            (
                "give a folder of images, a run folder, or a file of features, such as `kinfolk"
                " embed RUN"
            ),
        ),
        (["xx.npy"], 2, "there is no file or folder `xx.npy`; did you mean `x.npy`?"),
        (["x.npy", "--alpha", "1.5"], 2, "must be in (0, 1)"),
        (["x.npy", "--labels", "short.txt"], 2, "must be as many as the samples"),
        (["x.npy", "--labels-from-folders"], 2, "needs --images"),
        (["x.npy", "--images", "three"], 2, "3 images and `x.npy` has 12 rows"),
        (
            ["x.npy", "--images", "bad"],
            2,
            "of which 1 can't be read (the first is a.png:",
        ),
        (["bad.npy"], 1, "`bad.npy` is not a readable array"),
        (["nan.npy"], 1, "the first is row 2"),
    ],
)
def test_wrong_options_and_broken_inputs_end_in_one_sentence(
    features: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("a\nb")
    (tmp_path / "bad.npy").write_bytes(b"")
    x = np.ones((5, 2))
    x[2] = np.nan
    np.save("nan.npy", x)
    (tmp_path / "three").mkdir()
    for i in range(3):
        Image.new("RGB", (9, 9)).save(tmp_path / "three" / f"{i}.png")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").write_bytes(b"x")
    Image.new("RGB", (9, 9)).save(tmp_path / "bad" / "b.png")
    assert run("audit", *words) == code
    error = capsys.readouterr().err
    assert says in " ".join(error.split())
    assert "Traceback" not in error
    assert not (tmp_path / "audit").exists()


def test_a_run_is_audited_and_its_pairs_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = [
        "--epochs",
        "1",
        "--batch-size",
        "64",
        "--no-report",
        "--set",
        "model.width=4",
        "--model",
        "resnet10",
    ]
    x = np.random.default_rng(0).integers(0, 255, (128, 16, 16, 3), dtype=np.uint8)
    np.savez(
        tmp_path / "x.npz",
        x_train=x,
        y_train=np.arange(128) % 4,
        x_test=x[:20],
        y_test=np.arange(20) % 4,
    )
    assert run("train", "--data", tmp_path / "x.npz", "--out", tmp_path / "one", *quick) == 0
    assert run("audit", tmp_path / "one", "--out", tmp_path / "audit", "--alpha", "0.05") == 0
    assert "128 samples" in " ".join(capsys.readouterr().out.split()), (
        "the training samples, not the test split"
    )
    assert run("embed", tmp_path / "one", "--out", tmp_path / "x.npy") == 0
    assert run("audit", tmp_path / "x.npy", "--out", tmp_path / "from-npy", "--alpha", "0.05") == 0
    assert "Precision" in capsys.readouterr().out, "labels and keys are in the table"
    assert "anchor_key" in (tmp_path / "from-npy" / "pairs.csv").read_text().splitlines()[0]
    known = ["--known-kin", str(tmp_path / "audit" / "pairs.parquet")]
    assert (
        run(
            "train",
            "--data",
            tmp_path / "x.npz",
            "--out",
            tmp_path / "two",
            "--method",
            "simclr",
            *known,
            *quick,
        )
        == 2
    )
    assert "--method simclr+known" in capsys.readouterr().err
    assert (
        run(
            "train",
            "--data",
            tmp_path / "x.npz",
            "--out",
            tmp_path / "two",
            "--method",
            "simclr+known",
            *known,
            *quick,
        )
        == 0
    )
    assert '"flagged"' in (tmp_path / "two" / "metrics.jsonl").read_text()
    np.savez(tmp_path / "few.npz", x_train=x[:64])
    capsys.readouterr()
    assert (
        run(
            "train",
            "--data",
            tmp_path / "few.npz",
            "--out",
            tmp_path / "three",
            "--method",
            "simclr+known",
            *known,
            *quick,
        )
        == 2
    )
    assert "has the pairs of 128 samples, but there are 64 training samples" in " ".join(
        capsys.readouterr().err.split()
    )


def test_images_with_several_captions_are_audited_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = image_folder(tmp_path / "photos", 24)
    images = sorted(path.relative_to(tmp_path) for path in photos.rglob("*.png"))
    rows = [f"{path},caption {number} of {path.stem}" for path in images for number in range(5)]
    (tmp_path / "train.csv").write_text("image,caption\n" + "\n".join(rows))
    quick = [
        "--epochs",
        "1",
        "--batch-size",
        "16",
        "--no-report",
        "--set",
        "model.width=4",
        "--image-size",
        "16",
    ]
    assert (
        run(
            "train",
            "--data",
            tmp_path / "train.csv",
            "--out",
            tmp_path / "run",
            "--recipe",
            "clip-cpu",
            *quick,
        )
        == 0
    )
    capsys.readouterr()
    assert run("audit", tmp_path / "run", "--out", tmp_path / "audit", "--alpha", "0.1") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Each of 24 samples was compared" in text
    summary = json.loads((tmp_path / "audit" / "summary.json").read_text())
    assert summary["samples"] == 24
    assert summary["duplicate_groups"] == 0, "the rows of one image are not duplicates"
    assert "--method clip" in text
    assert "simclr" not in text
    page = (tmp_path / "audit" / "audit.html").read_text()
    assert "caption 0 of 00 / caption 1 of 00" in page


def image_folder(folder: Path, number: int = 24) -> Path:
    rng = np.random.default_rng(0)
    for i in range(number):
        place = folder / "ab"[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 120, (6, 6, 3), dtype=np.uint8) + np.uint8(100 * (i % 2))
        Image.fromarray(pixels).resize((120, 120), Image.Resampling.BICUBIC).save(
            place / f"{i:02}.png"
        )
    return folder


def test_a_reordered_label_file_gives_the_same_precision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image_folder(tmp_path / "photos")
    x = np.random.default_rng(1).normal(size=(24, 8))
    np.save(tmp_path / "x.npy", x)
    rows = [
        f"{name}/{i:02}.png,{i % 2}\n" for name in "ab" for i in range(24) if "ab"[i % 2] == name
    ]
    said = []
    for number, ordered in enumerate((rows, rows[::-1])):
        (tmp_path / "y.csv").write_text("file,label\n" + "".join(ordered))
        out = tmp_path / f"out{number}"
        assert (
            run(
                "audit",
                tmp_path / "x.npy",
                "--images",
                tmp_path / "photos",
                "--labels",
                tmp_path / "y.csv",
                "--out",
                out,
                "--alpha",
                "0.2",
            )
            == 0
        )
        said.append(
            next(line for line in capsys.readouterr().out.splitlines() if "Precision" in line)
        )
    assert said[0] == said[1]
    assert "b/23.png" in (tmp_path / "out0" / "pairs.csv").read_text()


def test_advise_names_commands_and_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kinfolk.training.train.train", None)
    photos = image_folder(tmp_path / "photos", 64)
    out = tmp_path / "advice"
    assert run("advise", photos, "--labels-from-folders", "--out", out, "--alpha", "0.1") == 0
    said = capsys.readouterr().out
    text = " ".join(said.split())
    assert "by k-means of patches of these images" in text
    assert "false negatives among its 510 negatives" in text
    assert f"  kinfolk train --data {photos} --labels-from-folders" in said
    assert not (out / "encoder").exists()
    assert run("advise", photos, "--out", out) == 2
    assert "choose another folder with --out, or replace it with --overwrite" in " ".join(
        capsys.readouterr().err.split()
    )


def test_the_same_features_get_the_same_advice_as_a_run_and_as_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shades = np.random.default_rng(0).integers(0, 255, (8, 1, 1, 3))[np.arange(128) % 8]
    x = (
        (shades + np.random.default_rng(1).integers(-9, 9, (128, 16, 16, 3)))
        .clip(0, 255)
        .astype(np.uint8)
    )
    np.savez(tmp_path / "x.npz", x_train=x, y_train=np.arange(128) % 8)
    quick = [
        "--epochs",
        "1",
        "--batch-size",
        "64",
        "--no-report",
        "--set",
        "model.width=4",
        "--model",
        "resnet10",
    ]
    assert run("train", "--data", tmp_path / "x.npz", "--out", tmp_path / "one", *quick) == 0
    assert run("embed", tmp_path / "one", "--out", tmp_path / "features.npy") == 0
    verdicts = []
    for given, out in ((tmp_path / "one", "a"), (tmp_path / "features.npy", "b")):
        capsys.readouterr()
        assert run("audit", given, "--out", tmp_path / out, "--alpha", "0.05") == 0
        lines = capsys.readouterr().out.splitlines()
        verdicts.append([line for line in lines if "kinfolk train --data" in line])
        assert (
            "trained on the same samples"
            in json.loads((tmp_path / out / "summary.json").read_text())["verdict"][3]
        )
    assert verdicts[0] == verdicts[1]
    assert len(verdicts[0]) >= 3


def test_images_of_features_may_have_labels_from_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    for number in range(24):
        folder = tmp_path / "photos" / f"class {number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02}.png")
    photos, features = tmp_path / "photos", tmp_path / "features.npy"
    small = ["--epochs", "1", "--batch-size", "8", "--no-report", "--set", "model.width=4"]
    data: list[str | Path] = ["--data", photos, "--labels-from-folders"]
    assert run("train", *data, "--out", tmp_path / "one", "--model", "resnet10", *small) == 0
    assert run("embed", tmp_path / "one", "--out", features) == 0
    capsys.readouterr()
    images: list[str | Path] = ["--images", photos, "--labels-from-folders"]
    assert run("audit", features, *images, "--out", tmp_path / "a") == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [line for line in lines if "kinfolk train --data" in line]
    assert commands
    assert all("--labels-from-folders" in line for line in commands)
    assert "oracle:attract" in commands[-1]


def printed(noise: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that `kinfolk audit` prints for ten classes with so much noise."""
    labels = np.arange(200) % 10
    np.save(
        tmp_path / "x.npy",
        np.eye(10)[labels] + noise * np.random.default_rng(0).normal(size=(200, 10)),
    )
    (tmp_path / "y.txt").write_text("\n".join(map(str, labels)))
    assert (
        run("audit", tmp_path / "x.npy", "--out", tmp_path / "out", "--labels", tmp_path / "y.txt")
        == 0
    )
    return capsys.readouterr().out.splitlines()


def test_good_features_are_worth_a_try_and_the_command_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = (line for line in printed(0.05, tmp_path, capsys) if "+guide:attract" in line)
    words = shlex.split(command)
    assert words[:2] == ["kinfolk", "train"]
    assert Path(words[words.index("--guide") + 1]) == tmp_path / "x.npy"
    np.savez(
        tmp_path / "images.npz",
        images=np.random.default_rng(0).integers(0, 256, (200, 8, 8, 3), dtype=np.uint8),
    )
    words[words.index("--data") + 1], words[words.index("--out") + 1] = (
        str(tmp_path / "images.npz"),
        str(tmp_path / "run"),
    )
    assert run(*words[1:], "--epochs", "1", "--set", "model.width=4", "--no-report") == 0


def test_patches_are_audited_as_a_guide_for_the_same_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", images=x)
    assert (
        run("advise", tmp_path / "data.npz", "--guide", "patches", "--out", tmp_path / "advice")
        == 0
    )
    assert "by k-means of patches of these images" in " ".join(capsys.readouterr().out.split())


def test_weak_features_suggest_better_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(5.0, tmp_path, capsys)
    assert "these features tell little" in " ".join(" ".join(lines).split())
    assert any("kinfolk advise DATA --guide" in line for line in lines)
    assert not any("+guide" in line for line in lines)


def test_advise_tries_the_methods_on_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audited features are the guide, labels of a file decide, and a repeated command continues
    without another audit."""
    from kinfolk import sweeping as trial

    calls = list[dict[str, Any]]()

    def record(data: str, out: Path, candidates: Any, **given: Any) -> trial.Trial:
        calls.append({"data": data, "candidates": candidates, **given})
        plan = trial.Plan(
            data, tuple(candidates) or calls[0]["candidates"], {}, None, 3, 1.0, "knn"
        )
        plan.save(out)
        return trial.Trial(plan, 0, None)

    monkeypatch.setattr(trial, "run_trial", record)
    x = np.random.default_rng(0).integers(0, 256, (8, 1, 1, 3))[np.arange(64) % 8]
    x = (x + np.random.default_rng(1).integers(-9, 9, (64, 8, 8, 3))).clip(0, 255).astype(np.uint8)
    np.savez(tmp_path / "x.npz", images=x)
    np.save(tmp_path / "y.npy", np.arange(64) % 8)
    command: list[str | Path] = ["advise", tmp_path / "x.npz", "--try", "30"]
    command += ["--out", tmp_path / "advice"]
    command += ["--labels", tmp_path / "y.npy", "--set", "batch_size=32", "--alpha", "0.1"]
    assert run(*command) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "repeat the command to continue" in said
    first = calls[0]
    assert first["minutes"] == 30
    assert first["settings"] == {"batch_size": 32}
    assert first["labels"].tolist() == (np.arange(64) % 8).tolist()
    assert [each.method for each in first["candidates"]] == [
        "simclr",
        "simclr+glofnd",
        "simclr+guide:attract",
    ]
    guide = Path(first["candidates"][-1].settings["detector.features"])
    assert len(np.load(guide)) == 64
    monkeypatch.setattr("kinfolk.auditing.audit", None)
    assert run(*command) == 0
    assert calls[1]["labels"].tolist() == first["labels"].tolist()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--try", "0"), "--try (=0) must be above 0 minutes"),
        (("--set", "epochs=3"), "--set and --recipe are for the trainings of --try"),
    ],
)
def test_options_of_a_trial_are_checked_first(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("advise", tmp_path, "--out", tmp_path / "advice", *words) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_folder_with_one_image_is_refused_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one").mkdir()
    Image.new("RGB", (20, 14), (200, 0, 0)).save(tmp_path / "one" / "a.png")
    assert run("audit", tmp_path / "one", "--out", tmp_path / "out") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "has 1 image; an audit compares images with each other and needs at least 2" in said
