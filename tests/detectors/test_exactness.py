"""A cast to 16 bits, meant for weights, leaves the state of every detector as it is."""

from __future__ import annotations

import pytest
import torch

import kinfolk as kf
from kinfolk.detectors import Detector


def detectors() -> dict[str, Detector]:
    return {
        "glofnd": kf.GloFND(num_samples=6, alpha=0.1),
        "glofnd, adam": kf.GloFND(num_samples=6, alpha=0.1, rule="adam"),
        "start": kf.StartAt(kf.GloFND(num_samples=6, alpha=0.1), epoch=1),
        "ring": kf.Ring(lower=0.2, upper=0.9, anneal="knn"),
        "ifnd": kf.IFND(num_samples=6, num_clusters=(2,)),
        "hierarchy": kf.Hierarchy(num_samples=6),
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", detectors())
def test_no_buffer_is_cast_to_16_bits(name: str, dtype: torch.dtype) -> None:
    detector = detectors()[name]
    floats = {key: value for key, value in detector.named_buffers() if value.is_floating_point()}
    assert floats
    for value in floats.values():
        if value.numel():
            value.fill_(0.1234567)
    before = {key: value.clone() for key, value in floats.items()}
    detector.to(dtype)
    for key, value in detector.named_buffers():
        if key in before:
            assert value.dtype == before[key].dtype
            assert torch.equal(value, before[key])
