"""Models of sentence-transformers in `kinfolk train --model st/…`, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kinfolk.auditing.inputs import read_input
from kinfolk.cli import main
from kinfolk.detectors import Guide
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.frameworks import TextPairs
from kinfolk.training.load_run import open_run, restore
from kinfolk.training.train import train
from tests.faults.inject import differences
from tests.training.text_table import SMALL, write_table

pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the other libraries

from tests.integrations.test_sentence_transformers import sentence, small_model  # noqa: E402

SETTINGS = {"trainer.precision": "32", "trainer.loggers": [], "detector.alpha": 0.1}


def table(path: Path, number: int = 16) -> Path:
    rows = [
        {
            "anchor": sentence(i % 4, 4 + i, i + 7),
            "positive": sentence(i % 4, 20 + i, 31 + i % 3, i),
            "label": str(i % 4),
        }
        for i in range(number)
    ]
    return write_table(path, rows)


def saved(folder: Path, ends: bool, dropout: float = 0.0) -> Path:
    """The folder of a small model; `ends`: whether its tokenizer adds [CLS] and [SEP]."""
    from tokenizers.processors import TemplateProcessing

    model = small_model(dropout)
    if ends:
        model.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    model.save_pretrained(str(folder))
    return folder


def trained(data: Path | None, out: Path, folder: Path, **more: Any) -> Any:
    given: dict[str, Any] = {
        "method": "pairs+glofnd",
        "model": f"st/{folder}",
        "batch_size": 8,
        "epochs": 2,
        "settings": SETTINGS,
    }
    return train(data, out, progress=False, **({} if data is None else given), **more)


@pytest.mark.parametrize("ends", [True, False])
def test_a_run_embeds_as_its_sentence_transformer(tmp_path: Path, ends: bool) -> None:
    from sentence_transformers import SentenceTransformer

    data, folder = table(tmp_path / "t.csv"), saved(tmp_path / "model", ends)
    first = SentenceTransformer(str(folder), device="cpu").encode([sentence(1, 2)])
    run = trained(data, tmp_path / "run", folder)
    opened = open_run(run.path)
    assert opened.config.text.context == 16  # that of the model
    images = opened.data()
    texts = [sentence(i % 4, 4 + i, i + 7) for i in range(16)]
    model = SentenceTransformer(str(run.sentence_transformer), device="cpu")
    np.testing.assert_allclose(opened.features(images), model.encode(texts), atol=1e-5)
    assert not np.allclose(first, model.encode([sentence(1, 2)]), atol=1e-4)  # it has learned
    folder.rename(tmp_path / "moved")
    torch.testing.assert_close(
        opened.towers().texts(texts[:2]),
        torch.from_numpy(model.encode(texts[:2], normalize_embeddings=True)),
    )


def test_resumed_is_uninterrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, folder = table(tmp_path / "t.csv"), saved(tmp_path / "model", True, dropout=0.1)
    whole = trained(data, tmp_path / "whole", folder)
    forward, calls = TextPairs.forward, []

    def stumbling(self: TextPairs, *args: Any, **more: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("power cut")
        return forward(self, *args, **more)

    monkeypatch.setattr(TextPairs, "forward", stumbling)
    with pytest.raises(RuntimeError, match="power cut"):
        trained(data, tmp_path / "cut", folder)
    monkeypatch.setattr(TextPairs, "forward", forward)
    resumed = trained(None, tmp_path / "cut", folder, resume=True)
    assert differences(resumed.path, whole.path) == []


def test_a_model_guides_with_its_positives(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    data, folder = table(tmp_path / "t.csv"), saved(tmp_path / "model", True)
    run = train(
        data,
        tmp_path / "run",
        method="pairs+guide:eliminate",
        batch_size=8,
        epochs=1,
        settings={**SMALL, "detector.features": f"st/{folder}", "detector.margin": 0.1},
        progress=False,
    )
    opened = open_run(run.path)
    framework = restore(run.path, opened.config, opened.data())
    guide, other = framework.detectors
    assert isinstance(guide, Guide)
    assert isinstance(other, Guide)
    assert guide.positives is not None
    assert guide.features is not None
    assert other.features is not None
    assert torch.equal(guide.positives, other.features)  # towers change places
    expected = SentenceTransformer(str(folder), device="cpu").encode(
        [sentence(0, 4, 7), sentence(0, 20, 31, 0)], normalize_embeddings=True
    )
    np.testing.assert_allclose(
        torch.stack((guide.features[0], guide.positives[0])).float(), expected, atol=2e-3
    )
    assert list((run.path / "cache").glob("guide-*.npy"))
    pair = {"anchor": sentence(0, 4), "positive": sentence(0, 5), "negative": sentence(1, 6)}
    other_pair = {name: text + " c" for name, text in pair.items()}
    hard = write_table(tmp_path / "hard.csv", [pair, other_pair])
    np.save(tmp_path / "f.npy", np.ones((2, 4), dtype=np.float32))
    for table_of, named, why in (
        (data, "timm/resnet18", "must be a model of sentence-transformers"),
        (hard, str(tmp_path / "f.npy"), "has features of the anchors alone, and the explicit"),
    ):
        with pytest.raises(UsageError, match=why):
            train(
                table_of,
                tmp_path / "no",
                method="pairs+guide",
                settings={**SMALL, "detector.features": named},
                progress=False,
            )


def test_an_audit_embeds_texts_with_a_sentence_model(tmp_path: Path) -> None:
    data, folder = table(tmp_path / "t.csv"), saved(tmp_path / "model", True)
    found = read_input(data, encoder=f"st/{folder}", progress=False)
    assert np.shape(found.features) == (16, 16)
    assert found.texts is not None
    assert found.texts[0] == sentence(0, 4, 7)
    assert found.labels == [i % 4 for i in range(16)]
    with pytest.raises(UsageError, match="embeds texts, and `digits` holds images"):
        read_input("digits", encoder=f"st/{folder}", progress=False)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(KinfolkError, match=r"can't be loaded: .*; give st/FOLDER, or st/NAME"):
        trained(table(tmp_path / "t.csv"), tmp_path / "run", tmp_path / "empty")


def run_command(words: list[str]) -> int:
    with pytest.raises(SystemExit) as left:
        main(words)
    return int(left.value.code or 0)


def test_advice_for_texts_names_the_model_and_tries_the_methods_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = table(tmp_path / "t.csv", 32), f"st/{saved(tmp_path / 'model', True)}"
    command = ["advise", str(folder), "--out", str(tmp_path / "advice"), "--alpha", "0.1"]
    assert run_command(command) == 2
    assert "(--guide st/NAME)" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr("kinfolk.sweeping.MOST_EPOCHS", 3)
    monkeypatch.setattr("kinfolk.sweeping.PLANNED_SEEDS", 2)
    monkeypatch.setattr("kinfolk.sweeping.MOST_SEEDS", 2)
    command += ["--guide", model, "--try", "20", "--set", "batch_size=8"]
    assert run_command(command) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"--model {model} --out runs/pairs --method pairs" in said
    assert "3 epochs and 2 seeds each" in said
    assert f"--data {folder} --model {model} --set batch_size=8 --out runs/" in said
    for name in ("pairs", "glofnd"):
        opened = open_run(tmp_path / "advice" / "try" / name / "seed-1")
        assert opened.config.model.name == model


def test_a_trial_of_texts_without_labels_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"anchor": sentence(1, i), "positive": sentence(2, i)} for i in range(16)]
    data, model = write_table(tmp_path / "t.csv", rows), saved(tmp_path / "model", True)
    command = ["advise", str(data), "--out", str(tmp_path / "advice"), "--guide", f"st/{model}"]
    assert run_command([*command, "--try", "1"]) == 2
    assert "give `" in (said := " ".join(capsys.readouterr().err.split()))
    assert "a column `label`" in said
