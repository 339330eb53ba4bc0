"""From images to a page, through the commands alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from kinfolk.cli import main

SMALL = [
    "--epochs",
    "2",
    "--batch-size",
    "16",
    "--image-size",
    "8",
    "--model",
    "resnet10",
    "--set",
    "model.width=4",
    "--workers",
    "0",
]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of 24 images, one broken file; no split."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for name, shade in (("bright", 200), ("dark <b>", 40)):
        (folder / name).mkdir()
        for i in range(24):
            pixels = np.clip(rng.normal(shade, 12, (10, 14, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i:02d}.png")
    (folder / "bright" / "broken.jpg").write_bytes(b"not an image")
    return folder


@pytest.fixture(scope="module")
def trained(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "photos"
    command = [
        "train",
        "--data",
        str(photos),
        "--out",
        str(out),
        "--labels-from-folders",
        "--method",
        "simclr+oracle",
        *SMALL,
    ]
    assert run(*command, "--temperature", "0.3", "--lr", "0.05", "--seed", "7") == 0
    return out


def test_training_leaves_a_run_with_its_page(trained: Path) -> None:
    config = (trained / "config.yaml").read_text(encoding="utf-8")
    for line in (
        "method: simclr+oracle",
        "epochs: 2",
        "seed: 7",
        "temperature: 0.3",
        "lr: 0.05",
        "labels_from_folders: true",
    ):
        assert line in config
    page = (trained / "report.html").read_text(encoding="utf-8")
    assert 'id="plot-map"' in page
    assert "dark &lt;b&gt;" in page


def test_evaluating_on_the_runs_own_data(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", str(trained), "--protocol", "knn,linear", "--k", "5") == 0
    shown = capsys.readouterr().out
    for protocol, tested in (("knn", 48), ("linear", 10)):
        result = json.loads((trained / "eval" / f"{protocol}.json").read_text())
        assert result["accuracy"] > 0.9  # bright against dark
        assert result["test"] == tested
        assert protocol in shown


def test_evaluating_on_other_data_with_a_test_split(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("eval", str(trained), "--data", "digits", "--protocol", "knn") == 0
    result = json.loads((trained / "eval" / "knn.json").read_text())
    assert (result["data"], result["measured_on"]) == ("digits", "test split")
    assert "test split" in capsys.readouterr().out


def test_evaluation_of_data_without_labels_names_the_option(
    trained: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("eval", str(trained), "--data", str(photos)) == 2
    assert "--labels-from-folders" in capsys.readouterr().err


def test_unknown_protocols_are_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", str(trained), "--protocol", "knn,lineer") == 2
    assert "did you mean linear?" in capsys.readouterr().err
    assert run("eval", str(trained), "--protocol", ",") == 2


def test_embed_writes_features_and_their_keys(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "features.npy"
    assert run("embed", str(trained), "--out", str(out)) == 0
    features, table = np.load(out), pq.read_table(out.with_suffix(".parquet"))
    assert features.dtype == np.float32
    assert len(features) == table.num_rows == 48
    assert table["id"].to_pylist() == list(range(48))
    assert table["key"].to_pylist()[0].endswith("00.png")
    assert run("embed", str(trained), "--out", str(out)) == 2
    assert f"{out} exists" in capsys.readouterr().err
    assert run("embed", str(trained), "--out", str(out), "--overwrite") == 0
    assert run("embed", str(trained), "--out", str(tmp_path / "features.xyz")) == 2
    np.testing.assert_array_equal(features, np.load(out))


def test_the_report_can_be_written_again(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (trained / "report.html").unlink()
    assert run("report", str(trained)) == 0
    assert str(trained / "report.html") in capsys.readouterr().out.replace("\n", "")
    assert (trained / "report.html").is_file()


def test_data_scans_a_folder_and_writes_tables(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(
            "data",
            str(photos),
            "--labels-from-folders",
            "--out",
            str(tmp_path / "scan"),
            "--workers",
            "0",
        )
        == 0
    )
    shown = capsys.readouterr().out
    for text in ("48 images, 14 × 10 pixels", "train", "bright", "dark <b>", "broken.jpg"):
        assert text in shown
    assert pq.read_table(tmp_path / "scan" / "samples.parquet").num_rows == 48
    assert "broken.jpg" in (tmp_path / "scan" / "quarantine.csv").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "--data", "digits", "--out", "{new}", "--method", "simclr+orcale"],
            "did you mean oracle",
        ),
        (["train", "--data", "digits", "--out", "{new}", "--set", "optimiser.lr=1"], "optimizer"),
        (["train", "--data", "digits", "--out", "{new}", "--set", "lr"], "KEY=VALUE"),
        (["train", "--data", "digits", "--out", "{new}", "--recipe", "demo-digit"], "demo-digits"),
        (
            ["train", "--data", "digits", "--out", "{run}"],
            "already holds a run; resume it (--resume), overwrite it (--overwrite)",
        ),
        (
            ["train", "--data", "digits", "--out", "{new}", "--method", "simclr+known"],
            "with --known-kin FILE",
        ),
        (
            ["train", "--data", "digits", "--out", "{run}", "--resume", "--overwrite"],
            "exclude each other",
        ),
        (["train", "--out", "{new}"], "`data` is required"),
        (["report", "{new}"], "no run folder"),
        (["eval", "{new}"], "not a run folder"),
        (["embed", "{new}", "--out", "x.npy"], "not a run folder"),
        (["data", "{new}"], "new"),
    ],
)
def test_wrong_options_of_a_journey_end_in_one_sentence(
    arguments: list[str],
    message: str,
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [word.format(new=tmp_path / "new", run=trained) for word in arguments]
    assert run(*filled) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "new").exists()


def test_clusters_are_measured(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", str(trained), "--protocol", "clusters") == 0
    result = json.loads((trained / "eval" / "clusters.json").read_text())
    assert 0 <= result["nmi"] <= 1
    assert (result["num_clusters"], result["seeds"], result["samples"]) == (2, [0, 1, 2, 3, 4], 48)
    assert "NMI" in capsys.readouterr().out
