"""Which network of another package an encoder is; what it is not is said in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kinfolk.errors import UsageError

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
"""Networks that torchvision, timm and detectron2 share; the first two name their parameters alike."""
PACKAGES = ("torchvision", "timm", "detectron2")
ANYTHING = "safetensors and onnx take any encoder"


def network_in(package: str, config: Mapping[str, Any] | None) -> str:
    """The name `package` has for the encoder that `build_encoder` made from `config`.

    Example:
        >>> network_in("timm", {"name": "torchvision/resnet50"})
        'resnet50'
        >>> network_in("torchvision", {"name": "resnet18", "stem": "cifar", "width": 64})
        Traceback (most recent call last):
        kinfolk.errors.UsageError: the encoder can't be exported to torchvision: its stem is a 3×3 convolution without pooling, for small...
    """
    if config is None:
        raise _refused(package, "it is a module of your own")
    if "towers" in config:
        raise _refused(package, "it is two networks, each of which sees some channels of a picture")
    home, slash, name = str(config["name"]).rpartition("/")
    name = name.partition(".")[0] if home == "timm" else name  # timm's names may say which weights they began from
    if home == package:
        return name
    if slash:
        if name in RESNETS and home in PACKAGES:
            return name
        raise _refused(package, f"it is {config['name']}, which {package} names or builds otherwise")
    faults = [f"there is no {name}"] if name not in RESNETS else []
    if config.get("stem") != "imagenet":
        faults.append("its stem is a 3×3 convolution without pooling, for small pictures, in place of 7×7 with pooling (`model.stem`)")
    if config.get("width") != 64:
        faults.append(f"its first stage is {config.get('width')} channels wide in place of 64 (`model.width`)")
    if config.get("in_channels", 3) != 3:
        faults.append(f"it takes pictures of {config['in_channels']} channels in place of 3")
    if faults:
        raise _refused(package, "; ".join(faults))
    return name


def _refused(package: str, why: str) -> UsageError:
    return UsageError(f"the encoder can't be exported to {package}: {why}; {ANYTHING}")
