"""The blur as a matrix against explicit taps."""

from __future__ import annotations

import pytest
import torch

from kinfolk.data.transforms import CUT, apply_blur, blur_matrices, taps_for
from tests.reference import augmentation as reference


@pytest.mark.parametrize(("size", "num_taps"), [(16, 3), (16, 7), (5, 5), (4, 1), (1, 1)])
def test_equals_explicit_taps(size: int, num_taps: int) -> None:
    image = torch.rand(
        3, size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    for sigma in (0.1, 0.7, 2.0):
        matrix = blur_matrices(torch.tensor([sigma]), size, num_taps)[0].double()
        torch.testing.assert_close(
            matrix @ image @ matrix.T, reference.blur(image, sigma, num_taps), atol=3e-4, rtol=0
        )


def test_keeps_a_flat_image() -> None:
    matrix = blur_matrices(torch.tensor([0.1, 0.5, 2.0, 50.0]), 32, 9)
    torch.testing.assert_close(matrix.sum(dim=2), torch.ones(4, 32))


def test_tiny_sigma_changes_nothing() -> None:
    torch.testing.assert_close(blur_matrices(torch.tensor([0.1]), 224, 23)[0], torch.eye(224))


def test_no_weight_is_so_small_that_it_slows_the_product() -> None:
    matrix = blur_matrices(torch.linspace(0.1, 2.0, 64), 64, 23)
    assert ((matrix == 0) | (matrix > 1e-6)).all()


@pytest.mark.parametrize(("size", "num_taps"), [(130, 13), (56, 5), (9, 3)])
def test_leaving_out_zeros_changes_nothing(size: int, num_taps: int) -> None:
    image = torch.rand(3, size, size, generator=torch.Generator().manual_seed(0))
    for sigma in (0.1, 0.8, 2.0):
        matrix = blur_matrices(torch.tensor([sigma]), size, num_taps)[0]
        got = apply_blur(image, matrix, radius=min(num_taps // 2, int(CUT * sigma)))
        torch.testing.assert_close(got, matrix @ image @ matrix.T, atol=1e-5, rtol=0)


def test_taps_are_odd_and_a_tenth() -> None:
    assert [taps_for(size) for size in (8, 32, 96, 224)] == [1, 3, 9, 23]
