"""Whether what was written is what the target expects: it is loaded there, and must give the same features."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kinfolk.errors import KinfolkError

TOLERANCE = 1e-4
"""Relative to the largest feature. What other software computes in another order agrees to about 1e-6."""


def load_torchvision(name: str, path: Path) -> Callable[[Tensor], Tensor]:
    """torchvision's network with the exported weights, and without the classifier, which the file does not have."""
    module: nn.Module = importlib.import_module("torchvision.models").get_model(name, weights=None)
    found = module.load_state_dict(torch.load(path, map_location="cpu", weights_only=True), strict=False)
    linear = [part for part, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    missing = [key for key in found.missing_keys if key.rpartition(".")[0] != linear[-1]]
    if missing or found.unexpected_keys:
        raise KinfolkError(f"torchvision's {name} has other parameters than the export: {[*missing, *found.unexpected_keys][0]}")
    parent, _, last = linear[-1].rpartition(".")
    setattr(module.get_submodule(parent), last, nn.Identity())
    return module.eval()


def load_timm(name: str, path: Path) -> Callable[[Tensor], Tensor]:
    """timm's network with the exported weights."""
    module: Any = importlib.import_module("timm").create_model(name, num_classes=0, checkpoint_path=str(path / "model.safetensors"))
    loaded: nn.Module = module.eval()
    return loaded


def agreement(encoder: nn.Module, other: Callable[[Tensor], Tensor], pictures: Tensor) -> float:
    """The largest difference of the features of `pictures`, relative to the largest feature."""
    with torch.no_grad():
        ours, theirs = encoder(pictures), other(pictures)
    if theirs.ndim == 4:
        theirs = theirs.mean((2, 3))
    return float((ours - theirs).abs().max() / ours.abs().max().clamp_min(1e-12))


def require_agreement(difference: float, where: str) -> None:
    """Refuses an export that gives other features."""
    if not difference <= TOLERANCE:
        raise KinfolkError(f"the export gives other features in {where}: they differ by {difference:.1e} of the largest; it was not kept")


def unavailable(package: str) -> str | None:
    """Why the package can't be used here, or None."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        return f"{package} is not installed" if error.name == package else f"{package} can't be imported: {error}"
    except (ImportError, RuntimeError, OSError) as error:
        return f"{package} can't be imported: {str(error).splitlines()[0]}"
    return None
