"""Text pairs through the commands alone."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import kinfolk as kf
from kinfolk.cli import main
from kinfolk.errors import UsageError
from tests.training.text_table import SMALL, rows, write_table


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(each) for each in arguments])
    return int(caught.value.code or 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    table = write_table(folder / "pairs.csv")
    settings = {**SMALL, "detector.alpha": 0.1, "trainer.loggers": "none"}
    del settings["trainer.precision"]
    given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = ["train", "--data", str(table), "--out", str(folder / "run")]
    command += ["--method", "pairs+glofnd"]
    assert run(*command, "--epochs", "3", "--batch-size", "8", "--lr", "0.01", *given) == 0
    return folder / "run"


def test_the_report_shows_texts(trained: Path) -> None:
    page = (trained / "report.html").read_text()
    assert "Positives for an anchor" in page
    assert "on 36 text pairs" in page
    assert "i lost my card please" in page
    assert "There is no map" not in page
    assert "There is no gallery" not in page
    assert "data:image/webp" not in page


def test_every_protocol_measures_a_model_of_texts(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("eval", trained, "--protocol", "knn,linear,retrieval,kin,zero-shot") == 0
    result = json.loads((trained / "eval" / "retrieval.json").read_text())
    assert (result["anchors"], result["positives"]) == (12, 12)
    assert result["anchor_to_positive"]["R@10"] > 10 / 12 - 0.3
    assert set(result["positive_to_anchor"]) == {"R@1", "R@5", "R@10", "mAP", "nDCG@10"}
    assert result["label_map"] is None  # no two of the distinct anchors share a label
    scored = [
        {"anchor": row["anchor"], "positive": row["positive"], "score": str(number)}
        for number, row in enumerate(rows()[:5])
    ]
    sts = write_table(tmp_path / "sts.csv", scored)
    assert run("eval", trained, "--data", sts, "--protocol", "sts") == 0
    assert -1 <= json.loads((trained / "eval" / "sts.json").read_text())["spearman"] <= 1
    shown = capsys.readouterr().out
    assert "Spearman" in shown
    assert "a→p nDCG@10" in shown
    equal = write_table(tmp_path / "equal.csv", [{**row, "score": "1"} for row in scored])
    assert run("eval", trained, "--data", equal, "--protocol", "sts") == 2
    assert "the 5 pairs have one score" in capsys.readouterr().err
    assert run("eval", trained, "--protocol", "sts") == 2
    assert "the data has no column `score`" in capsys.readouterr().err
    assert run("report", trained) == 0
    assert "Spearman" in (trained / "report.html").read_text()


def test_texts_are_embedded_to_a_file(trained: Path, tmp_path: Path) -> None:
    assert run("embed", trained, "--out", tmp_path / "f.npy") == 0
    assert np.load(tmp_path / "f.npy").shape == (48, 16)


def test_audit_lists_sentences(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("audit", trained, "--alpha", "0.1", "--out", tmp_path / "a") == 0
    with open(tmp_path / "a" / "pairs.csv", newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    texts = {row["anchor"] for row in rows()}
    assert found
    assert all({row["anchor_text"], row["kin_text"]} <= texts for row in found)
    assert "i lost my card please" in (tmp_path / "a" / "audit.html").read_text()
    table = trained.parent / "pairs.csv"
    assert run("audit", table, "--encoder", trained, "--out", tmp_path / "b") == 0
    assert run("audit", table, "--out", tmp_path / "c") == 2
    assert "is a table of text pairs; embed them by a run" in capsys.readouterr().err


def test_comparison_has_columns_for_recall_of_texts(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("eval", trained, "--protocol", "retrieval") == 0
    assert run("compare", trained) == 0
    assert "a→p R@1" in capsys.readouterr().out


def test_without_labels_eval_names_the_protocol_of_texts(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "unlabelled.csv"
    with open(table, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(
            [("anchor", "positive"), *((row["anchor"], row["positive"]) for row in rows())]
        )
    assert run("eval", trained, "--data", table) == 2
    assert "evaluate this run with --protocol retrieval" in capsys.readouterr().err


def test_images_are_refused_by_a_model_of_texts(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("eval", trained, "--data", "digits") == 2
    assert "digits holds images, and" in capsys.readouterr().err


def test_exports_say_what_to_use_instead(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("export", trained, "--format", "onnx") == 2
    assert "was trained on texts, and exports are of image encoders" in capsys.readouterr().err
    assert run("export", trained, "--format", "open_clip") == 2
    assert "train in its own loop with kinfolk.integrations.open_clip" in capsys.readouterr().err


def test_a_loaded_encoder_tokenizes_and_embeds(trained: Path) -> None:
    encoder = kf.load(trained)
    texts = [row["anchor"] for row in rows()[:3]]
    with torch.no_grad():
        found = encoder(encoder.tokenize(texts)).numpy()
    np.testing.assert_allclose(found, kf.embed(trained)[:3], atol=1e-5)
    with pytest.raises(UsageError, match="was trained on texts; use `tokenize`"):
        encoder.preprocess(np.zeros((8, 8, 3), dtype=np.uint8))
