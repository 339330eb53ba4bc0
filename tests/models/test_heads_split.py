"""Encoders that share an image's channels: what each sees, and that they can be saved and built
again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from kinfolk.errors import KinfolkError, UsageError
from kinfolk.models import (
    SplitEncoder,
    SplitHead,
    adapt,
    build_encoder,
    load_encoder,
    projection_head,
    resnet10,
    save_encoder,
)


def split_encoder() -> SplitEncoder:
    torch.manual_seed(0)
    return SplitEncoder(
        [
            build_encoder("resnet10", width=width, in_channels=number)
            for width, number in ((8, 1), (4, 2))
        ],
        (1, 2),
    )


def test_each_tower_sees_its_channels() -> None:
    encoder = split_encoder().eval()
    x = torch.randn(5, 3, 16, 16)
    features = encoder(x)
    assert (encoder.output_sizes, encoder.output_size) == ((64, 32), 96)
    torch.testing.assert_close(features[:, :64], encoder.towers[0](x[:, :1]))
    torch.testing.assert_close(features[:, 64:], encoder.towers[1](x[:, 1:]))
    other = x.clone()
    other[:, 1:] += 1
    assert torch.equal(encoder(other)[:, :64], features[:, :64]), (
        "the first tower does not see the other channels"
    )
    assert not torch.equal(encoder(other)[:, 64:], features[:, 64:])


def test_each_head_reads_its_tower() -> None:
    torch.manual_seed(0)
    head = SplitHead([projection_head(4, 6, 3, layers=2), nn.Linear(2, 5)], (4, 2)).eval()
    features = torch.randn(7, 6)
    assert head.output_size == 8
    torch.testing.assert_close(head(features)[:, :3], head.heads[0](features[:, :4]))
    torch.testing.assert_close(head(features)[:, 3:], head.heads[1](features[:, 4:]))


def test_saved_and_built_again(tmp_path: Path) -> None:
    encoder, x = split_encoder().eval(), torch.randn(2, 3, 16, 16)
    save_encoder(encoder, tmp_path, {"views": {"space": "lab"}})
    loaded, meta = load_encoder(tmp_path)
    assert isinstance(loaded, SplitEncoder)
    assert torch.equal(loaded(x), encoder(x))
    assert meta == {"views": {"space": "lab"}}
    described = json.loads((tmp_path / "model.json").read_text(encoding="utf-8"))
    assert described["encoder"]["channels"] == [1, 2]
    assert described["output_size"] == 96
    names = set(resnet10(width=8).state_dict())
    assert {
        name.removeprefix("towers.0.")
        for name in loaded.state_dict()
        if name.startswith("towers.0.")
    } == names


def test_towers_of_the_user_s_own_are_filled(tmp_path: Path) -> None:
    def own() -> SplitEncoder:
        return SplitEncoder([adapt(nn.Conv2d(number, 4, 3), 4) for number in (1, 2)], (1, 2))

    encoder, x = own(), torch.randn(2, 3, 8, 8)
    save_encoder(encoder, tmp_path)
    with pytest.raises(KinfolkError, match="does not describe its encoder"):
        load_encoder(tmp_path)
    assert torch.equal(load_encoder(tmp_path, own())[0](x), encoder(x))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="'torchvision/resnet18' takes images of 3 channels"):
        build_encoder("torchvision/resnet18", in_channels=1)
    with pytest.raises(UsageError, match="'timm/resnet18' takes images of 3 channels, not of 2"):
        build_encoder("timm/resnet18", in_channels=2)
    with pytest.raises(ValueError, match=r"`in_channels` \(=0\) must be at least 1"):
        build_encoder("resnet10", in_channels=0)
    with pytest.raises(ValueError, match="must be a number for each of the 1 encoders"):
        SplitEncoder([build_encoder("resnet10")], (1, 2))
    with pytest.raises(ValueError, match=r"the images \(=4 channels\) must have 3"):
        split_encoder()(torch.zeros(1, 4, 8, 8))
    with pytest.raises(ValueError, match="must be a number for each of the 1 heads"):
        SplitHead([nn.Linear(2, 2)], (1, 1))


def test_no_heads_leave_the_features_as_they_are() -> None:
    head = SplitHead([nn.Identity(), nn.Identity()], (3, 5))
    features = torch.randn(2, 8)
    assert head.output_size == 8
    assert torch.equal(head(features), features)
