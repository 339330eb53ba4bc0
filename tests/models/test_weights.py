"""Weights on disk: both ways, strict, whole or not at all, and without running code."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kinfolk.errors import KinfolkError
from kinfolk.models.encoders import adapt, build_encoder
from kinfolk.models.weights import load_encoder, load_state, load_weights, read_state, save_encoder


def small() -> nn.Module:
    return build_encoder("resnet10", width=4)


def test_save_and_load_by_folder_and_by_file(tmp_path: Path) -> None:
    encoder = small().eval()
    file = save_encoder(encoder, tmp_path / "run", {"method": "simclr", "mean": [0.5, 0.5, 0.5]})
    x = torch.randn(2, 3, 16, 16)
    for path in (tmp_path / "run", str(tmp_path / "run"), file):
        loaded, meta = load_encoder(path)
        assert meta == {"method": "simclr", "mean": [0.5, 0.5, 0.5]}
        assert not loaded.training
        assert torch.equal(loaded(x), encoder(x))
    assert sorted(entry.name for entry in (tmp_path / "run").iterdir()) == [
        "model.json",
        "model.safetensors",
    ]
    described = json.loads((tmp_path / "run" / "model.json").read_text())
    assert described["encoder"]["name"] == "resnet10"
    assert described["output_size"] == 32


def test_weights_of_an_earlier_version_load(tmp_path: Path) -> None:
    encoder: Any = small()
    encoder.config = {**encoder.config, "zero_init_residual": True}
    loaded, _ = load_encoder(save_encoder(encoder, tmp_path))
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.parameters(), encoder.parameters(), strict=True)
    )


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_others_may_read_the_weights_where_they_may_read_new_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        file = save_encoder(small(), tmp_path)
        (tmp_path / "new").write_text("x")
    finally:
        os.umask(before)
    assert file.stat().st_mode == (tmp_path / "new").stat().st_mode


def test_the_weights_alone_are_enough(tmp_path: Path) -> None:
    file = save_encoder(small(), tmp_path, {"a": 1})
    (tmp_path / "model.json").unlink()
    assert load_encoder(file)[1] == {"a": 1}


def test_the_file_holds_the_encoders_own_names(tmp_path: Path) -> None:
    encoder = small()
    state = read_state(save_encoder(encoder, tmp_path))
    assert state.keys() == encoder.state_dict().keys()
    inner = nn.Sequential(nn.Conv2d(3, 4, 3))
    assert read_state(save_encoder(adapt(inner), tmp_path)).keys() == inner.state_dict().keys()


def test_channels_last_and_shared_weights_are_saved(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)).to(
        memory_format=torch.channels_last
    )  # type: ignore[call-overload]
    module[1].weight = module[0].weight
    state = read_state(save_encoder(module, tmp_path))
    assert torch.equal(state["0.weight"], module[0].weight)
    assert torch.equal(state["1.weight"], module[0].weight)


def test_own_modules_are_filled_by_the_caller(tmp_path: Path) -> None:
    module = adapt(nn.Conv2d(3, 4, 3))
    save_encoder(module, tmp_path)
    with pytest.raises(KinfolkError, match="encoder=module"):
        load_encoder(tmp_path)
    other = adapt(nn.Conv2d(3, 4, 3))
    loaded, _ = load_encoder(tmp_path, encoder=other)
    x = torch.randn(1, 3, 8, 8)
    assert loaded is other
    assert torch.equal(other(x), module(x))


def test_torchvision_files_lose_fc_and_nothing_else(tmp_path: Path) -> None:
    encoder = small()
    state = small().state_dict() | {"fc.weight": torch.zeros(10, 32), "fc.bias": torch.zeros(10)}
    torch.save(state, tmp_path / "theirs.pth")
    load_weights(encoder, tmp_path / "theirs.pth")
    assert torch.equal(encoder.state_dict()["conv1.weight"], state["conv1.weight"])
    old = {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}
    load_state(small(), old)
    with pytest.raises(KinfolkError, match=r"1 not of this network \(head.weight\)"):
        load_state(encoder, state | {"head.weight": torch.zeros(1)})
    module = nn.ModuleDict({"fc": nn.Linear(2, 2)})  # a module with an fc of its own keeps it
    load_state(module, {"fc.weight": torch.ones(2, 2), "fc.bias": torch.ones(2)})
    assert bool((module.state_dict()["fc.weight"] == 1).all())


def test_a_mismatch_is_one_sentence_and_changes_nothing() -> None:
    encoder = small()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    state = build_encoder("resnet10", width=4, stem="imagenet").state_dict()
    del state["layer1.0.conv2.weight"]
    with pytest.raises(
        KinfolkError,
        match=(
            r"1 missing \(layer1.0.conv2.weight\); 1 of another shape \(conv1.weight is .*try the"
            r" other `stem`"
        ),
    ):
        load_state(encoder, state)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("pwned",)


def test_loading_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.pth").write_bytes(pickle.dumps({"conv1.weight": Evil()}))
    torch.save({"conv1.weight": Evil()}, tmp_path / "evil2.pth")
    for name in ("evil.pth", "evil2.pth"):
        with pytest.raises(KinfolkError, match="can't be read as weights"):
            load_weights(small(), tmp_path / name)
    assert not (tmp_path / "pwned").exists()


def test_damaged_and_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(KinfolkError, match=r"no model.safetensors at"):
        load_encoder(tmp_path)
    with pytest.raises(KinfolkError, match="no file of weights"):
        read_state(tmp_path / "nothing.pth")
    file = save_encoder(small(), tmp_path)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(KinfolkError, match="damaged"):
        load_encoder(tmp_path)
    with pytest.raises(KinfolkError, match="damaged"):
        read_state(file)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(KinfolkError, match="is not a state dict"):
        read_state(tmp_path / "list.pt")


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = small()
    save_encoder(encoder, tmp_path)

    def crash(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("kinfolk.files.os.replace", crash)
    with pytest.raises(
        KinfolkError,
        match=r"model\.safetensors cannot be written: disk full; what was there before is kept",
    ):
        save_encoder(small(), tmp_path)
    loaded, _ = load_encoder(tmp_path)
    assert torch.equal(loaded.state_dict()["conv1.weight"], encoder.state_dict()["conv1.weight"])
