"""Lets torchvision be imported where its compiled operators don't fit the installed torch; import
it before any peer that uses torchvision.

A torchvision wheel built for another flavour of torch (CUDA beside a CPU torch, say) can't load its
extension, and then stops at its own import, because it describes two operators that the extension
would have made. Declaring those two is enough for everything in torchvision that is plain Python:
transforms, models, datasets. The operators themselves stay unusable. Where the extension loads, or
torchvision is missing, this module does nothing.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]


def extension_loads() -> bool:
    """Whether torchvision's compiled operators can be loaded by this torch."""
    spec = find_spec("torchvision")
    folders = (
        []
        if spec is None or spec.submodule_search_locations is None
        else list(spec.submodule_search_locations)
    )
    for library in (file for folder in folders for file in Path(folder).glob("_C*.so")):
        try:
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        except (ImportError, OSError):
            continue
        return True
    return False


if find_spec("torchvision") is not None and not extension_loads():
    for name in ("nms", "qnms"):
        _LIBRARY.define(f"{name}(Tensor boxes, Tensor scores, float overlap) -> Tensor")  # type: ignore[no-untyped-call]
