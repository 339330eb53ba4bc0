"""The features of a guide, from what a user names: a file of features, a run folder, or a model of another package.

Dimension key: N training samples, F features.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from kinfolk.data.augmentation.views import Views
from kinfolk.data.images import ImageData
from kinfolk.detectors.guide import read_features
from kinfolk.embedding import embed
from kinfolk.errors import UsageError
from kinfolk.models.build import build_encoder
from kinfolk.models.weights import load_encoder
from kinfolk.training.config import TrainConfig

PACKAGES = ("timm", "torchvision", "open_clip")
SMALL, SMALL_SIDE, SIDE = 64, 128, 224
"""Models of other packages see images of 224 pixels a side, and images of up to 64 pixels enlarged to 128."""


def guide_features(named: str | Path, data: ImageData) -> Tensor:
    """(N, F) features of the training samples in data-set order.

    Args:
        named: a .npy or .safetensors file of the training samples, or of all samples, of which the first N are taken; a run folder, whose
            encoder embeds the images; or timm/NAME, torchvision/NAME, open_clip/NAME, with the published weights.
    """
    path = Path(named)
    if str(named).partition("/")[0] in PACKAGES and not path.exists():
        encoder = build_encoder(str(named), pretrained=True)
        return _embedded(encoder, Views("plain", SMALL_SIDE if max(data.height, data.width) <= SMALL else SIDE), data)
    if path.is_dir():
        if not (path / "config.yaml").is_file():
            raise UsageError(
                f"the guide `{path}` is a folder without config.yaml; give a run folder, a .npy or .safetensors file, or timm/NAME"
            )
        made = TrainConfig.load(path / "config.yaml").views
        assert made.size is not None, "a run is fitted to its data"
        return _embedded(load_encoder(path)[0], Views(made.preset, made.size, **made.options), data)
    features_NF = read_features(path)
    if len(features_NF) not in (data.num_train, len(data)):
        raise UsageError(
            f"the guide `{path}` has {len(features_NF):,} rows; it must have one for each of the {data.num_train:,} training samples, in "
            f"data-set order, or for each of all {len(data):,} samples"
        )
    return features_NF[: data.num_train]


def _embedded(encoder: nn.Module, views: Views, data: ImageData) -> Tensor:
    """(N, F) in half precision, of unit norm so that nothing overflows in it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    features_NF = embed(encoder, data, views, torch.arange(data.num_train), device=device)
    return nn.functional.normalize(features_NF, dim=1).half()
