"""`kinfolk audit`: the false negatives of any embedding."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kinfolk.cli.options import DATA, FLAG, RUNNING, Debug, LabelsFromFolders, Workers, examples
from kinfolk.errors import UsageError

if TYPE_CHECKING:
    from kinfolk.auditing import Audit
    from kinfolk.data.images import ImageData

FINDING = "Finding"
EPILOG = examples(
    "kinfolk audit features.npy --out audit/",
    "kinfolk audit features.npy --images photos/ --labels labels.csv --alpha 0.02",
    "kinfolk audit runs/photos --out audit/",
    "kinfolk train --data photos/ --out runs/clean --method simclr+known --known-kin audit/pairs.parquet",
)


def audit(
    features: Annotated[
        Path, typer.Argument(metavar="FEATURES", help=".npy, .npz, .parquet or .safetensors (N × D), or a run folder.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.", rich_help_panel=DATA)] = Path("audit"),
    images: Annotated[
        str | None,
        typer.Option(
            "--images", metavar="DIR|TABLE", help="Pictures of the samples, in the rows' order.", rich_help_panel=DATA, show_default=False
        ),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(help="A label for each row: .npy, .npz, .csv, .tsv, .parquet or .txt.", rich_help_panel=DATA, show_default=False),
    ] = None,
    labels_from_folders: LabelsFromFolders = False,
    key: Annotated[
        str | None, typer.Option(metavar="NAME", help="Array or column, where the file has several.", rich_help_panel=DATA)
    ] = None,
    alpha: Annotated[
        float, typer.Option("--alpha", metavar="X", help="Share of each sample's similarities to flag.", rich_help_panel=FINDING)
    ] = 0.01,
    pairs: Annotated[
        int, typer.Option("--pairs", metavar="K", help="Flagged pairs to list for each anchor, at most.", rich_help_panel=FINDING)
    ] = 10,
    batch_sizes: Annotated[
        str, typer.Option(metavar="N,N,…", help="Batch sizes to expect false negatives for.", rich_help_panel=FINDING)
    ] = "64,128,256,512,1024,4096",
    search: Annotated[str, typer.Option(help="exact, approximate, or auto: exact up to 200,000.", rich_help_panel=FINDING)] = "auto",
    workers: Workers = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", metavar=FLAG, help="Replace the audit in --out.", rich_help_panel=RUNNING)
    ] = False,
    debug: Debug = False,
) -> None:
    """Find the samples that would be false negatives of each other, in any embedding.

    Writes thresholds, pairs, duplicates, hubs and a page to look at; nothing is trained.
    """
    from kinfolk.auditing import audit as run_audit
    from kinfolk.auditing.gallery import features_and_images
    from kinfolk.auditing.result import WRITTEN, read_labels

    existing = [name for name in WRITTEN if (out / name).exists()]
    if existing and not overwrite:
        raise UsageError(f"{out / existing[0]} exists; give another --out, or --overwrite to replace the audit")
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out (={out}) is a file; give a folder")
    if labels_from_folders and images is None:
        raise UsageError("--labels-from-folders needs --images: the folders are those of the pictures")
    sizes = _sizes(batch_sizes)
    given: Any = None if labels is None else read_labels(labels)
    with features_and_images(features, images, labels_from_folders, workers) as material:
        found = run_audit(
            material.features,
            alpha,
            material.labels if given is None else given,
            pairs=pairs,
            key=key,
            names=material.names,
            search=search,  # type: ignore[arg-type]
            batch_sizes=sizes,
            progress=True,
        )
        _save(found, out, material.images)


def _sizes(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words):
        raise UsageError(f"--batch-sizes (={text}) must be whole numbers with commas, as in 128,256")
    return [int(word) for word in words]


def _save(found: Audit, out: Path, images: ImageData | None) -> None:
    from rich.text import Text

    from kinfolk.auditing.page import lead, tiles
    from kinfolk.cli.options import plain_table, screen
    from kinfolk.errors import printable

    found.save(out, images)
    console = screen()
    console.print(Text(printable(lead(found))), soft_wrap=False)
    table = plain_table("", "", "", right=())
    table.show_header = False
    for label, value, note in tiles(found):
        table.add_row(Text(printable(label)), Text(printable(value), "bold"), Text(printable(note), "dim"))
    console.print(table, soft_wrap=False)
    console.print(f"Page: {out / 'audit.html'}", markup=False)
    console.print(f"Pairs: {out / 'pairs.parquet'}, for `kinfolk train --method simclr+known --known-kin`", markup=False)
