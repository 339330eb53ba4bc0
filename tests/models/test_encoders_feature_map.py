"""Features before pooling: their mean over the places is what the encoder gives; towers, other
modules, and what has none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kinfolk.errors import UsageError
from kinfolk.models import build_encoder
from kinfolk.models.encoders import FeatureMap, adapt
from kinfolk.models.heads import SplitEncoder

X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["resnet10", "resnet50"])
def test_the_mean_over_the_places_is_the_encoders(name: str) -> None:
    encoder = build_encoder(name, width=4).eval()
    with torch.no_grad():
        found, pooled = FeatureMap(encoder)(X), encoder(X)
    assert found.shape == (2, encoder.output_size * 16)
    torch.testing.assert_close(found.view(2, -1, 16).mean(2), pooled)
    with torch.no_grad():
        assert torch.equal(encoder(X), pooled), "the encoder is as it was"


def test_both_towers_and_foreign_modules() -> None:
    towers = SplitEncoder(
        [build_encoder("resnet10", width=4, in_channels=number) for number in (1, 2)], (1, 2)
    ).eval()
    with torch.no_grad():
        assert FeatureMap(towers)(X).shape == (2, towers.output_size * 16)
    gives_a_map = nn.Conv2d(3, 5, 3, padding=1)
    assert FeatureMap(adapt(gives_a_map))(X).shape == (2, 5 * 32 * 32)
    own_pool = nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert FeatureMap(adapt(own_pool))(X).shape == (2, 5 * 30 * 30)


def test_an_encoder_without_a_feature_map_is_refused() -> None:
    with pytest.raises(UsageError, match="Flatten has no average pooling"):
        FeatureMap(nn.Flatten())
    with pytest.raises(UsageError, match="returns no feature map"):
        FeatureMap(adapt(nn.Flatten()))(X)
