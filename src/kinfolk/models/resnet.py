"""ResNet with torchvision's parameter names and without its classifier.

He et al., Deep Residual Learning for Image Recognition, 2015. The stride of a bottleneck is in its
3×3 convolution, as in torchvision. With `stem="imagenet"` and `width=64` the encoder is
torchvision's network without `fc`, and state dicts can be exchanged.

    load_state(resnet50(stem="imagenet"), torchvision_model.state_dict())  # drops fc.*
    torchvision_model.fc = nn.Identity(); torchvision_model.load_state_dict(encoder.state_dict())
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

Stem = Literal["cifar", "imagenet"]


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and the shortcut around them."""

    expansion = 1

    def __init__(self, in_size: int, size: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_size, size, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(size)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(size, size, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(size)
        self.downsample = downsample

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn2

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        out: Tensor = self.relu(self.bn2(self.conv2(x)) + shortcut)
        return out


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions and the shortcut around them."""

    expansion = 4

    def __init__(self, in_size: int, size: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_size, size, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(size)
        self.conv2 = nn.Conv2d(size, size, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(size)
        self.conv3 = nn.Conv2d(size, size * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(size * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn3

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        out: Tensor = self.relu(self.bn3(self.conv3(x)) + shortcut)
        return out


class ResNet(nn.Module):
    """Residual network, (B, C, H, W) → (B, output_size): the globally averaged last stage.

    Args:
        block: `BasicBlock` or `Bottleneck`.
        depths: number of blocks in each of the four stages.
        stem: "imagenet": 7×7 convolution with stride 2 and max pooling, as in torchvision; "cifar":
            3×3 convolution with stride 1, no pooling, for images of about 32×32 (SimCLR, appendix
            B.9).
        width: channels of the first stage; each further stage doubles them.
        zero_init_residual: initialise every block as the identity, by zero weights in its last
            norm.
        in_channels: channels of an image.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        *,
        stem: Stem = "cifar",
        width: int = 64,
        zero_init_residual: bool = False,
        in_channels: int = 3,
    ) -> None:
        super().__init__()
        if stem not in get_args(Stem):
            raise ValueError(f"`stem` (={stem!r}) must be one of {', '.join(get_args(Stem))}")
        for name, value in (("width", width), ("in_channels", in_channels)):
            if value < 1:
                raise ValueError(f"`{name}` (={value}) must be at least 1")
        self.config: dict[str, Any] | None = None
        """The arguments of `build_encoder`, so that `load_encoder` can build the same again."""
        self.output_size = width * 8 * block.expansion
        kernel, stride, padding = (7, 2, 3) if stem == "imagenet" else (3, 1, 1)
        self.conv1 = nn.Conv2d(in_channels, width, kernel, stride, padding, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if stem == "imagenet" else nn.Identity()
        in_size = width
        stages = []
        for stage, depth in enumerate(depths):
            size = width * 2**stage
            stages.append(_stage(block, in_size, size, depth, stride=1 if stage == 0 else 2))
            in_size = size * block.expansion
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self._initialise(zero_init_residual)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.avgpool(x).flatten(1)
        return out

    def _initialise(self, zero_init_residual: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, BasicBlock | Bottleneck) and zero_init_residual:
                nn.init.zeros_(module.last_norm.weight)


def require_memory(build: Callable[[], ResNet], what: str) -> None:
    """Refuses a network whose weights are larger than the memory of this machine, before any of it
    is allocated."""
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in build().parameters())
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # unknown on this system
        memory = 1 << 40
    if 4 * weights > memory:
        raise ValueError(
            f"{what} gives a network of {weights:.3g} weights, which need "
            f"{4 * weights / 2**30:,.0f} GB of the {memory / 2**30:,.0f} GB of "
            "memory; choose a smaller one"
        )


def _stage(
    block: type[BasicBlock] | type[Bottleneck], in_size: int, size: int, depth: int, stride: int
) -> nn.Sequential:
    out_size = size * block.expansion
    downsample = None
    if stride != 1 or in_size != out_size:
        downsample = nn.Sequential(
            nn.Conv2d(in_size, out_size, 1, stride, bias=False), nn.BatchNorm2d(out_size)
        )
    blocks = [block(in_size, size, stride, downsample)]
    blocks += [block(out_size, size, 1, None) for _ in range(depth - 1)]
    return nn.Sequential(*blocks)


# The keyword arguments are those of `ResNet`. Millions of parameters: 0.3, for training on a CPU;
# 11, 21, 24, 43 and 58.
resnet10 = partial(ResNet, BasicBlock, (1, 1, 1, 1), width=16)
resnet18 = partial(ResNet, BasicBlock, (2, 2, 2, 2))
resnet34 = partial(ResNet, BasicBlock, (3, 4, 6, 3))
resnet50 = partial(ResNet, Bottleneck, (3, 4, 6, 3))
resnet101 = partial(ResNet, Bottleneck, (3, 4, 23, 3))
resnet152 = partial(ResNet, Bottleneck, (3, 8, 36, 3))
