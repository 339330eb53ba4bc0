"""What `kinfolk audit` is given: features, a run, images or texts, and labels. N: data set."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kinfolk.auditing.page import Thumbnails
from kinfolk.auditing.verdict import UNKNOWN, Provenance
from kinfolk.errors import UsageError, short, warn
from kinfolk.features import SUFFIXES, Ints, open_features
from kinfolk.files import explain_read_errors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kinfolk.data.images import ImageData
    from kinfolk.data.source import Source
    from kinfolk.training.load_run import OpenedRun

GUIDES = (".npy", ".safetensors")
TABLES = (".csv", ".tsv", ".parquet")
ORIGIN = "kinfolk.origin"
"""Key in the metadata of the Parquet file that `kinfolk embed` writes."""
PIXELS = 64
"""Side at which images are read for the comparison of pixels."""
LABEL_COLUMNS = ("label",)
TEXT_COLUMNS = ("text", "caption", "sentence")
KEY_COLUMNS = ("key", "file", "filename", "file_name", "path", "image")


@dataclass(frozen=True)
class AuditInput:
    features: NDArray[Any]
    labels: list[Any] | None = None
    keys: Sequence[str] | None = None
    texts: list[str] | None = None
    images: ImageData | None = None
    thumbnails: Thumbnails | None = None
    origin: Provenance = UNKNOWN
    views: int = 2


def read_input(
    given: str | os.PathLike[str],
    *,
    images: str | None = None,
    encoder: str | None = None,
    labels: Path | None = None,
    texts: Path | None = None,
    key: str | None = None,
    labels_from_folders: bool = False,
    as_images: bool = False,
    workers: int | None = None,
    progress: bool = True,
) -> AuditInput:
    """`given`: features, a run folder, or images. A file holds images if there is an `encoder` or
    with `as_images`. The other arguments are the options of `kinfolk audit`."""
    path, data = Path(given), str(given)
    is_run = (path / "config.yaml").is_file() and not as_images and encoder is None
    is_file = path.suffix.lower() in SUFFIXES and encoder is None and not as_images
    if images is not None and (not is_file or path.is_dir()):
        what = "a run, which has its own images" if is_run else "a folder of images"
        raise UsageError(f"`{data}` is {what}; leave out --images")
    options: dict[str, Any] = {"labels_from_folders": labels_from_folders, "progress": progress}
    options["workers"] = workers
    if is_run:
        found = _embed_by_run(path, None, **options)
    elif encoder is not None and encoder.startswith("st/"):
        found = _embed_texts(data, encoder, progress)
    elif is_file or (not path.exists() and data != "digits" and not as_images):
        found = _open_features(path, key)
        if images is not None:
            found = _add_images(found, data, images, **options)
    else:
        found = _embed_images(data, encoder, "--guide" if as_images else "--encoder", **options)
    if labels is not None:
        values = align(read_column(labels), found.keys, len(found.features))
        found = replace(found, labels=values)
    if texts is not None:
        column = read_column(texts, "--texts", TEXT_COLUMNS)
        values = align(column, found.keys, len(found.features))
        found = replace(found, texts=["" if text is None else str(text) for text in values])
        if found.images is None and found.origin.data is None:  # sentences of unknown origin
            origin = replace(found.origin, framework="pairs", captions=True)
            found = replace(found, origin=origin, views=1)
    return found


# ---- a file of features


def _open_features(path: Path, key: str | None) -> AuditInput:
    """Takes keys, labels and origin from the table that `kinfolk embed` writes."""
    suffix, table = path.suffix.lower(), path.with_suffix(".parquet")
    columns, names, origin = dict[str, list[Any]](), list[str](), UNKNOWN
    if suffix in (".npy", ".parquet") and table.is_file():
        import pyarrow.parquet as pq

        from kinfolk.data.text import text_columns

        with contextlib.suppress(OSError, ValueError):  # pyarrow's errors are of these kinds
            schema = pq.read_schema(table)
            names = schema.names
            read = [name for name in (*KEY_COLUMNS, *LABEL_COLUMNS) if name in names]
            columns = pq.read_table(table, columns=read, partitioning=None).to_pydict()
            with contextlib.suppress(KeyError, TypeError, ValueError):  # not written by `embed`
                origin = Provenance(**json.loads((schema.metadata or {})[ORIGIN.encode()]))
        if suffix == ".parquet" and text_columns(names) is not None:  # their scores are no features
            raise _refuse_text_pairs(str(path), "--encoder")
    origin = replace(origin, guide=str(path) if suffix in GUIDES else None)
    found = AuditInput(open_features(path, key), origin=origin)
    keys = [str(key) for key in next((columns[n] for n in KEY_COLUMNS if n in columns), ())]
    if not keys or len(set(keys)) < len(keys) or len(keys) != len(found.features):
        return found
    labels = columns.get("label", [])
    has_labels = any(label not in (None, "") for label in labels)
    return replace(found, keys=keys, labels=labels if has_labels else None)


def _refuse_text_pairs(data: str, option: str) -> UsageError:
    return UsageError(
        f"`{data}` is a table of text pairs; embed them by a run ({option} RUN) or a model of"
        f" sentence-transformers ({option} st/NAME)"
    )


def _add_images(
    found: AuditInput, features: str, images: str, labels_from_folders: bool, **options: Any
) -> AuditInput:
    from kinfolk.data.open_source import open_source
    from kinfolk.data.prepare import prepare

    source = open_source(images, labels_from_folders=labels_from_folders)
    data = prepare(source, image_size=PIXELS, **options)
    number, refused = len(found.features), len(data.quarantine)
    keys = data.samples.keys if found.keys is None else found.keys
    if refused or number != len(data) or list(keys) != list(data.samples.keys):
        unread = ""
        if refused:
            first, why = data.quarantine[0]
            unread = f", of which {refused:,} can't be read (the first is {short(first)}: {why}),"
        raise UsageError(
            f"--images (={images}) has {len(data) + refused:,} images{unread} and `{features}` has"
            f" {number:,} rows; give the images of exactly these rows, in order"
        )
    origin = replace(found.origin, data=images, labels_from_folders=labels_from_folders)
    added = _from_images(found.features, data, source, origin)
    return added if added.labels is not None else replace(added, labels=found.labels)


# ---- runs, images and texts


def _embed_by_run(
    path: str | Path, data: str | None, labels_from_folders: bool, **options: Any
) -> AuditInput:
    """An image with several captions is one sample, with all of them as its text."""
    from kinfolk.data.labels import captions_of
    from kinfolk.data.open_source import open_source
    from kinfolk.training.load_run import open_run
    from kinfolk.training.run_folder import Run, open_data

    opened, progress = open_run(path), options["progress"]
    opened.encoder()  # a run without a model is refused before any image is read
    images = opened.data(data, labels_from_folders=labels_from_folders, **options)
    origin = run_origin(opened, data)
    if data is not None:
        origin = replace(origin, labels_from_folders=labels_from_folders)
    if images.texts is not None:
        return _from_texts(images, origin, partial(opened.features, images, progress=progress))
    source = None
    if data is not None:
        source = open_source(data, labels_from_folders=labels_from_folders)
    elif images.stream is None:
        source = open_data(None, opened.config, Run(Path(path)))
    if data is not None or "text" not in opened.modalities:
        features = opened.features(images, np.arange(images.num_train), progress=progress)
        return _from_images(features, images, source, origin)
    keys = images.samples.keys
    rows = rows_by_image(keys[: images.num_train])
    first = np.asarray([members[0] for members in rows], dtype=np.int64)
    features = opened.features(images, first, progress=progress)
    if images.stream is not None:
        found = AuditInput(features, None, [keys[row] for row in first], origin=origin)
    else:
        found = _from_images(features, images.at(first), source, origin)
    captions = images.samples.captions or [None] * len(images)
    texts = [[text for row in each for text in captions_of(captions[row])] for each in rows]
    return replace(found, texts=[" / ".join(each) for each in texts], views=1)


def run_origin(opened: OpenedRun, data: str | None) -> Provenance:
    from kinfolk.training.guides import PATCHES

    config, source = opened.config, opened.config.data.source
    same = data is None or (source is not None and Path(source).absolute() == Path(data).absolute())
    framework, _, detector = config.method.partition("+")
    by_patches = config.detector.get("features") == PATCHES
    had_help = detector.partition(":")[0] in ("oracle", "guide", "known") and not by_patches
    return Provenance(
        data=source if data is None else data,
        labels_from_folders=bool(config.data.labels_from_folders) and data is None,
        encoder=f"the encoder of the run {opened.path}",
        same_samples=same and not had_help,
        guide=str(opened.path),
        framework=framework,
        captions="text" in opened.modalities,
    )


def rows_by_image(keys: Sequence[str]) -> list[list[int]]:
    """Rows of a table that share an image: the keys of later ones are `path#2`, `path#3`, …"""
    rows: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        path, mark, number = key.rpartition("#")
        first = path if mark and number.isdecimal() and path in rows else key
        rows.setdefault(first, []).append(row)
    return list(rows.values())


def _embed_images(
    data: str, encoder: str | None, option: str, labels_from_folders: bool, **options: Any
) -> AuditInput:
    from kinfolk.data.open_source import open_source
    from kinfolk.data.prepare import prepare
    from kinfolk.models.encoders import PACKAGES
    from kinfolk.training.guides import PATCHES, guide_features

    encoder = PATCHES if encoder is None else encoder
    if encoder != PATCHES and not ("/" in encoder and encoder.partition("/")[0] in PACKAGES):
        return _embed_by_run(encoder, data, labels_from_folders, **options)
    source = open_source(data, labels_from_folders=labels_from_folders)
    if source.has_texts:
        raise _refuse_text_pairs(data, option)
    images = prepare(source, image_size=PIXELS if encoder == PATCHES else 256, **options)
    if images.num_train < 2:
        raise UsageError(
            f"`{data}` has {images.num_train} image; an audit compares images with each other and"
            " needs at least 2, preferably hundreds"
        )
    words = "k-means of patches of these images"
    if encoder != PATCHES:
        words = f"{encoder} with its pretrained weights"
    origin = Provenance(data, labels_from_folders, encoder=words, guide=encoder)
    return _from_images(guide_features(encoder, images).float().numpy(), images, source, origin)


def _from_images(
    features: NDArray[Any], images: ImageData, source: Source | None, origin: Provenance
) -> AuditInput:
    labels = _label_names(images)
    return AuditInput(
        features,
        labels,
        images.samples.keys[: images.num_train],
        images=images,
        thumbnails=Thumbnails(images, source),
        origin=replace(origin, has_labels=labels is not None),
    )


def _label_names(images: ImageData) -> list[Any] | None:
    labels, classes = images.samples.labels, images.samples.classes
    if labels is None or not (labels[: images.num_train] >= 0).any():
        return None
    known = labels[: images.num_train].tolist()
    return [None if label < 0 else classes[label] if classes else label for label in known]


def _embed_texts(data: str, encoder: str, progress: bool) -> AuditInput:
    import torch

    from kinfolk.data.open_source import open_source
    from kinfolk.data.text import read_pairs
    from kinfolk.models.text import sentence_transformer

    source = open_source(data)
    if not source.has_texts:
        raise UsageError(
            f"{encoder} embeds texts, and `{data}` holds images; give a table with the columns"
            " anchor and positive, or an encoder of images"
        )
    model, images = sentence_transformer(encoder), read_pairs(source)

    def embed(ids: Any) -> NDArray[np.float32]:
        assert images.texts is not None
        anchors = [pair[0] for pair in images.texts.of(torch.from_numpy(ids))]
        return np.asarray(model.encode(anchors, show_progress_bar=progress), dtype=np.float32)

    words = f"{encoder} with its pretrained weights"
    origin = Provenance(data, encoder=words, framework="pairs", captions=True, model=encoder)
    return _from_texts(images, origin, embed)


def _from_texts(
    images: ImageData, origin: Provenance, embed: Callable[[Any], NDArray[np.float32]]
) -> AuditInput:
    """The anchors of the training pairs, each distinct text once."""
    import torch

    assert images.texts is not None
    ids, labels = images.once(torch.arange(images.num_train)), _label_names(images)
    rows = ids.tolist()
    return AuditInput(
        embed(ids.numpy()),
        None if labels is None else [labels[row] for row in rows],
        [images.samples.keys[row] for row in rows],
        [texts[0] for texts in images.texts.of(ids)],
        origin=replace(origin, has_labels=labels is not None),
        views=1,
    )


# ---- labels and texts from files


@dataclass(frozen=True)
class KeyedColumn:
    """`keys`: of the samples, or their numbers (column `id`)."""

    path: Path
    values: list[Any]
    key_column: str | None = None
    keys: list[str] | None = None


def read_column(
    path: Path, option: str = "--labels", names: Sequence[str] = LABEL_COLUMNS
) -> KeyedColumn:
    suffix, kinds = path.suffix.lower(), ".npy, .csv, .tsv, .parquet or .txt"
    if not path.is_file():
        raise UsageError(f"there is no file `{path}`; {option} takes {kinds}")
    with explain_read_errors(f"`{path}`", f"file for {option}"):
        if suffix == ".npy":
            return KeyedColumn(path, np.load(path, allow_pickle=False).tolist())
        if suffix in TABLES:
            from kinfolk.data.labels import read_columns

            return _choose_column(path, read_columns(path), names)
        if suffix == ".txt":
            return KeyedColumn(path, path.read_text(encoding="utf-8").splitlines())
    raise UsageError(f"{option} (={path}) must end in {kinds}")


def _choose_column(path: Path, table: dict[str, list[Any]], names: Sequence[str]) -> KeyedColumn:
    only = next(iter(table)) if len(table) == 1 else None
    name = next((name for name in names if name in table), only)
    if name is None:
        raise UsageError(
            f"`{path}` has no column {' or '.join(map(repr, names))}; its columns are"
            f" {', '.join(table)}"
        )
    key_column = next((key for key in KEY_COLUMNS if key in table and key != name), None)
    numbers = set(map(str, range(len(table[name]))))
    if key_column is None and set(map(str, table.get("id", ()))) == numbers:
        key_column = "id"
    if key_column is None:
        return KeyedColumn(path, table[name])
    keys = [str(key) for key in table[key_column]]
    (twice, times) = Counter(keys).most_common(1)[0] if keys else ("", 0)
    if times > 1:
        raise UsageError(
            f"the column `{key_column}` of `{path}` names {short(twice)} more than once; each"
            " sample must have one row"
        )
    return KeyedColumn(path, table[name], key_column, keys)


def align(column: KeyedColumn, keys: Sequence[str] | None, num_samples: int) -> list[Any]:
    """(N,) the values by key, or by row if the file has no keys; None for samples that it does not
    name."""
    if column.keys is None:
        return column.values
    name = f"`{column.path}`"
    if column.key_column == "id":
        keys = [str(sample) for sample in range(num_samples)]
    if keys is None:
        raise UsageError(
            f"{name} names its samples in the column `{column.key_column}`, but the features have"
            " no keys to match them with; give the images of the rows with --images, or remove the"
            " column"
        )
    places = _match(column.keys, keys)
    if places is None:
        raise UsageError(
            f"none of the {len(column.keys):,} samples in {name} is among the {len(keys):,} samples"
            f" of the features: it has {short(column.keys[0]) if column.keys else 'no rows'}, the"
            f" features have {short(keys[0])}; give a file with the same keys"
        )
    missing = [key for key, place in zip(keys, places, strict=True) if place is None]
    unused = len(column.keys) - (len(keys) - len(missing))
    parts = [f"names {unused:,} samples that are not among the features"] if unused else []
    if missing:
        first = f"(the first is {short(missing[0])})"
        parts.insert(0, f"has no entry for {len(missing):,} of {len(keys):,} samples {first}")
    if parts:
        warn(f"{name} {' and '.join(parts)}")
    return [None if place is None else column.values[place] for place in places]


def _match(given: Sequence[str], keys: Sequence[str]) -> list[int | None] | None:
    """Position in `given` of each of `keys`, by the whole key or else by the file name; None if
    nothing matches."""
    given, keys = (
        [key.replace("\\", "/").removeprefix("./") for key in each] for each in (given, keys)
    )
    for simplify in (str, lambda key: key.rpartition("/")[2]):
        places = {simplify(key): place for place, key in enumerate(given)}
        names = [simplify(key) for key in keys]
        if len(places) < len(given) or len(set(names)) < len(names):
            continue
        found = [places.get(name) for name in names]
        if any(place is not None for place in found):
            return found
    return None


def encode(values: Any, num_samples: int, name: str = "`labels`") -> tuple[Ints, list[str] | None]:
    """(N,) class of each sample, −1 where it is unknown, and the names of the classes."""
    from kinfolk.data.labels import encode_labels

    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    if len(listed) != num_samples:
        raise UsageError(
            f"{name} (={len(listed):,} labels) must be as many as the samples (={num_samples:,}):"
            " one for each row, in order"
        )
    if any(isinstance(value, list) for value in listed):
        raise UsageError(f"{name} must have one label for each sample, not a list of labels")
    labels, classes = encode_labels(listed, name)
    return np.asarray([-1 if label is None else label for label in labels], dtype=np.int64), classes
