"""`kinfolk eval WEIGHTS`: a checkpoint of another program is measured like a run, and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import kinfolk as kf
from kinfolk.cli import main
from kinfolk.errors import KinfolkError
from kinfolk.models import build_encoder
from kinfolk.training.foreign_weights import find_network

WIDTH = 4


def run(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return int(left.value.code or 0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw, file = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "few.npz"
    y = np.arange(90) % 3
    x = (draw.integers(0, 90, (90, 16, 16, 3)) + 70 * y[:, None, None, None]).astype(np.uint8)
    np.savez(file, x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:])
    return file


@pytest.fixture(scope="module")
def ours(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "ours"
    small = ["--epochs", "1", "--set", f"model.width={WIDTH}", "--no-report"]
    assert run("train", "--data", data, "--out", out, *small) == 0
    assert run("eval", out) == 0
    return out


def state_dict(name: str = "resnet18", **more: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(build_encoder(name, width=WIDTH, **more).state_dict())


def write_moco(path: Path) -> None:
    """As MoCo's code saves it: two encoders, their heads and a queue."""
    saved: dict[str, torch.Tensor] = {"module.queue": torch.zeros(2, 2)}
    for part in ("encoder_q", "encoder_k"):
        saved |= {f"module.{part}.{name}": value for name, value in state_dict().items()}
        saved[f"module.{part}.fc.0.weight"] = torch.zeros(3, 3)
    saved = {name: value + 1 if "_k." in name else value for name, value in saved.items()}
    torch.save({"epoch": 3, "arch": "resnet18", "state_dict": saved}, path)


@pytest.mark.parametrize("kind", ["torchvision.safetensors", "timm.pt", "checkpoint_0199.pth"])
def test_a_foreign_checkpoint_is_compared_with_a_run(
    kind: str, ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, plain = (
        tmp_path / kind,
        state_dict() | {"fc.weight": torch.zeros(5, 32), "fc.bias": torch.zeros(5)},
    )
    if kind.startswith("torchvision"):
        save_file(plain, file)
    elif kind.startswith("timm"):
        torch.save(plain, file)
    else:
        write_moco(file)
    assert (
        run(
            "eval",
            file,
            "--like",
            ours,
            "--protocol",
            "knn,linear,semi,clusters,transfer",
            "--percent",
            "50",
        )
        == 0
    )
    folder = tmp_path / f"{file.stem}-eval"
    assert "resnet18, cifar stem, width 4; 120 tensors" in capsys.readouterr().out
    measured = {path.stem for path in (folder / "eval").iterdir()}
    assert measured == {"knn", "linear", "semi", "clusters", "transfer"}
    encoder = kf.load(folder).encoder.state_dict()
    assert all(torch.equal(encoder[name], value) for name, value in state_dict().items())
    table = kf.compare([ours, folder])
    assert [record["method"] for record in table.records] == ["simclr", file.stem]
    assert all(record["linear"] is not None for record in table.records)
    assert table.notes == []


def test_foreign_weights_are_finetuned_and_measured_on_other_data(
    ours: Path, data: Path, tmp_path: Path
) -> None:
    torch.save(state_dict(), tmp_path / "simclr.pth")
    words: list[str | Path] = [
        "--name",
        "rival",
        "--train-seed",
        "3",
        "--out",
        tmp_path / "out",
    ]
    assert (
        run(
            "eval",
            tmp_path / "simclr.pth",
            "--data",
            data,
            "--protocol",
            "finetune",
            "--epochs",
            "1",
            *words,
        )
        == 0
    )
    assert (
        json.loads((tmp_path / "out" / "eval" / "finetune.json").read_text())["measured_on"]
        == "test split"
    )
    opened = kf.load(tmp_path / "out").run.config
    assert (opened.method, opened.seed, opened.views.size) == ("rival", 3, 16)


def test_a_file_named_like_a_method_has_another_row(ours: Path, tmp_path: Path) -> None:
    torch.save(state_dict(), tmp_path / "simclr.pth")
    assert run("eval", tmp_path / "simclr.pth", "--like", ours, "--protocol", "knn,linear") == 0
    table = kf.compare([ours, tmp_path / "simclr-eval"])
    assert [record["method"] for record in table.records] == ["simclr", "simclr (weights)"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--protocol", "kin"], "--protocol kin needs a run of kinfolk"),
        ([], "names no data to measure it on; give --data, or --like RUN"),
    ],
)
def test_foreign_weights_that_cannot_be_measured_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(state_dict(), tmp_path / "a.pth")
    assert run("eval", tmp_path / "a.pth", *words) == 2
    assert message in capsys.readouterr().err


def test_options_of_weights_are_refused_for_a_run(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("eval", ours, "--train-seed", "1") == 2
    assert "--train-seed and --out are for a file of weights" in capsys.readouterr().err


def test_another_file_is_no_weights(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", data) == 2
    assert "is neither a run folder nor a file of weights (.safetensors" in capsys.readouterr().err


def test_results_of_other_weights_are_kept(
    ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (0, 1):
        torch.save({name: value + seed for name, value in state_dict().items()}, tmp_path / "a.pth")
        code = run("eval", tmp_path / "a.pth", "--like", ours, "--protocol", "knn")
        assert code == (2 if seed else 0)
    assert "a-eval holds the results of other weights" in capsys.readouterr().err


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("evil",))


def test_only_tensors_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": state_dict(), "args": Evil()}, tmp_path / "a.pth")
    assert run("eval", tmp_path / "a.pth", "--data", "digits") == 1
    shown = capsys.readouterr()
    assert "evil" not in shown.out
    assert "holds Python objects besides tensors" in shown.err


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state_dict().items() if key != name}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"blocks.0.weight": torch.zeros(1)},
            "a.pth has no ResNet under the names of torchvision or timm",
        ),
        (
            state_dict() | {"layer1.7.conv1.weight": torch.zeros(1)},
            r"is a ResNet of \(3, 2, 2, 2\) basic blocks",
        ),
        (without("conv1.weight"), r"a.pth has no first convolution \(conv1.weight\)"),
        (state_dict(in_channels=1), r"conv1.weight\) of 3×3 or 7×7 on three channels"),
        (
            state_dict() | {"attention.weight": torch.zeros(1)},
            r"1 not of this network \(attention.weight\)",
        ),
        (
            state_dict() | {"layer4.0.conv2.weight": torch.zeros(2)},
            r"layer4.0.conv2.weight is \(2,\) and must be",
        ),
        (without("layer2.0.bn1.bias"), r"1 missing \(layer2.0.bn1.bias\)"),
    ],
)
def test_what_does_not_fit_is_named(state: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(KinfolkError, match=message) as caught:
        find_network(state, "a.pth")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["resnet10", "resnet34", "resnet50", "resnet101"])
@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
def test_the_network_is_found_from_the_shapes_of_its_weights(name: str, stem: str) -> None:
    found = find_network(
        {f"backbone.{key}": value for key, value in state_dict(name, stem=stem).items()}, "a"
    )
    assert found.arguments == {"name": name, "stem": stem, "width": WIDTH}
    assert found.left_out == 0
