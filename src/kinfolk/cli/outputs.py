"""`kinfolk embed`, `kinfolk export` and `kinfolk report`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from kinfolk.cli.options import (
    LabelsFromFolders,
    RunFolder,
    RunsData,
    Workers,
    examples,
    option,
    overwrite_option,
    read_images,
    require_new,
    say,
)
from kinfolk.errors import UsageError, plural

EMBED_EPILOG = examples("kinfolk embed runs/photos --out features.npy")


def embed(
    run: RunFolder,
    out: Annotated[
        Path,
        option("File to write (.npy), with a .parquet of the samples next to it.", "--out", "-o"),
    ],
    data: RunsData = None,
    labels_from_folders: LabelsFromFolders = False,
    workers: Workers = None,
    overwrite: Annotated[bool, overwrite_option("the files")] = False,
) -> None:
    """Write the features of every sample as a float32 array, one row per sample.

    Row i of the array belongs to row i of the Parquet file, which has id, key, split and label.
    """
    if out.suffix != ".npy":
        raise UsageError(f"--out (={out}) must end in .npy")
    table = out.with_suffix(".parquet")
    for path in (out, table):
        require_new(path, overwrite)
    import numpy as np

    from kinfolk.auditing.inputs import ORIGIN, run_origin
    from kinfolk.files import write_atomically
    from kinfolk.training.load_run import open_run

    opened = open_run(run)
    images = read_images(opened, data, labels_from_folders, workers)
    features = opened.features(images, progress=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, lambda file: np.save(file, features))
    origin = replace(run_origin(opened, data), has_labels=images.samples.labels is not None)
    images.samples.to_parquet(table, {ORIGIN: json.dumps(asdict(origin))})
    size = f"{plural(len(features), 'sample')} × {plural(features.shape[1], 'feature')}"
    say(f"{size}: {out}, {table}")


EXPORT_EPILOG = examples(
    "kinfolk export runs/photos --format torchvision",
    "kinfolk export runs/photos --format onnx --out encoder.onnx",
)


def export(
    run: RunFolder,
    format: Annotated[str, option("safetensors, torchvision, timm or onnx.", "--format", "-f")],
    out: Annotated[
        Path | None,
        option("File to write; for timm a folder; default: in RUN/export/.", "--out", "-o"),
    ] = None,
    overwrite: Annotated[bool, overwrite_option("an existing export")] = False,
) -> None:
    """Write the encoder for other software, under the parameter names it expects.

    The projection head and the classifier are left out. If the target package is installed, the
    export is loaded there and must return the same features. torchvision and timm take ResNets
    trained with `--set model.stem=imagenet` and the default width; safetensors and onnx take any
    encoder.
    """
    from kinfolk.exporting import export as write

    found = write(run, format, out, overwrite=overwrite)
    say(f"Written: {found.path}\nChecked: {found.checked}\nUse: {found.use}")


REPORT_EPILOG = examples("kinfolk report runs/photos")


def report(run: RunFolder, data: RunsData = None) -> None:
    """Write RUN/report.html: settings, curves, results, anchors with their kin, embedding map and
    views.

    The page is one file that works from disk. Up to 5,000 samples are embedded with the run's
    encoder for the map, and the detector of the last checkpoint is applied to them. If the images
    or the checkpoint can't be read, the page and the terminal give the reason.
    """
    from kinfolk.report import write_report
    from kinfolk.training.load_run import open_run

    images = None if data is None else open_run(run).data(data, progress=True)
    say(f"Report: {write_report(run, images, progress=True, on_missing=say)}")
