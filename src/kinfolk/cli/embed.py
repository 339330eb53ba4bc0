"""`kinfolk embed`: writes the encoder's features for use elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kinfolk.cli.options import FLAG, RUNNING, Debug, LabelsFromFolders, RunFolder, RunsData, Workers, examples
from kinfolk.errors import UsageError

EPILOG = examples("kinfolk embed runs/photos --out features.npy", "kinfolk embed runs/photos --data more/ --out more.npy")


def embed(
    run: RunFolder,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write, .npy; the samples go beside it as .parquet.", show_default=False)
    ],
    data: RunsData = None,
    labels_from_folders: LabelsFromFolders = False,
    workers: Workers = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", metavar=FLAG, help="Replace the files.", rich_help_panel=RUNNING)] = False,
    debug: Debug = False,
) -> None:
    """Write the encoder's features of every sample: float32, one row each.

    Row i of the array belongs to row i of the Parquet file, which holds id, key, split and label.
    """
    if out.suffix != ".npy":
        raise UsageError(f"--out (={out}) must end in .npy; the samples are written beside it as .parquet")
    table = out.with_suffix(".parquet")
    if not overwrite and (existing := [path for path in (out, table) if path.exists()]):
        raise UsageError(f"{existing[0]} exists; give another --out, or --overwrite to replace it")
    import numpy as np

    from kinfolk.cli.console import screen, tell_refused
    from kinfolk.files import write_atomically
    from kinfolk.training.opened import open_run

    opened = open_run(run)
    opened.encoder()  # a run without a model is refused before any picture is read
    images = opened.data(data, progress=True, labels_from_folders=labels_from_folders, workers=workers)
    tell_refused(images)
    features = opened.features(images, progress=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    images.samples.to_parquet(table)
    write_atomically(out, lambda file: np.save(file, features))
    screen().print(f"{features.shape[0]:,} samples × {features.shape[1]:,} features: {out}, {table}", markup=False)
