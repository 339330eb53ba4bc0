"""Options, tables and messages that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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


def print_table(
    columns: tuple[str, ...],
    rows: Iterable[Sequence[str]],
    right: tuple[str, ...] = (),
    name_style: str = "",
) -> None:
    """Prints rows of texts, without markup in them."""
    from rich.text import Text

    table = plain_table(*columns, right=right)
    for name, *rest in rows:
        table.add_row(Text(name, name_style), *map(Text, rest))
    screen().print(table, soft_wrap=False)


def print_refused(images: ImageData) -> None:
    """Prints one line on stderr if images could not be read, with the first of them."""
    from rich.console import Console

    from kinfolk.errors import short

    if images.quarantine:
        path, reason = (short(text) for text in images.quarantine[0])
        number, total = len(images.quarantine), len(images) + len(images.quarantine)
        text = (
            f"{number:,} of {total:,} images refused, the first is {path}: {reason}; `kinfolk data`"
            " lists all of them"
        )
        Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)


DATA, TRAINING, RUNNING = "Data", "Training", "Running"
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
NoReport = Annotated[
    bool,
    typer.Option(
        "--no-report", metavar=FLAG, help="Do not write report.html.", rich_help_panel=RUNNING
    ),
]
Recipe = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        "--config",
        help="Start from a recipe: a name or a YAML file; see `kinfolk recipes`.",
        rich_help_panel=TRAINING,
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


def overwrite_option(what: str) -> Any:
    """The option `--overwrite`, which replaces `what`."""
    return typer.Option(
        "--overwrite", metavar=FLAG, help=f"Replace {what}.", rich_help_panel=RUNNING
    )


METAVARS = {"whole": "N", "number": "X", "list,": "NAME"}
"""By the first word of the type of a setting."""


def with_settings(keys: Mapping[str, str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command that has the parameter `chosen`: in its place the command gets an option
    for each of `keys` of the configuration, with its description. It receives the values that were
    given by key, as texts or flags, which the configuration checks.

    Args:
        keys: key of the configuration by the names of the option, such as "--method -m".
    """
    from kinfolk.training.config import list_settings

    settings = {setting.key: setting for setting in list_settings()}
    options, key_of = list[inspect.Parameter](), dict[str, str]()
    for names, key in keys.items():
        setting, flags = settings[key], names.split()
        name = flags[0].partition("/")[0].removeprefix("--").replace("-", "_")
        is_flag = "true or false" in setting.type
        value = setting.default.strip('"')
        about, _, default = setting.description.partition(f"; {value}: ")
        about = about.partition("; null: ")[0]
        if not default and value not in ("false", "null", "[]"):
            default = f"{value}."
        option = typer.Option(
            *flags,
            metavar=FLAG if is_flag else METAVARS.get(setting.type.split()[0], "TEXT"),
            help=f"{about.rstrip('.')}." + (f" [dim]Default: {default}[/]" if default else ""),
            rich_help_panel={"data": DATA, "trainer": RUNNING}.get(setting.section, TRAINING),
            show_default=False,
        )
        kind = bool if is_flag else list[str] if setting.type.startswith("list") else str
        key_of[name] = key
        options.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind | None, option],
            )
        )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_options(**given: Any) -> None:
            values = {key: given.pop(name) for name, key in key_of.items()}
            chosen = {key: value for key, value in values.items() if value is not None}
            command(**given, chosen=chosen)

        signature = inspect.signature(command, eval_str=True)
        parameters = list[inspect.Parameter]()
        for parameter in signature.parameters.values():
            parameters += options if parameter.name == "chosen" else [parameter]
        with_options.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=parameters
        )
        return with_options

    return decorate


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
