"""Heads: the layers each paper's call makes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kinfolk.models.heads import prediction_head, projection_head


def layers(head: nn.Sequential) -> list[str]:
    return [type(module).__name__ for module in head]


def test_heads_have_the_given_layers() -> None:
    assert layers(projection_head(8, 16, 4)) == ["Linear", "BatchNorm1d", "ReLU", "Linear"]
    assert layers(projection_head(8, 16, 4, norm=False)) == ["Linear", "ReLU", "Linear"]
    assert layers(projection_head(8, 16, 4, layers=1)) == ["Linear"]
    assert layers(projection_head(8, 16, 4, layers=3, last_norm=True)) == [
        "Linear",
        "BatchNorm1d",
        "ReLU",
    ] * 2 + ["Linear", "BatchNorm1d"]


def test_heads_have_the_given_output_size() -> None:
    x = torch.randn(5, 8)
    for number in (1, 2, 3):
        assert projection_head(8, 16, 4, layers=number)(x).shape == (5, 4)
    assert prediction_head(8, 16)(x).shape == (5, 8)


def test_bias_is_left_out_before_a_norm_and_can_be_asked_for() -> None:
    def biases(head: nn.Sequential) -> list[bool]:
        return [module.bias is not None for module in head if isinstance(module, nn.Linear)]

    assert biases(projection_head(8, 16, 4)) == [False, True]
    assert biases(projection_head(8, 16, 4, last_norm=True)) == [False, False]
    assert biases(projection_head(8, 16, 4, norm=False)) == [True, True]
    assert biases(projection_head(8, 16, 4, bias=True)) == [True, True]
    assert biases(projection_head(8, 16, 4, bias=False)) == [False, False]


def test_last_affine_concerns_the_last_norm_only() -> None:
    head = projection_head(8, 16, 4, last_norm=True, last_affine=False)
    norms = [module for module in head if isinstance(module, nn.BatchNorm1d)]
    assert [norm.affine for norm in norms] == [True, False]


def test_no_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`layers` \(=0\) must be at least 1"):
        projection_head(8, 16, 4, layers=0)
