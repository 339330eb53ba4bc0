"""A ResNet in the format of detectron2's model zoo: a pickle of arrays under detectron2's names.

The names are those of detectron2's own converter of torchvision files: conv1 → stem.conv1, bn1 → conv1.norm, layer1 → res2,
downsample → shortcut. The file is only written, never read, because reading a pickle can run code.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

_RENAMED = (
    (r"^(?!layer)", "stem."),
    (r"^layer(\d)", lambda found: f"res{int(found[1]) + 1}"),
    (r"\bbn(\d)", r"conv\1.norm"),
    (r"\bdownsample\.0", "shortcut"),
    (r"\bdownsample\.1", "shortcut.norm"),
)


def detectron2_name(name: str) -> str:
    """detectron2's name of a parameter of torchvision's ResNet.

    Example:
        >>> detectron2_name("bn1.weight"), detectron2_name("layer2.0.bn3.bias"), detectron2_name("layer1.0.downsample.1.running_mean")
        ('stem.conv1.norm.weight', 'res3.0.conv3.norm.bias', 'res2.0.shortcut.norm.running_mean')
    """
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def write_pickle(state: Mapping[str, Tensor], file: BinaryIO) -> None:
    """Writes the arrays as `model`, with `__author__` and the flag that makes detectron2 match names from their ends."""
    arrays = {detectron2_name(name): value.detach().cpu().numpy() for name, value in state.items()}
    _PlainPickler(file, protocol=4).dump({"model": arrays, "__author__": "kinfolk", "matching_heuristics": True})


def config_lines(depth: int, mean: Sequence[float], std: Sequence[float]) -> str:
    """The detectron2 configuration for a network trained with this mean and standard deviation of RGB values in [0, 1]."""
    pixels = [", ".join(f"{255 * value:.3f}" for value in values) for values in (mean, std)]
    narrow = "\n    RES2_OUT_CHANNELS: 64" if depth < 50 else ""
    return (
        f"MODEL:\n  PIXEL_MEAN: [{pixels[0]}]\n  PIXEL_STD: [{pixels[1]}]\n"
        f"  RESNETS:\n    DEPTH: {depth}\n    STRIDE_IN_1X1: False{narrow}\nINPUT:\n  FORMAT: RGB"
    )


class _PlainPickler(pickle.Pickler):
    """Pickles arrays by shape, type and bytes, which all versions of numpy can read; numpy's own format names modules that some lack."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray):
            return np.ndarray, (obj.shape, obj.dtype.str, bytearray(np.ascontiguousarray(obj).tobytes()))
        return NotImplemented
