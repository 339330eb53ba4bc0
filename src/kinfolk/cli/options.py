"""Options, tables and messages that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kinfolk.data.images import ImageData


def screen() -> Console:
    """The console for results on stdout. Long lines, such as paths, are not wrapped."""
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False)


def plain_table(*columns: str, right: tuple[str, ...] = (), title: str | None = None) -> Table:
    """A table with one rule below its header. Columns in `right` are right-aligned."""
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        header_style="dim",
    )
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def print_refused(images: ImageData) -> None:
    """Prints one line on stderr if images could not be read, with the first of them."""
    from rich.console import Console

    from kinfolk.errors import shown

    if images.quarantine:
        path, reason = (shown(text) for text in images.quarantine[0])
        number, total = len(images.quarantine), len(images) + len(images.quarantine)
        text = (
            f"{number:,} of {total:,} images refused, the first is {path}: {reason}; `kinfolk data`"
            " lists all of them"
        )
        Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)


DATA, RUNNING = "Data", "Running"
SOURCE_HELP = "Folder, .npz, .npy, .csv, .tsv, .parquet, CIFAR archive, shards (.tar), or `digits`."
FLAG = ""
"""Metavar of options that take no value."""

Debug = Annotated[
    bool,
    typer.Option(
        "--debug", metavar=FLAG, help="Show the traceback of an error.", rich_help_panel=RUNNING
    ),
]
RunFolder = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="Run folder written by `kinfolk train --out`.", show_default=False
    ),
]
RunsData = Annotated[
    str | None,
    typer.Option(
        "--data",
        "-d",
        help=f"{SOURCE_HELP} [dim]Default: the data of the run.[/]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
LabelsFromFolders = Annotated[
    bool,
    typer.Option(
        "--labels-from-folders",
        metavar=FLAG,
        help="Use the first folder of each file as its class.",
        rich_help_panel=DATA,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        help="Processes that decode images. [dim]Default: one per core.[/]",
        rich_help_panel=RUNNING,
        show_default=False,
    ),
]


def flowing(text: str) -> str:
    r"""A help text whose paragraphs are wrapped by the terminal. A paragraph with wide gaps is a
    table and keeps its lines.

    Example:
        >>> flowing("One\ntwo.\n\na    table\nb    row")
        'One two.\n\na    table\nb    row'
    """
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        paragraph if "   " in paragraph else " ".join(paragraph.split("\n"))
        for paragraph in paragraphs
    )


def examples(*commands: str) -> str:
    """The examples at the end of a help text, one command per line."""
    return "[bold]Examples[/]\n" + "\n".join(f"[dim]$[/] {command}" for command in commands)
