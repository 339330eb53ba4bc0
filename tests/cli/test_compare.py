"""`kinfolk compare` and `kinfolk export` as they are typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinfolk.cli import main
from kinfolk.models import build_encoder, save_encoder
from tests.comparing.runs import make_run


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    accuracies = {
        "simclr": (0.50, 0.52),
        "simclr+glofnd": (0.54, 0.55),
        "simclr+oracle:attract": (0.60, 0.62),
    }
    for method, values in accuracies.items():
        for seed, value in enumerate(values):
            epoch = {
                "flagged": 0.01,
                "precision": 0.5,
                "recall": 0.25,
                "f1": 0.3,
                "fn_similarity": 0.2,
                "tp_similarity": 0.9,
            }
            make_run(
                folder / f"{method.replace(':', '-')}-{seed}", method, seed, value, epoch=epoch
            )
    return folder


@pytest.mark.parametrize("width", [60, 80, 240])
def test_the_table_fits_the_screen(
    width: int, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert run("compare", runs) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert (sum(line.split()[:1] == ["method"] for line in lines) == 1) == (width == 240)
    text = "\n".join(lines)
    for shown in ("54.5 ± 0.7", "+3.5", "0.090", "not significant", "s / epoch"):
        assert shown in text
    assert "Mean ± standard deviation over 2 seeds" in text
    assert "…" not in text


def test_tables_are_written_as_csv(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "table.csv"
    assert run("compare", runs, "--out", out) == 0
    assert run("compare", runs, "--out", out) == 2
    assert (
        "exists; choose another file with --out, or replace it with --overwrite"
        in capsys.readouterr().err
    )
    assert out.read_text().startswith(
        "method,seeds,base,oracle,linear,linear_deviation,linear_runs,linear_low,linear_high,linear_gain,"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "x.doc"], "must end in .csv or .html"),
        (
            ["--base", "moco"],
            "`base` (=moco) must be one of the rows: simclr, simclr+glofnd, simclr+oracle:attract",
        ),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(
    arguments: list[str], message: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("compare", runs, *arguments) == 2
    assert message in capsys.readouterr().err


def test_export_shows_the_file_and_its_check_or_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_encoder(build_encoder("resnet10", width=4), tmp_path, {})
    assert run("export", tmp_path, "--format", "safetensors") == 0
    shown = capsys.readouterr().out
    assert f"Written: {tmp_path}/export/encoder.safetensors" in shown
    assert "Checked: read again and equal" in shown
    assert run("export", tmp_path, "--format", "torchvision") == 2
    assert (
        "Error: the encoder can't be exported to torchvision: there is no resnet10; its `stem` is"
        in capsys.readouterr().err
    )
