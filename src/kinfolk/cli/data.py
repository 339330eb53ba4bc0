"""`kinfolk data`: checks a data source without training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kinfolk.cli.options import SOURCE_HELP, Debug, LabelsFromFolders, Workers, examples

if TYPE_CHECKING:
    from kinfolk.data.images import ImageData

EPILOG = examples("kinfolk data digits", "kinfolk data photos/ --labels-from-folders --out scan/")
MAX_ROWS = 20


def data(
    source: Annotated[str, typer.Argument(metavar="SPEC", help=SOURCE_HELP, show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder for samples.parquet and quarantine.csv.", show_default=False
        ),
    ] = None,
    labels_from_folders: LabelsFromFolders = False,
    workers: Workers = None,
    debug: Debug = False,
) -> None:
    """Read every image of a source and show splits, classes, sizes and files that cannot be
    read."""
    from kinfolk.data.open_source import open_source
    from kinfolk.data.prepare import prepare, write_quarantine

    opened = open_source(source, labels_from_folders=labels_from_folders)
    found = prepare(opened, image_size=32, workers=workers, cache_dir=None, progress=True)
    _show(found)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        found.samples.to_parquet(out / "samples.parquet")
        write_quarantine(found.quarantine, out / "quarantine.csv")


def _show(found: ImageData) -> None:
    from collections import Counter

    from rich.text import Text

    from kinfolk.cli.options import plain_table, screen
    from kinfolk.data.captions import captions_of
    from kinfolk.errors import counted, shown

    console, samples = screen(), found.samples
    widths, heights = samples.widths, samples.heights
    sizes = f"{widths.min()} × {heights.min()}"
    if (widths.min(), heights.min()) != (widths.max(), heights.max()):
        sizes += f" to {widths.max()} × {heights.max()}"
    console.print(Text.assemble((counted(len(samples), "image"), "bold"), f", {sizes} pixels"))
    if samples.captions is not None and samples.group_ids is not None:
        count = sum(len(captions_of(caption)) for caption in samples.captions)
        groups = len(set(samples.group_ids.tolist()))
        found_here = f"{counted(count, 'caption')}, {counted(groups, 'group')}"
        console.print(
            f"{found_here}; samples that share an image, a caption or a group are never negatives"
        )
    table = plain_table("split", "images", "labelled", right=("images", "labelled"))
    for split, count in Counter(samples.splits).items():
        labels = samples.of(split).labels
        table.add_row(
            Text(shown(split)),
            f"{count:,}",
            "–" if labels is None else f"{int((labels >= 0).sum()):,}",
        )
    console.print(table, soft_wrap=False)
    if samples.labels is not None:
        table = plain_table("class", "images", right=("images",))
        counts = Counter(int(label) for label in samples.labels if label >= 0).most_common()
        for label, count in counts[:MAX_ROWS]:
            table.add_row(
                Text(shown(samples.classes[label]) if samples.classes else str(label)), f"{count:,}"
            )
        console.print(table, soft_wrap=False)
        _more(len(counts), "classes")
    if found.quarantine:
        table = plain_table("refused", "reason")
        for path, reason in found.quarantine[:MAX_ROWS]:
            table.add_row(Text(shown(path)), Text(shown(reason)))
        console.print(table, soft_wrap=False)
        _more(len(found.quarantine), "refused files")


def _more(count: int, what: str) -> None:
    from kinfolk.cli.options import screen

    if count > MAX_ROWS:
        screen().print(f"… and {count - MAX_ROWS:,} more {what}", style="dim")
