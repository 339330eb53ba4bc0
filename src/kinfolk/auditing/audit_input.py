"""Opens what `kinfolk audit` is given: a file of features, a run, or images, which are embedded first.

Images are embedded by a run (`encoder="runs/x"`), by a pretrained network of torchvision or timm (`encoder="timm/NAME"`), by k-means of
their own patches (`encoder="patches"`), or, if no encoder is given, by a small encoder that is trained on them for a short time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kinfolk.auditing.annotations import KEY_COLUMNS, LABEL_COLUMNS, align, read_keys, read_labels, read_table, read_texts
from kinfolk.auditing.inputs import SUFFIXES
from kinfolk.auditing.page import Thumbnails
from kinfolk.auditing.verdict import UNKNOWN, Provenance
from kinfolk.errors import UsageError, counted
from kinfolk.models.build import PACKAGES
from kinfolk.training.guides import PATCHES, guide_features

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kinfolk.data.images import ImageData
    from kinfolk.training.config import TrainConfig

GUIDES = (".npy", ".safetensors")
"""Files of features that `kinfolk train --guide` takes."""
PIXELS = 64
"""Side at which the images of `--images` are read for the comparison of pixels."""
BRIEF_SAMPLES = 60_000
"""Training samples that the short training sees, over all its epochs."""


@dataclass(frozen=True)
class AuditInput:
    """What an audit works on.

    Args:
        features: a path or an array.
        labels, keys, texts: of the rows, where they are known.
        images, thumbnails: images of the rows, if there are any.
        origin: where samples and features come from, for the words and commands of the verdict.
    """

    features: Any
    labels: list[Any] | None = None
    keys: Sequence[str] | None = None
    texts: list[str] | None = None
    images: ImageData | None = None
    thumbnails: Thumbnails | None = None
    origin: Provenance = UNKNOWN


@contextmanager
def open_input(
    given: str | os.PathLike[str],
    *,
    images: str | None = None,
    encoder: str | None = None,
    encoder_out: Path | None = None,
    labels: Path | None = None,
    keys: Path | None = None,
    texts: Path | None = None,
    key: str | None = None,
    labels_from_folders: bool = False,
    epochs: int | None = None,
    as_images: bool = False,
    workers: int | None = None,
    progress: bool = True,
) -> Iterator[AuditInput]:
    """Opens features, a run or images, and joins labels, keys and texts from files.

    Args:
        given: a file of features, a run folder, or images (anything that `kinfolk train --data` takes; a file only with `encoder`).
        images: images of the rows of a file of features.
        encoder: a run folder or torchvision/NAME, timm/NAME, open_clip/NAME or patches, to embed images with; None trains a small encoder.
        encoder_out: folder for the run of a short training.
        labels, keys, texts: files; see `annotations`.
        key: name of the features in a file with several arrays.
        epochs: of the short training; None chooses by the number of images.
        as_images: take a file as images, not as features.
    """
    path = Path(given)
    is_run = (path / "config.yaml").is_file() and not as_images
    is_file = path.suffix.lower() in SUFFIXES and encoder is None and not as_images
    if images is not None and not (is_file and not path.is_dir()):
        what = "a run, which has its own images" if is_run else "a folder of images"
        raise UsageError(f"`{given}` is {what}; leave out --images")
    with tempfile.TemporaryDirectory(prefix="kinfolk-audit-") as cache:
        if is_run and encoder is None:
            found = _from_run(path, progress)
        elif is_file or (not path.exists() and str(given) != "digits" and not as_images):
            found = _from_file(path, key, images, labels_from_folders, workers, Path(cache), progress)
        else:
            out = Path(cache) / "encoder" if encoder_out is None else encoder_out
            found = _from_images(str(given), encoder, out, labels_from_folders, epochs, workers, progress)
        yield _annotated(found, labels, keys, texts, key)


def class_names(images: ImageData, number: int) -> list[Any] | None:
    """Labels of the first samples, as names if the classes have names; None without labels."""
    labels, classes = images.samples.labels, images.samples.classes
    if labels is None or not (labels[:number] >= 0).any():
        return None
    return [None if label < 0 else classes[label] if classes else int(label) for label in labels[:number]]


def _annotated(found: AuditInput, labels: Path | None, keys: Path | None, texts: Path | None, key: str | None) -> AuditInput:
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
        values["texts"] = ["" if text is None else str(text) for text in align(read_texts(texts), values["keys"], num)]
    return AuditInput(**values)


def _num_rows(features: Any, key: str | None) -> int:
    from kinfolk.auditing.inputs import open_features

    return len(open_features(features, key) if isinstance(features, str | os.PathLike) else features)


def _from_run(path: Path, progress: bool) -> AuditInput:
    """The training samples of a run, embedded by its encoder."""
    from kinfolk.training.load_run import open_run
    from kinfolk.training.run_folder import Run, open_data

    opened = open_run(path)
    opened.encoder()  # a run without a model is refused before any image is read
    images = opened.data(progress=progress)
    features = opened.features(images, np.arange(images.num_train), progress=progress)
    source = None if images.stream is not None else open_data(None, opened.config, Run(path))
    data = opened.config.data
    own = not _knows_more(opened.config)
    origin = Provenance(data.source, data.labels_from_folders, False, f"the encoder of the run {path}", own, str(path))
    return _with_images(features, images, source, origin)


def _knows_more(config: TrainConfig) -> bool:
    """Whether a training used labels or another model, so that its encoder knows more than the images alone show."""
    by_patches = config.detector.get("features") == PATCHES
    return not by_patches and any(f"+{detector}" in config.method for detector in ("oracle", "guide", "known"))


def _with_images(features: NDArray[np.float32], images: ImageData, source: Any, origin: Provenance) -> AuditInput:
    number = images.num_train
    keys, labels = images.samples.keys[:number], class_names(images, number)
    return AuditInput(features, labels, keys, None, images, Thumbnails(images, source), replace(origin, has_labels=labels is not None))


def _from_file(
    path: Path, key: str | None, images: str | None, labels_from_folders: bool, workers: int | None, cache: Path, progress: bool
) -> AuditInput:
    """Features from a file, with keys and labels from the table beside it or from its images."""
    keys, labels = _beside(path, key)
    origin = Provenance(guide=str(path) if path.suffix.lower() in GUIDES else None)
    if images is None:
        return AuditInput(path, labels, keys, origin=origin)
    from kinfolk.data.open_source import open_source
    from kinfolk.data.prepare import prepare

    source = open_source(images, labels_from_folders=labels_from_folders)
    data = prepare(source, image_size=PIXELS, workers=workers, cache_dir=cache, progress=progress)
    if data.quarantine:
        refused, reason = data.quarantine[0]
        raise UsageError(
            f"{len(data.quarantine):,} images of `{images}` can't be read (the first is {refused}: {reason}), so its images do not "
            "correspond to the rows of the features; remove them there and here, or leave out --images"
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
            f"the images in `{images}` are not those of `{path.with_suffix('.parquet')}`, or have another order; give the data that the "
            "features were computed from"
        )
    origin = replace(origin, data=images, labels_from_folders=labels_from_folders, has_labels=own is not None)
    return AuditInput(path, labels if own is None else own, data.samples.keys, None, data, Thumbnails(data, source), origin)


def _beside(path: Path, key: str | None) -> tuple[list[str] | None, list[Any] | None]:
    """Keys and labels in the features' own table, or in the .parquet file that `kinfolk embed` writes beside a .npy file."""
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
    if keys is None or len(set(keys)) < len(keys) or (not own and len(keys) != _num_rows(path, key)):
        return None, None
    labels = next((table[name] for name in LABEL_COLUMNS if name in table), None)
    return keys, None if labels is None or all(label is None or label == "" for label in labels) else labels


