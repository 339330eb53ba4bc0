"""Encoders: modules with `output_size: int` that map (B, 3, H, W) to (B, output_size)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from kinfolk.errors import (
    KinfolkError,
    UsageError,
    did_you_mean,
    import_optional,
    require,
    require_at_least,
    require_choice,
)
from kinfolk.models.heads import SplitEncoder, evaluating
from kinfolk.models.text import open_clip_model

# ResNet (He et al., 2015) with torchvision's names of parameters and without its classifier.

Stem = Literal["cifar", "imagenet"]
WIDEST = 512  # wider networks would not fit into memory


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, in_size: int, size: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_size, size, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(size)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(size, size, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(size)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        out: Tensor = self.relu(self.bn2(self.conv2(x)) + shortcut)
        return out


class Bottleneck(nn.Module):
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

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        out: Tensor = self.relu(self.bn3(self.conv3(x)) + shortcut)
        return out


Block = type[BasicBlock] | type[Bottleneck]


class ResNet(nn.Module):
    """Residual network, (B, C, H, W) → (B, output_size): the globally averaged last stage.

    Args:
        depths: number of blocks in each of the four stages.
        stem: "imagenet" as in torchvision; "cifar": 3×3 convolution with stride 1, no pooling, for
            images of about 32×32 (SimCLR, appendix B.9).
        width: channels of the first stage; each further stage doubles them.
    """

    def __init__(
        self,
        block: Block,
        depths: Sequence[int],
        *,
        stem: Stem = "cifar",
        width: int = 64,
        in_channels: int = 3,
    ) -> None:
        super().__init__()
        require_choice("stem", stem, get_args(Stem))
        require(1 <= width <= WIDEST, "width", width, f"in [1, {WIDEST}]")
        require_at_least(1, in_channels=in_channels)
        self.config: dict[str, Any] | None = None  # arguments of `build_encoder`
        self.output_size = width * 8 * block.expansion
        kernel, stride, padding = (7, 2, 3) if stem == "imagenet" else (3, 1, 1)
        self.conv1 = nn.Conv2d(in_channels, width, kernel, stride, padding, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if stem == "imagenet" else nn.Identity()
        sizes = [width, *(width * 2**stage * block.expansion for stage in range(4))]
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            _stage(block, sizes[stage], width * 2**stage, depth, stride=min(stage, 1) + 1)
            for stage, depth in enumerate(depths)
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.avgpool(x).flatten(1)
        return out


def _stage(block: Block, in_size: int, size: int, depth: int, stride: int) -> nn.Sequential:
    out_size = size * block.expansion
    downsample = None
    if stride != 1 or in_size != out_size:
        downsample = nn.Sequential(
            nn.Conv2d(in_size, out_size, 1, stride, bias=False), nn.BatchNorm2d(out_size)
        )
    first = block(in_size, size, stride, downsample)
    return nn.Sequential(first, *(block(out_size, size, 1, None) for _ in range(depth - 1)))


# Millions of parameters: 0.3, for training on a CPU; 11, 21, 24, 43 and 58.
resnet10 = partial(ResNet, BasicBlock, (1, 1, 1, 1), width=16)
resnet18 = partial(ResNet, BasicBlock, (2, 2, 2, 2))
resnet34 = partial(ResNet, BasicBlock, (3, 4, 6, 3))
resnet50 = partial(ResNet, Bottleneck, (3, 4, 6, 3))
ENCODERS: dict[str, partial[ResNet]] = {
    "resnet10": resnet10,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "resnet101": partial(ResNet, Bottleneck, (3, 4, 23, 3)),
    "resnet152": partial(ResNet, Bottleneck, (3, 8, 36, 3)),
}


class Adapted(nn.Module):
    """Gives any module an `output_size`, and averages a feature map over its positions."""

    def __init__(self, module: nn.Module, output_size: int) -> None:
        super().__init__()
        require_at_least(1, output_size=output_size)
        self.config: dict[str, Any] | None = None
        self.module, self.output_size = module, output_size

    def forward(self, x: Tensor) -> Tensor:
        features = _as_vectors(self.module(x), self.module)
        if features.shape[1] != self.output_size:
            raise KinfolkError(
                f"`output_size` (={self.output_size}) must be that of {type(self.module).__name__},"
                f" which is {features.shape[1]}"
            )
        return features


def build_encoder(
    name: str,
    *,
    stem: Stem = "cifar",
    width: int | None = None,
    pretrained: bool = False,
    in_channels: int = 3,
) -> ResNet | Adapted:
    """Builds resnet10, 18, 34, 50, 101 or 152, or torchvision/NAME, timm/NAME or open_clip/NAME
    where these packages are installed.

    Args:
        stem, width, in_channels: of the first kind, see `ResNet`; `width` is 16 for resnet10 by
            default, 64 for others.
        pretrained: downloads the package's published weights.

    Example:
        >>> build_encoder("resnet10").output_size
        128
    """
    package, _, model = name.partition("/")
    if model and package in PACKAGES:
        able = ", ".join(ENCODERS)
        if in_channels != 3:
            what = f"takes images of 3 channels, not of {in_channels}"
            raise UsageError(f"{name!r} {what}; choose one of {able}")
        if width is not None:
            raise UsageError(f"`width` is an option of {able}, not of {name!r}")
        adapted = PACKAGES[package](model, pretrained)
        adapted.config = {"name": name}
        return adapted
    if name not in ENCODERS:
        others = "torchvision/NAME, timm/NAME and open_clip/NAME work too"
        raise UsageError(f"there is no encoder {name!r}{_nearest(name, ENCODERS)}; {others}")
    if pretrained:
        others = f"load a file with `load_weights`, or take 'torchvision/{name}'"
        raise UsageError(f"`pretrained` has no weights for {name!r}; {others}")
    given = {"stem": stem, "width": width, "in_channels": in_channels if in_channels != 3 else None}
    how: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    encoder = ENCODERS[name](**how)
    encoder.config = {"name": name, **how, "width": encoder.bn1.num_features}
    return encoder


def adapt(module: nn.Module, output_size: int | None = None, *, input_size: int = 32) -> nn.Module:
    """Makes an encoder of any module that maps images to (B, F) or (B, F, H, W). An `output_size`
    that is not given is measured on an image of `input_size`."""
    known = getattr(module, "output_size", None)
    if isinstance(known, int) and output_size in (None, known):
        return module
    return Adapted(module, _measure(module, input_size) if output_size is None else output_size)


def _torchvision(model: str, pretrained: bool) -> Adapted:
    models = import_optional("torchvision.models", "torchvision", "vision")
    names = models.list_models(module=models)
    if model not in names:
        raise UsageError(f"torchvision has no model {model!r}{_nearest(model, names)}")
    module: nn.Module = models.get_model(model, weights="DEFAULT" if pretrained else None)
    linear = [path for path, part in module.named_modules() if isinstance(part, nn.Linear)]
    if not linear or model in ("googlenet", "inception_v3"):
        raise UsageError(
            f"'torchvision/{model}' can't be an encoder: it does not end in one linear classifier"
        )
    parent, _, last = linear[-1].rpartition(".")
    size = module.get_submodule(linear[-1]).in_features
    setattr(module.get_submodule(parent), last, nn.Identity())
    assert isinstance(size, int)
    return Adapted(module, size)


def _timm(model: str, pretrained: bool) -> Adapted:
    timm = import_optional("timm", "timm", "vision")
    if not timm.is_model(model.partition(".")[0]) and not model.startswith("hf"):
        raise UsageError(f"timm has no model {model!r}{_nearest(model, timm.list_models())}")
    module: nn.Module = timm.create_model(model, pretrained=pretrained, num_classes=0)
    # some networks have a layer between the pooled features and the classifier, which stays
    size: Any = getattr(module, "head_hidden_size", None) or module.num_features
    return Adapted(module, size)


def _open_clip(model: str, pretrained: bool) -> Adapted:
    visual = open_clip_model(model, pretrained).visual
    return Adapted(visual, visual.output_dim)


PACKAGES = {"torchvision": _torchvision, "timm": _timm, "open_clip": _open_clip}


def _nearest(name: str, names: Iterable[str]) -> str:
    names = list(names)
    return did_you_mean(name, names) or f" (there are {', '.join(names[:8])})"


def _measure(module: nn.Module, input_size: int) -> int:
    first = next(module.parameters(), torch.empty(0))
    image = torch.zeros(1, 3, input_size, input_size, device=first.device, dtype=first.dtype)
    try:
        with torch.no_grad(), evaluating(module):
            features = module(image)
    except (RuntimeError, TypeError, AssertionError) as error:
        what = f"does not accept images of `input_size` (={input_size})"
        raise KinfolkError(
            f"{type(module).__name__} {what}; give another one, or `output_size`: {error}"
        ) from error
    return _as_vectors(features, module).shape[1]


def _as_vectors(features: object, module: nn.Module) -> Tensor:
    if isinstance(features, Tensor) and features.ndim == 4:
        return features.mean((2, 3))
    if isinstance(features, Tensor) and features.ndim == 2:
        return features
    got = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
    must = "an encoder must return a tensor (B, F) or (B, F, H, W)"
    raise KinfolkError(f"{type(module).__name__} returns {got}; {must}")


_POOLS = ("AdaptiveAvgPool2d", "FastAdaptiveAvgPool")  # the second in timm


class FeatureMap(nn.Module):
    """The output of an encoder before its last average pooling, flattened (Ring, section 5)."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder.module if isinstance(encoder, Adapted) else encoder
        towers = list(encoder.towers) if isinstance(encoder, SplitEncoder) else [encoder]
        pools = ([m for m in t.modules() if type(m).__name__ in _POOLS] for t in towers)
        self._pools = [found[-1] for found in pools if found]
        if len(self._pools) != len(towers) and not isinstance(encoder, Adapted):
            what = "has no average pooling whose input could be used"
            raise UsageError(f"{type(encoder).__name__} {what}; leave --unpooled out")

    def forward(self, x: Tensor) -> Tensor:
        caught: list[Tensor] = []

        def catch(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            caught.append(given[0].flatten(1))

        hooks = [pool.register_forward_pre_hook(catch) for pool in self._pools]
        try:
            given = self.encoder(x)
        finally:
            for hook in hooks:
                hook.remove()
        if caught:
            return torch.cat(caught, 1)
        if not isinstance(given, Tensor) or given.ndim != 4:
            what = "returns no feature map"
            raise UsageError(f"{type(self.encoder).__name__} {what}; leave --unpooled out")
        return given.flatten(1)
