"""IFND's numbers of clusters follow the data, and the share of accepted labels is a metric."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kinfolk.detectors import IFND
from kinfolk.frameworks.registry import Context, build_detector, parse


@pytest.mark.parametrize(
    ("number", "labels", "want"),
    [
        (50_000, torch.arange(50_000) % 10, (10, 30, 100)),  # the paper's for CIFAR-10
        (50_000, torch.arange(50_000) % 100, (100, 300, 1000)),  # and for CIFAR-100
        (1_536, None, (20, 60, 200)),
        (1_280_000, None, (506, 1518, 5060)),
        (50_000, torch.full((50_000,), -1), (100, 300, 1000)),  # no label is known
    ],
)
def test_numbers_of_clusters_follow_the_classes(
    number: int, labels: torch.Tensor | None, want: tuple[int, ...]
) -> None:
    detector = build_detector(parse("simclr+ifnd"), Context(number, labels), {})
    assert isinstance(detector, IFND)
    assert detector.num_clusters == want


def test_the_accepted_share_is_a_metric() -> None:
    detector = IFND(num_samples=40, num_clusters=(2, 4), schedule="constant", final_rate=0.25)
    assert detector.metrics == {"accepted": 0.0}
    detector.refresh(nn.functional.normalize(torch.randn(40, 3), dim=1), 0.5)
    assert detector.metrics == {"accepted": 0.25}


def test_final_rate_gives_the_rates_of_algorithm_1() -> None:
    epochs, every = 1000, 20
    detector = IFND(num_samples=40, final_rate=(epochs - every) / epochs, every=every)
    detector.set_progress(0, epochs)
    for epoch in range(0, epochs, every):
        assert detector.rate(epoch / epochs) == pytest.approx(epoch / epochs)
