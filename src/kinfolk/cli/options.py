"""Where results are shown.

Options that several verbs share.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kinfolk.data.images import ImageData


def screen() -> Console:
    """The console of results. Long lines, such as paths, are not broken."""
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False)


def plain_table(*columns: str, right: tuple[str, ...] = (), title: str | None = None) -> Table:
    """A table with one rule below its head; the columns named in `right` hold numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def tell_refused(images: ImageData) -> None:
    """One line on stderr where pictures were refused, with the first of them."""
    from rich.console import Console

    from kinfolk.errors import shown

    if images.quarantine:
        path, reason = (shown(text) for text in images.quarantine[0])
        number, total = len(images.quarantine), len(images) + len(images.quarantine)
        text = f"{number:,} of {total:,} images refused, the first is {path}: {reason}; `kinfolk data` lists them all"
        Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)


DATA, RUNNING = "Data", "Running"
SOURCE_HELP = "Folder, .npz, .npy, .csv, .parquet, CIFAR archive, shards (.tar), or `digits`."
FLAG = ""
"""Metavar of an option that takes no value."""

Debug = Annotated[bool, typer.Option("--debug", metavar=FLAG, help="Show the traceback of an error.", rich_help_panel=RUNNING)]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder that `kinfolk train --out` wrote.", show_default=False)]
RunsData = Annotated[
    str | None,
    typer.Option("--data", "-d", help=f"{SOURCE_HELP} [dim]Default: the run's own.[/]", rich_help_panel=DATA, show_default=False),
]
LabelsFromFolders = Annotated[
    bool, typer.Option("--labels-from-folders", metavar=FLAG, help="Take the first folder of each file as its class.", rich_help_panel=DATA)
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        help="Processes that decode pictures. [dim]Default: one per core.[/]",
        rich_help_panel=RUNNING,
        show_default=False,
    ),
]


def examples(*commands: str) -> str:
    """The end of a help text: each command on a line of its own."""
    return "[bold]Examples[/]\n" + "\n".join(f"[dim]$[/] {command}" for command in commands)
