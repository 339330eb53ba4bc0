"""Features of images by k-means of their patches, against loops over patches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kinfolk.clustering.patch_features import PatchFeatures


def stripes(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of horizontal or vertical stripes at a random phase, with noise, and which of the two
    each is."""
    draw = torch.Generator().manual_seed(seed)
    label, phase = (
        torch.randint(2, (number,), generator=draw),
        torch.rand(number, 1, generator=draw) * 6,
    )
    wave = torch.sin(torch.arange(16.0) + phase)  # (number, 16)
    across = wave.unsqueeze(1).expand(-1, 16, -1)
    one = torch.where(label.view(-1, 1, 1).bool(), across, across.transpose(1, 2))
    return one.unsqueeze(1).repeat(1, 3, 1, 1) + 0.5 * torch.randn(
        number, 3, 16, 16, generator=draw
    ), label


@pytest.mark.parametrize("stride", [1, 2])
def test_counts_equal_a_loop_over_patches(stride: int) -> None:
    images = torch.randn(3, 2, 9, 9, generator=torch.Generator().manual_seed(1))
    made = PatchFeatures.fit(images, num_patches=5, size=3, side=4, stride=stride, samples=200)
    places = range(0, 9 - 4 + 1, stride)
    found = torch.zeros(3, 5, len(places), len(places))
    for image in range(3):
        for down, top in enumerate(places):
            for right, left in enumerate(places):
                patch = images[image, :, top : top + 4, left : left + 4].double()
                patch = (patch - patch.mean()) / (patch.var(correction=0) + 2.5e-3).sqrt()
                for k in range(5):
                    product = float((made.kernels[k].double() * patch).sum() - made.offset[k])
                    found[image, k, down, right] = max(0.0, product - 0.5)
    counts = torch.nn.functional.adaptive_avg_pool2d(found, 2).flatten(1)
    torch.testing.assert_close(
        made(images), (counts - made.centre) @ made.projection, rtol=1e-4, atol=1e-4
    )


def test_principal_components_are_uncorrelated_and_half_whitened() -> None:
    images, _ = stripes(200, 0)
    made = PatchFeatures.fit(images, num_patches=10, size=6, samples=2000)
    covariance = made(images).double().T.cov(correction=0)
    variance = covariance.diagonal()
    assert (covariance - variance.diag()).abs().max() < 1e-3 * variance.max()
    # back to the subspace of the standardised counts
    counts = made(images) @ torch.linalg.pinv(made.projection)
    assert torch.linalg.matrix_rank(counts) == 6
    assert variance.sort().values.equal(variance), "later components have more variance"


def test_neighbours_show_the_same_texture_where_those_by_pixels_do_not() -> None:
    images, label = stripes(300, 0)
    right = []
    for features in (
        PatchFeatures.fit(images, num_patches=30, size=4, samples=5000)(images),
        images.flatten(1),
    ):
        unit = torch.nn.functional.normalize(features - features.mean(0), dim=1)
        near = (unit @ unit.T).fill_diagonal_(-2).topk(120, dim=1).indices
        right.append((label[near] == label.unsqueeze(1)).float().mean().item())
    assert right[0] > 0.95
    assert right[1] < 0.7


def test_the_same_seed_makes_the_same_features() -> None:
    images, _ = stripes(40, 0)
    one, same, other = (
        PatchFeatures.fit(images, num_patches=8, size=4, samples=500, seed=seed)(images)
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)


def test_images_without_contrast_have_finite_features() -> None:
    assert (
        PatchFeatures.fit(torch.zeros(5, 3, 8, 8), num_patches=4, size=4, samples=50)(
            torch.zeros(2, 3, 8, 8)
        )
        .isfinite()
        .all()
    )


def test_images_smaller_than_a_patch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"more than `side` \(=6\) pixels"):
        PatchFeatures.fit(torch.zeros(5, 3, 6, 6))


@pytest.mark.parametrize(
    ("images", "given", "message"),
    [
        (
            torch.zeros(5, 8, 8),
            {},
            r"`images` \(=\(5, 8, 8\)\) must be of the shape \(B, C",
        ),
        (torch.zeros(0, 3, 8, 8), {}, "with at least one image"),
        (torch.full((5, 3, 8, 8), float("nan")), {}, "`images` .* must be finite"),
        (
            torch.zeros(1, 3, 8, 8),
            {"num_patches": 9},
            r"`num_patches` \(=9\) must be at least 1 and below the number of patches \(=9\)",
        ),
        (torch.zeros(5, 3, 8, 8), {"num_patches": 0}, r"`num_patches` \(=0\) must be at least 1"),
        (torch.zeros(5, 3, 8, 8), {"size": 0}, r"`size` \(=0\) must be at least 1"),
    ],
)
def test_what_cannot_be_fitted_is_refused(
    images: Tensor, given: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PatchFeatures.fit(images, **({"num_patches": 4} | given))


def test_precision_and_number_of_channels_are_free() -> None:
    images, _ = stripes(20, 0)
    one, same = (
        PatchFeatures.fit(x, num_patches=8, size=4, samples=500)(x)
        for x in (images, images.double())
    )
    assert torch.equal(one, same)
    assert PatchFeatures.fit(images[:, :1], num_patches=8, size=4, samples=500)(
        images[:, :1]
    ).shape == (20, 4)
