"""The features of a guide, from what a user names.

Dimension key: N training samples, F features.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sized
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from kinfolk.clustering.patch_features import PatchFeatures
from kinfolk.data.images import ImageData
from kinfolk.data.sample_table import samples_digest
from kinfolk.data.views import Views
from kinfolk.detectors.guide import read_features
from kinfolk.embedding import best_device, embed
from kinfolk.errors import KinfolkError, UsageError, short
from kinfolk.files import write_atomically
from kinfolk.models.encoders import PACKAGES, build_encoder
from kinfolk.models.text import SENTENCE, sentence_transformer
from kinfolk.models.weights import load_encoder
from kinfolk.training.config import TrainConfig

SMALL, SMALL_SIDE, SIDE = 64, 128, 224
"""Models of other packages see 224 pixels, and images of up to 64 enlarged to 128."""
PATCHES, PATCHES_SIDE, PATCHES_IMAGES = "patches", 32, 10_000
"""The guide made from the images themselves; how many pixels and images it sees."""


def guide_features(named: str | Path, data: ImageData, cache: Path | None = None) -> Tensor:
    """(N, F) features of the training samples in data-set order. `named`: a file; a run folder,
    whose encoder embeds the images; timm/NAME, torchvision/NAME, open_clip/NAME; or `patches`. Rows
    of a file are matched by name if the .parquet file of `kinfolk embed` is next to it; otherwise
    they must be the training samples, or all. `cache`: a folder for features that are computed from
    a name, for a resume and other ranks."""
    path = Path(named)
    is_name = str(named).partition("/")[0] in PACKAGES and not path.exists()
    if is_name or str(named) == PATCHES:  # ./patches is a file or a run
        return _once(lambda: _compute(str(named), data), str(named), data, cache)
    if path.is_dir():
        made = TrainConfig.load(path / "config.yaml").views
        assert made.size is not None, "a run is fitted to its data"
        assert made.preset is not None
        views = Views(made.preset, made.size, **made.options)
        return _embed_in_half(load_encoder(path)[0], views, data)
    features_NF = read_features(path)
    if (rows := _rows_by_key(path, len(features_NF), data)) is not None:
        is_ordered = torch.equal(rows, torch.arange(len(features_NF)))
        return features_NF if is_ordered else features_NF[rows]
    require_rows(f"the guide `{path}`", features_NF, data.num_train, len(data))
    return features_NF[: data.num_train]


def require_rows(what: str, features: Sized, number: int, total: int) -> None:
    if len(features) not in (number, total):
        raise UsageError(
            f"{what} has features of {len(features):,} samples; it must have one row for each of"
            f" the {number:,} training samples, in data-set order, or for each of all {total:,}"
            " samples"
        )


def text_guide(named: str | Path, data: ImageData, cache: Path | None = None) -> dict[str, Tensor]:
    """The arguments `features` and `positives` of a guide for text pairs, (num_ids, F) each, with
    explicit negatives at the end."""
    assert data.texts is not None
    if Path(named).is_file():
        if data.texts.negatives:
            raise UsageError(
                f"the guide `{named}` has features of the anchors alone, and the explicit negatives"
                " need some too; give --guide st/NAME"
            )
        return {"features": guide_features(named, data)}
    if not str(named).startswith(SENTENCE):
        raise UsageError(
            f"the guide `{named}` must be a model of sentence-transformers (st/NAME) or a file of"
            " features (.npy, .safetensors) for text pairs"
        )
    pairs, others = data.texts.of(torch.arange(data.num_train)), data.texts.negatives
    sides = [[*(texts[side] for texts in pairs), *others] for side in (0, 1)]

    def compute() -> Tensor:
        features: Tensor = sentence_transformer(str(named)).encode(
            [*sides[0], *sides[1]],
            convert_to_tensor=True,
            normalize_embeddings=True,
            show_progress_bar=False,
            device=best_device(),
        )
        return features.cpu().half()

    both = _once(compute, str(named), data, cache)
    return {"features": both[: len(sides[0])], "positives": both[len(sides[0]) :]}


def _once(compute: Callable[[], Tensor], named: str, data: ImageData, cache: Path | None) -> Tensor:
    if cache is None:
        return compute()
    about = f"{named} {samples_digest(data.samples)} {data.num_train} {data.height} {data.width}"
    file = cache / f"guide-{hashlib.blake2b(about.encode(), digest_size=8).hexdigest()}.npy"
    if not file.is_file():
        features_NF = compute()
        try:
            write_atomically(file, lambda out: np.save(out, features_NF.numpy()))
        except (OSError, KinfolkError):  # a run that is only read
            return features_NF
    return read_features(file)


def _compute(named: str, data: ImageData) -> Tensor:
    if named == PATCHES:
        return patch_features(data)
    side = SMALL_SIDE if max(data.height, data.width) <= SMALL else SIDE
    return _embed_in_half(build_encoder(named, pretrained=True), Views("plain", side), data)


def patch_features(data: ImageData) -> Tensor:
    # one scale for all channels: patches keep their colour
    views = Views("plain", PATCHES_SIDE, mean=(0, 0, 0), std=(0.25, 0.25, 0.25))
    number = min(data.num_train, PATCHES_IMAGES)
    # over the whole data set, which may be sorted by class
    ids = torch.split(torch.arange(number) * data.num_train // number, 512)
    images = [views.evaluate(data.pixels(part), data.aspect(part)) for part in ids]
    features_NF = _embed_in_half(PatchFeatures.fit(torch.cat(images)), views, data)
    if bool((features_NF == 0).all(1).any()):
        raise UsageError(
            "the training images do not differ enough for a guide made from their patches; name"
            " another one with --guide (--encoder of `kinfolk audit`)"
        )
    return features_NF


def _rows_by_key(path: Path, number: int, data: ImageData) -> Tensor | None:
    """(N,) row of each training sample in a file of features, by the .parquet file next to it; None
    without keys, and for arrays, whose keys are row numbers."""
    table, keys = path.with_suffix(".parquet"), data.samples.keys[: data.num_train]
    if not table.is_file() or re.fullmatch(r"\w+/\d+", keys[0]):
        return None
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        given = pq.read_table(table, columns=["key"], partitioning=None)["key"].to_pylist()
    except (pa.ArrowException, OSError, KeyError, ValueError):
        given = []
    if len(given) != number:
        return None
    place = {key: row for row, key in enumerate(given)}
    missing = [key for key in keys if key not in place]
    if missing:
        raise UsageError(
            f"the guide `{path}` has no features of {len(missing):,} of {len(keys):,} training"
            f" samples (the first is {short(missing[0])}); compute them for exactly this data, as"
            " with `kinfolk embed RUN --data`"
        )
    return torch.tensor([place[key] for key in keys])


def _embed_in_half(encoder: nn.Module, views: Views, data: ImageData) -> Tensor:
    """(N, F) in half precision, of unit norm so that nothing overflows."""
    ids = torch.arange(data.num_train)
    features_NF = embed(encoder, data, views, ids, device=best_device())
    return nn.functional.normalize(features_NF, dim=1).half()
