"""Opens what `kinfolk audit` is given: a file of features, a run, or images, which are embedded
first.

Images are embedded by a run (`encoder="runs/x"`), by a pretrained network of torchvision or timm
(`encoder="timm/NAME"`), or, if no encoder is given, by k-means of their own patches, which needs no
training.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kinfolk.auditing.annotations import (
    KEY_COLUMNS,
    LABEL_COLUMNS,
    align,
    read_keys,
    read_labels,
    read_table,
    read_texts,
)
from kinfolk.auditing.inputs import SUFFIXES
from kinfolk.auditing.page import Thumbnails
from kinfolk.auditing.verdict import UNKNOWN, Provenance
from kinfolk.errors import KinfolkError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kinfolk.data.images import ImageData
    from kinfolk.training.config import TrainConfig

GUIDES = (".npy", ".safetensors")
"""Files of features that `kinfolk train --guide` takes."""
ORIGIN = "kinfolk.origin"
"""Key of the origin of features in the metadata of the Parquet file that `kinfolk embed` writes."""
PIXELS = 64
"""Side at which the images of `--images` are read for the comparison of pixels."""


@dataclass(frozen=True)
class AuditInput:
    """What an audit works on.

    Args:
        features: a path or an array.
        labels, keys, texts: of the rows, where they are known.
        images, thumbnails: images of the rows, if there are any.
        origin: where samples and features come from, for the words and commands of the verdict.
        views: views of each sample among the negatives of a batch; one for image and text.
    """

    features: Any
    labels: list[Any] | None = None
    keys: Sequence[str] | None = None
    texts: list[str] | None = None
    images: ImageData | None = None
    thumbnails: Thumbnails | None = None
    origin: Provenance = UNKNOWN
    views: int = 2


@contextmanager
def open_input(
    given: str | os.PathLike[str],
    *,
    images: str | None = None,
    encoder: str | None = None,
    labels: Path | None = None,
    keys: Path | None = None,
    texts: Path | None = None,
    key: str | None = None,
    labels_from_folders: bool = False,
    as_images: bool = False,
    workers: int | None = None,
    progress: bool = True,
) -> Iterator[AuditInput]:
    """Opens features, a run or images, and joins labels, keys and texts from files.

    Args:
        given: a file of features, a run folder, or images (anything that `kinfolk train --data`
            takes; a file only with `encoder`).
        images: images of the rows of a file of features.
        encoder: a run folder, torchvision/NAME, timm/NAME, open_clip/NAME or patches, to embed
            images with; None: patches. For text pairs a run folder or st/NAME.
        labels, keys, texts: files; see `annotations`.
        key: name of the features in a file with several arrays.
        as_images: take a file as images, not as features.
    """
    path = Path(given)
    is_run = (path / "config.yaml").is_file() and not as_images
    is_file = path.suffix.lower() in SUFFIXES and encoder is None and not as_images
    if images is not None and not (is_file and not path.is_dir()):
        what = "a run, which has its own images" if is_run else "a folder of images"
        raise UsageError(f"`{given}` is {what}; leave out --images")
    with tempfile.TemporaryDirectory(prefix="kinfolk-audit-") as cache:
        if encoder is None and not is_run:
            _require_encoder(path)
        if is_run and encoder is None:
            found = _from_run(path, progress)
        elif encoder is not None and encoder.startswith("st/"):
            found = _by_sentence_transformer(str(given), encoder, progress)
        elif is_file or (not path.exists() and str(given) != "digits" and not as_images):
            found = _from_file(
                path, key, images, labels_from_folders, workers, Path(cache), progress
            )
        else:
            found = _from_images(str(given), encoder, labels_from_folders, workers, progress)
        yield _annotated(found, labels, keys, texts, key)


def class_names(images: ImageData, number: int) -> list[Any] | None:
    """Labels of the first samples, as names if the classes have names; None without labels."""
    labels, classes = images.samples.labels, images.samples.classes
    if labels is None or not (labels[:number] >= 0).any():
        return None
    return [
        None if label < 0 else classes[label] if classes else int(label)
        for label in labels[:number]
    ]


def _annotated(
    found: AuditInput, labels: Path | None, keys: Path | None, texts: Path | None, key: str | None
) -> AuditInput:
    """Joins the files with the samples: by key where both have keys, otherwise by row."""
    if labels is None and keys is None and texts is None:
        return found
    values = found.__dict__.copy()
    if keys is not None:
        values["keys"] = read_keys(keys)
    num = len(values["keys"]) if values["keys"] is not None else _num_rows(found.features, key)
    if labels is not None:
        values["labels"] = align(read_labels(labels), values["keys"], num)
    if texts is not None:
        values["texts"] = [
            "" if text is None else str(text)
            for text in align(read_texts(texts), values["keys"], num)
        ]
    return AuditInput(**values)


def _num_rows(features: Any, key: str | None) -> int:
    from kinfolk.auditing.inputs import open_features

    return len(
        open_features(features, key) if isinstance(features, str | os.PathLike) else features
    )


def _from_run(path: Path, progress: bool) -> AuditInput:
    """The training samples of a run, embedded by its encoder. An image with several captions is one
    sample, with all of them as its text."""
    from kinfolk.data.captions import captions_of
    from kinfolk.training.build import learns_from_text
    from kinfolk.training.load_run import open_run
    from kinfolk.training.run_folder import Run, open_data

    opened = open_run(path)
    opened.encoder()  # a run without a model is refused before any image is read
    images = opened.data(progress=progress)
    source = None if images.stream is not None else open_data(None, opened.config, Run(path))
    origin = run_origin(path, opened.config, None)
    if images.texts is not None:
        return _from_texts(images, origin, partial(opened.features, images, progress=progress))
    if not learns_from_text(opened.config):
        features = opened.features(images, np.arange(images.num_train), progress=progress)
        return _with_images(features, images, source, origin)
    rows = rows_by_image(images.samples.keys[: images.num_train])
    first = np.asarray([members[0] for members in rows], dtype=np.int64)
    features = opened.features(images, first, progress=progress)
    captions = images.samples.captions or [None] * len(images)
    texts = [
        " / ".join(text for row in each for text in captions_of(captions[row])) for each in rows
    ]
    if images.stream is not None:
        found = AuditInput(
            features, None, [images.samples.keys[row] for row in first], origin=origin
        )
    else:
        found = _with_images(features, images.at(first), source, origin)
    return replace(found, texts=texts, views=1)


def _from_texts(
    images: ImageData, origin: Provenance, embed: Callable[[Any], NDArray[np.float32]]
) -> AuditInput:
    """The anchors of the training pairs, each distinct text once. `embed`: ids → features."""
    import torch

    assert images.texts is not None
    ids = images.once(torch.arange(images.num_train))
    labels = class_names(images, images.num_train)
    return AuditInput(
        embed(ids.numpy()),
        None if labels is None else [labels[sample] for sample in ids.tolist()],
        [images.samples.keys[sample] for sample in ids.tolist()],
        [texts[0] for texts in images.texts.of(ids)],
        origin=replace(origin, has_labels=labels is not None),
        views=1,
    )


def _by_sentence_transformer(data: str, encoder: str, progress: bool) -> AuditInput:
    """Text pairs, embedded by a model of sentence-transformers."""
    import torch

    from kinfolk.data.open_source import open_source
    from kinfolk.data.text_pairs import read_pairs
    from kinfolk.models.text import sentence_transformer

    source = open_source(data)
    if not source.has_texts:
        raise UsageError(
            f"{encoder} embeds texts, and `{data}` holds images; give a table with the columns"
            " anchor and positive, or an encoder of images"
        )
    model, images = sentence_transformer(encoder), read_pairs(source)
    assert images.texts is not None
    texts = images.texts

    def embed(ids: Any) -> NDArray[np.float32]:
        words = [pair[0] for pair in texts.of(torch.from_numpy(ids))]
        return np.asarray(model.encode(words, show_progress_bar=progress), dtype=np.float32)

    words = f"{encoder} with its pretrained weights"
    origin = Provenance(data, False, False, words, framework="pairs", captions=True)
    return _from_texts(images, origin, embed)


def _require_encoder(path: Path) -> None:
    """Refuses a table of texts without an encoder, which would be read as features."""
    if path.suffix.lower() in (".csv", ".tsv", ".parquet") and path.is_file():
        from kinfolk.data.table import read_columns
        from kinfolk.data.text_pairs import text_columns

        try:
            names = list(read_columns(path))
        except KinfolkError:
            return
        if text_columns(names) is not None:
            raise UsageError(
                f"`{path}` is a table of text pairs; embed them by a run (--encoder RUN) or a model"
                " of sentence-transformers (--encoder st/NAME)"
            )


def run_origin(path: Path, config: TrainConfig, data: str | None) -> Provenance:
    """The origin of features by the encoder of a run, of its training data or of other `data`."""
    from kinfolk.training.build import learns_from_text

    known = config.data.source if data is None else data
    own = (data is None or _same_place(config.data.source, data)) and not _knows_more(config)
    folders = bool(config.data.labels_from_folders) and data is None
    words = f"the encoder of the run {path}"
    framework = config.method.partition("+")[0]
    return Provenance(
        known, folders, False, words, own, str(path), framework, learns_from_text(config)
    )


def rows_by_image(keys: Sequence[str]) -> list[list[int]]:
    """Rows of a table that share an image: the keys of later ones are `path#2`, `path#3`, …"""
    rows: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        path, mark, number = key.rpartition("#")
        first = path if mark and number.isdecimal() and path in rows else key
        rows.setdefault(first, []).append(row)
    return list(rows.values())


def _knows_more(config: TrainConfig) -> bool:
    """Whether a training used labels or another model, so that its encoder knows more than the
    images alone show."""
    from kinfolk.training.guides import PATCHES

    by_patches = config.detector.get("features") == PATCHES
    return not by_patches and any(
        f"+{detector}" in config.method for detector in ("oracle", "guide", "known")
    )


def _with_images(
    features: NDArray[np.float32], images: ImageData, source: Any, origin: Provenance
) -> AuditInput:
    number = images.num_train
    keys, labels = images.samples.keys[:number], class_names(images, number)
    return AuditInput(
        features,
        labels,
        keys,
        None,
        images,
        Thumbnails(images, source),
        replace(origin, has_labels=labels is not None),
    )


def _from_file(
    path: Path,
    key: str | None,
    images: str | None,
    labels_from_folders: bool,
    workers: int | None,
    cache: Path,
    progress: bool,
) -> AuditInput:
    """Features from a file, with keys and labels from the table beside it or from its images."""
    keys, labels = _beside(path, key)
    origin = replace(
        _recorded_origin(path), guide=str(path) if path.suffix.lower() in GUIDES else None
    )
    if images is None:
        return AuditInput(path, labels, keys, origin=origin)
    from kinfolk.data.open_source import open_source
    from kinfolk.data.prepare import prepare

    source = open_source(images, labels_from_folders=labels_from_folders)
    data = prepare(source, image_size=PIXELS, workers=workers, cache_dir=cache, progress=progress)
    if data.quarantine:
        refused, reason = data.quarantine[0]
        raise UsageError(
            f"{len(data.quarantine):,} images of `{images}` can't be read (the first is {refused}:"
            f" {reason}), so its images do not correspond to the rows of the features; remove them"
            " there and here, or leave out --images"
        )
    own = class_names(data, len(data))
    number = _num_rows(path, key)
    if number != len(data):
        raise UsageError(
            f"--images (={images}) has {len(data):,} images and `{path}` has {number:,} rows; "
            "give the images of exactly these rows, in order"
        )
    if keys is not None and list(keys) != list(data.samples.keys):
        raise UsageError(
            f"the images in `{images}` are not those of `{path.with_suffix('.parquet')}`, or have"
            " another order; give the data that the features were computed from"
        )
    origin = replace(
        origin, data=images, labels_from_folders=labels_from_folders, has_labels=own is not None
    )
    return AuditInput(
        path,
        labels if own is None else own,
        data.samples.keys,
        None,
        data,
        Thumbnails(data, source),
        origin,
    )


def _recorded_origin(path: Path) -> Provenance:
    """What `kinfolk embed` recorded in the .parquet file beside a .npy file; unknown otherwise."""
    table = path.with_suffix(".parquet")
    if path.suffix.lower() != ".npy" or not table.is_file():
        return UNKNOWN
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        recorded = json.loads((pq.read_schema(table).metadata or {})[ORIGIN.encode()])
        return Provenance(**recorded)
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError):
        return UNKNOWN


def _beside(path: Path, key: str | None) -> tuple[list[str] | None, list[Any] | None]:
    """Keys and labels in the features' own table, or in the .parquet file that `kinfolk embed`
    writes beside a .npy file."""
    own = path.suffix.lower() in (".csv", ".tsv", ".parquet")
    table_file = path if own else path.with_suffix(".parquet")
    if not table_file.is_file() or (path.suffix.lower() != ".npy" and not own):
        return None, None
    if table_file.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            names = pq.read_schema(table_file).names
            wanted = [name for name in (*KEY_COLUMNS, *LABEL_COLUMNS) if name in names]
            read = pq.read_table(table_file, columns=wanted, partitioning=None)
            table = {name: read[name].to_pylist() for name in wanted}
        except (pa.ArrowException, OSError):
            return None, None
    else:
        try:
            table = read_table(table_file)
        except (UsageError, ValueError, OSError):
            return None, None
    keys = next(([str(key) for key in table[name]] for name in KEY_COLUMNS if name in table), None)
    if (
        keys is None
        or len(set(keys)) < len(keys)
        or (not own and len(keys) != _num_rows(path, key))
    ):
        return None, None
    labels = next((table[name] for name in LABEL_COLUMNS if name in table), None)
    return keys, (
        None if labels is None or all(label is None or label == "" for label in labels) else labels
    )


def _from_images(
    data: str, named: str | None, labels_from_folders: bool, workers: int | None, progress: bool
) -> AuditInput:
    """Embeds images with a run, a pretrained network or patches (None)."""
    from kinfolk.models.build import PACKAGES
    from kinfolk.training.guides import PATCHES

    encoder = PATCHES if named is None else named
    if encoder == PATCHES or ("/" in encoder and encoder.partition("/")[0] in PACKAGES):
        return _by_guide(data, encoder, labels_from_folders, workers, progress)
    from kinfolk.data.open_source import open_source
    from kinfolk.training.load_run import open_run

    opened = open_run(encoder)
    opened.encoder()
    images = opened.data(
        data, labels_from_folders=labels_from_folders, workers=workers, progress=progress
    )
    origin = replace(
        run_origin(Path(encoder), opened.config, data), labels_from_folders=labels_from_folders
    )
    if images.texts is not None:
        return _from_texts(images, origin, partial(opened.features, images, progress=progress))
    features = opened.features(images, np.arange(images.num_train), progress=progress)
    return _with_images(
        features, images, open_source(data, labels_from_folders=labels_from_folders), origin
    )


def _same_place(one: str | None, other: str) -> bool:
    return one is not None and (one == other or Path(one).absolute() == Path(other).absolute())


def _by_guide(
    data: str, encoder: str, labels_from_folders: bool, workers: int | None, progress: bool
) -> AuditInput:
    """The features that `kinfolk train --guide` takes too."""
    from kinfolk.data.open_source import open_source
    from kinfolk.data.prepare import prepare
    from kinfolk.training.guides import PATCHES, guide_features

    source = open_source(data, labels_from_folders=labels_from_folders)
    images = prepare(
        source, image_size=PIXELS if encoder == PATCHES else 256, workers=workers, progress=progress
    )
    features = guide_features(encoder, images)
    words = (
        "k-means of patches of these images"
        if encoder == PATCHES
        else f"{encoder} with its pretrained weights"
    )
    origin = Provenance(data, labels_from_folders, False, words, False, encoder)
    return _with_images(np.asarray(features.numpy(), dtype=np.float32), images, source, origin)
