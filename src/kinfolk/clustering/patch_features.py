"""Features of images without a model or gradient steps: how often, and in which quarter of the
image, patches like each of K typical ones occur. Coates, Lee, Ng, AISTATS 2011; Coates, Ng, ICML
2011. The principal components are ours, for cosine similarities.

Dimension key: B images, C channels, S pixels of a side, M patches, P = C · side² values of a patch,
K typical patches, Q = 4 · K counts, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinfolk.clustering.kmeans import kmeans
from kinfolk.errors import require, require_at_least
from kinfolk.seeding import generator

# added to the variance of a patch, and of a whitened direction; from where on a patch counts
_CONTRAST, _WHITENING, _THRESHOLD = 2.5e-3, 0.1, 0.5
_IMAGES_AT_A_TIME = 200


class PatchFeatures(nn.Module):
    """Maps (B, C, S, S) images to (B, F) features; made by `fit`.

    A patch p of the image, normalised to mean zero and unit variance, is compared with K typical
    patches d_k:

        a_k(p) = max(0, d_kᵀ W (p − μ) − 0.5)          W whitens patches
        q      = the mean of a over each quarter of the image, (4 · K,)
        f      = Λ^(−1/4) Uᵀ (q − mean) / deviation    U, Λ: the first F principal components and
               their variances

    Example:
        >>> images = torch.rand(64, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        >>> PatchFeatures.fit(images, num_patches=20, size=8)(images).shape
        torch.Size([64, 8])
    """

    kernels: Tensor
    offset: Tensor
    centre: Tensor
    projection: Tensor

    def __init__(
        self,
        kernels_KCss: Tensor,
        offset_K: Tensor,
        centre_Q: Tensor,
        projection_QF: Tensor,
        stride: int,
    ) -> None:
        super().__init__()
        held = kernels_KCss, offset_K, centre_Q, projection_QF
        for name, value in zip(("kernels", "offset", "centre", "projection"), held, strict=True):
            self.register_buffer(name, value)
        self.stride = stride

    @classmethod
    @torch.no_grad()
    def fit(
        cls,
        images: Tensor,
        num_patches: int = 400,
        *,
        size: int = 128,
        side: int = 6,
        stride: int = 1,
        samples: int = 100_000,
        seed: int = 0,
    ) -> PatchFeatures:
        """Learns from (B, C, S, S) images of about unit deviation, with all channels on one scale.

        Args:
            num_patches: K typical patches.
            size: F features, fewer if there are not as many images or counts.
            side, stride: pixels of a side of a patch, and from one patch to the next.
            samples: M patches that the typical ones are learned from.
        """
        shape = tuple(images.shape)
        rule = "of the shape (B, C, S, S), with at least one image"
        require(images.ndim == 4 and len(images) > 0, "images", shape, rule)
        number, channels, height, width = images.shape
        rule = f"images of more than `side` (={side}) pixels a side"
        require(min(height, width) > side, "images", shape, rule)
        require_at_least(1, size=size)
        samples = min(samples, number * (height - side + 1) * (width - side + 1))
        rule = f"at least 1 and below the number of patches (={samples:,})"
        require(1 <= num_patches < samples, "num_patches", num_patches, rule)
        images = images.float()
        rule = "finite; some values are NaN or infinite"
        require(bool(images.isfinite().all()), "images", shape, rule)
        draw, device = generator(seed, "patches"), images.device
        of_M, top_M, left_M = (
            torch.randint(most, (samples,), generator=draw).to(device)
            for most in (number, height - side + 1, width - side + 1)
        )
        # a view: (B, C, S − side + 1, S − side + 1, side, side)
        windows = images.unfold(2, side, 1).unfold(3, side, 1)
        patches_MP = windows[of_M, :, top_M, left_M].flatten(1)
        patches_MP = patches_MP - patches_MP.mean(1, keepdim=True)
        patches_MP /= (patches_MP.var(1, correction=0, keepdim=True) + _CONTRAST).sqrt()
        mean_P = patches_MP.mean(0)
        centred_MP = patches_MP - mean_P
        variance_P, axes_PP = torch.linalg.eigh(centred_MP.T @ centred_MP / samples)
        whitening_PP = axes_PP * (variance_P.clamp(min=0) + _WHITENING).rsqrt() @ axes_PP.T
        white_MP = functional.normalize(centred_MP @ whitening_PP, dim=1)
        found = kmeans(white_MP, num_patches, seed=seed, spherical=True)
        typical_KP = found.centroids.to(device) @ whitening_PP
        made = cls(
            typical_KP.view(num_patches, channels, side, side),
            typical_KP @ mean_P,
            images.new_zeros(4 * num_patches),
            torch.eye(4 * num_patches, device=device),
            stride,
        )
        counts_BQ = made(images)
        made.centre = counts_BQ.mean(0)
        deviation_Q = counts_BQ.std(0, correction=0) + 1e-3 * counts_BQ.std() + 1e-6
        counts_BQ = (counts_BQ - made.centre) / deviation_Q
        size = min(size, number, 4 * num_patches)
        variance_Q, axes_QQ = torch.linalg.eigh(counts_BQ.T @ counts_BQ / number)
        scale_Q = variance_Q[-size:].clamp(min=1e-6).pow(-0.25)
        made.projection = axes_QQ[:, -size:] * scale_Q / deviation_Q.unsqueeze(1)
        return made

    def forward(self, images: Tensor) -> Tensor:
        parts = torch.split(images.float(), _IMAGES_AT_A_TIME)
        return torch.cat([(self._counts(part) - self.centre) @ self.projection for part in parts])

    def _counts(self, images_BCSS: Tensor) -> Tensor:
        side = self.kernels.shape[-1]
        mean = functional.avg_pool2d(images_BCSS, side, self.stride).mean(1, keepdim=True)
        square = functional.avg_pool2d(images_BCSS.square(), side, self.stride)
        square = square.mean(1, keepdim=True)
        deviation = (square - mean.square()).clamp(min=0).add_(_CONTRAST).sqrt()
        product = functional.conv2d(images_BCSS, self.kernels, stride=self.stride)  # (B, K, S', S')
        product -= self.kernels.sum((1, 2, 3)).view(-1, 1, 1) * mean
        product /= deviation
        alike = product.sub_((self.offset + _THRESHOLD).view(-1, 1, 1)).clamp_(min=0)
        return functional.adaptive_avg_pool2d(alike, 2).flatten(1)
