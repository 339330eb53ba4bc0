"""Any map-style `Dataset`, wrapped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import numpy as np
import torch

from kinfolk.data.pixels import find_layout, find_scale
from kinfolk.data.source import Item, Pixels, Source
from kinfolk.data.splits import split_name
from kinfolk.errors import KinfolkError, UsageError


@final
class DatasetSource(Source):
    """The items of one map-style data set per split: an image, or (image, label, …); the image a PIL image, an array or a tensor.

    The same index must give the same image each time: leave augmentation to the views.
    """

    def __init__(self, splits: Mapping[str, Any]) -> None:
        self.name = f"the {type(next(iter(splits.values()))).__name__}"
        self.refused, self.native_size = [], None
        self._items = [Item(f"{split}/{row}", None, split_name(split)) for split, data in splits.items() for row in range(len(data))]
        self._places = [(data, row) for data in splits.values() for row in range(len(data))]
        self._labels: dict[int, int] = {}
        classes = getattr(next(iter(splits.values())), "classes", None)
        self.classes = [str(name) for name in classes] if isinstance(classes, list | tuple) else None

    def items(self) -> list[Item]:
        return self._items

    def load(self, index: int) -> Pixels:
        data, row = self._places[index]
        item = data[row]
        image, label = (item[0], item[1] if len(item) > 1 else None) if isinstance(item, tuple | list) else (item, None)
        if label is not None:
            self._labels[index] = _whole(label, self.name)
        return _to_pixels(image, self.name)

    def label(self, index: int) -> int | None:
        label = self._labels.get(index, -1)
        return None if label < 0 else label

    def path(self, index: int) -> None:
        return None

    def stat(self, index: int) -> None:
        return None


def dataset_source(splits: Mapping[str, Any]) -> DatasetSource:
    """Wraps the data sets of `splits`."""
    for data in splits.values():
        if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
            raise UsageError(f"`data` ({type(data).__name__}) must be a path, an array or a map-style Dataset with __len__ and __getitem__")
    if not splits or sum(len(data) for data in splits.values()) == 0:
        raise KinfolkError("the Dataset is empty")
    return DatasetSource(splits)


def _to_pixels(image: Any, name: str) -> Pixels:
    if isinstance(image, torch.Tensor):
        image = image.detach().cpu().numpy()
    if not isinstance(image, np.ndarray):
        from PIL import Image

        from kinfolk.data.decode import to_rgb

        if not isinstance(image, Image.Image):
            raise KinfolkError(f"{name} gives a {type(image).__name__}; an item must be an image (PIL, array, tensor) or (image, label)")
        return np.asarray(to_rgb(image))
    if image.ndim not in (2, 3):
        raise KinfolkError(f"an image has the shape {image.shape}; it must be (H, W), (H, W, 3) or (3, H, W)")
    images = find_layout(image[None], "the image")
    return find_scale(images, "the image")(images[0])


def _whole(label: Any, name: str) -> int:
    value = label.item() if isinstance(label, torch.Tensor | np.ndarray | np.generic) and np.size(label) == 1 else label
    try:
        if int(value) == value:
            return int(value)
    except (TypeError, ValueError):
        pass
    raise KinfolkError(f"{name} gives the label {value!r}; labels must be whole numbers")
