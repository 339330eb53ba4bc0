"""What an encoder knows before it averages over places: the feature map of its last stage.

Ring paper, section 5: "we treat the pre-pool output (size 512 × 7 × 7) after the last convolutional layer as the input to the logistic
regression".

Dimension key: B batch, F features, H × W places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kinfolk.errors import UsageError
from kinfolk.models.build import Adapted
from kinfolk.models.split import SplitEncoder

_POOLS = ("AdaptiveAvgPool2d", "FastAdaptiveAvgPool", "SelectAdaptivePool2d")
"""Global average pools by the names of their classes; the second and the third are timm's."""


class FeatureMap(nn.Module):
    """An encoder as it is before its last average pooling: (B, 3, H, W) → (B, F·H·W), the feature map of each tower flattened.

    The encoder itself is not changed.

    Args:
        encoder: with an average pooling at its end, or one that gives a feature map; others are refused.

    Example:
        >>> from kinfolk.models import build_encoder
        >>> FeatureMap(build_encoder("resnet10").eval())(torch.zeros(2, 3, 16, 16)).shape
        torch.Size([2, 512])
    """

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        towers: Sequence[nn.Module] = list(encoder.towers) if isinstance(encoder, SplitEncoder) else [encoder]
        pools = [_last_pool(tower) for tower in towers]
        self._pools = [pool for pool in pools if pool is not None]
        if len(self._pools) != len(towers) and not isinstance(encoder, Adapted):
            raise UsageError(f"{type(encoder).__name__} has no average pooling whose input could be taken; leave --unpooled out")

    def forward(self, x: Tensor) -> Tensor:
        caught: list[Tensor] = []

        def catch(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            caught.append(given[0].flatten(1))

        hooks = [pool.register_forward_pre_hook(catch) for pool in self._pools]
        try:
            given = self.encoder.module(x) if isinstance(self.encoder, Adapted) else self.encoder(x)
        finally:
            for hook in hooks:
                hook.remove()
        if caught:
            return torch.cat(caught, 1)
        if not isinstance(given, Tensor) or given.ndim != 4:
            raise UsageError(f"{type(self.encoder).__name__} gives no feature map; leave --unpooled out")
        return given.flatten(1)


def _last_pool(module: nn.Module) -> nn.Module | None:
    """The outermost one of the last pooling in the order of the layers."""
    found: nn.Module | None = None
    inside: set[int] = set()
    for part in module.modules():
        if type(part).__name__ in _POOLS and id(part) not in inside:
            found = part
            inside = {id(inner) for inner in part.modules()}
    return found
