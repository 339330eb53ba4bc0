"""`kinfolk export` writes the encoder for other software."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kinfolk.cli.options import FLAG, RUNNING, Debug, RunFolder, examples

EPILOG = examples(
    "kinfolk export runs/photos --format torchvision",
    "kinfolk export runs/photos --format onnx --out encoder.onnx",
    "kinfolk export runs/imagenet --format detectron2 --out r50.pkl",
)


def export(
    run: RunFolder,
    format: Annotated[str, typer.Option("--format", "-f", help="safetensors, torchvision, timm, detectron2 or onnx.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write; for timm a folder. [dim]Default: in RUN/export/.[/]", show_default=False),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", metavar=FLAG, help="Replace an existing export.", rich_help_panel=RUNNING)
    ] = False,
    debug: Debug = False,
) -> None:
    """Write the encoder for other software, under the parameter names it expects.

    The projection head and the classifier are left out. If the target package is installed, the export is loaded there and must return the
    same features. torchvision, timm and detectron2 take ResNets trained with `--set model.stem=imagenet` and the usual width; safetensors
    and onnx take any encoder.
    """
    from kinfolk.cli.options import screen
    from kinfolk.exporting import export as write

    found = write(run, format, out, overwrite=overwrite)
    for head, text in (("Written", str(found.path)), ("Checked", found.checked), ("Use", found.use)):
        screen().print(f"{head}: {text}", markup=False)
