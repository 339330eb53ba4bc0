"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