def _from_images(
    data: str, encoder: str | None, out: Path, labels_from_folders: bool, epochs: int | None, workers: int | None, progress: bool
) -> AuditInput:
    """Embeds images with a run, a pretrained network, or an encoder trained on them for a short time."""
    if encoder is not None and (encoder == PATCHES or ("/" in encoder and encoder.partition("/")[0] in PACKAGES)):
        return _by_guide(data, encoder, labels_from_folders, workers, progress)
    from kinfolk.data.open_source import open_source
    from kinfolk.training.load_run import open_run

    if encoder is not None:
        opened = open_run(encoder)
        opened.encoder()
        images = opened.data(data, labels_from_folders=labels_from_folders, workers=workers, progress=progress)
        words = f"the encoder of the run {encoder}"
        own = _same_place(opened.config.data.source, data) and not _knows_more(opened.config)
    else:
        own = True
        settings, words = _train_briefly(data, out, labels_from_folders, epochs, progress)
        opened = open_run(out)
        images = opened.data(progress=progress)
        words = f"a small encoder ({settings}), trained on these images by {words}"
    features = opened.features(images, np.arange(images.num_train), progress=progress)
    origin = Provenance(data, labels_from_folders, False, words, own, encoder)
    return _with_images(features, images, open_source(data, labels_from_folders=labels_from_folders), origin)


def _same_place(one: str | None, other: str) -> bool:
    return one is not None and (one == other or Path(one).absolute() == Path(other).absolute())


def _train_briefly(data: str, out: Path, labels_from_folders: bool, epochs: int | None, progress: bool) -> tuple[str, str]:
    """Trains `simclr-cpu` on the images; returns encoder and training in words."""
    from kinfolk.data.open_source import open_source
    from kinfolk.training.train import train

    number = sum(item.split == "train" for item in open_source(data, labels_from_folders=labels_from_folders).items())
    if number < 16:
        raise UsageError(f"`{data}` has {counted(number, 'image')}, too few to train an encoder on; give one with --encoder")
    epochs = min(60, max(5, round(BRIEF_SAMPLES / number))) if epochs is None else epochs
    batch = min(256, 1 << (number // 4).bit_length() - 1)
    settings = {"data.labels_from_folders": labels_from_folders}
    train(data, out, recipe="simclr-cpu", epochs=epochs, batch_size=max(4, batch), settings=settings, overwrite=True, progress=progress)
    return "resnet10, 32 × 32 pixels", f"simclr for {counted(epochs, 'epoch')}"


def _by_guide(data: str, encoder: str, labels_from_folders: bool, workers: int | None, progress: bool) -> AuditInput:
    """The features that `kinfolk train --guide` takes too."""
    from kinfolk.data.open_source import open_source
    from kinfolk.data.prepare import prepare

    source = open_source(data, labels_from_folders=labels_from_folders)
    images = prepare(source, image_size=PIXELS if encoder == PATCHES else 256, workers=workers, progress=progress)
    features = guide_features(encoder, images)
    words = "k-means of patches of these images" if encoder == PATCHES else f"{encoder} with its pretrained weights"
    origin = Provenance(data, labels_from_folders, False, words, False, encoder)
    return _with_images(np.asarray(features.numpy(), dtype=np.float32), images, source, origin)
