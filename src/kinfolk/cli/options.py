"""Options, tables and messages that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer.models import OptionInfo

from kinfolk.errors import UsageError, printable, short

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kinfolk.data.images import ImageData
    from kinfolk.training.load_run import OpenedRun


def screen() -> Console:
    """Long lines, such as paths, are not wrapped."""
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False)


def say(text: str, style: str = "", wrap: bool = False) -> None:
    """Prints without markup."""
    from rich.text import Text

    shown = Text("\n".join(map(printable, text.split("\n"))), style)
    screen().print(shown, soft_wrap=not wrap)


say_wrapped = functools.partial(say, wrap=True)


def require_new(path: Path, overwrite: bool, kind: str = "file") -> None:
    if path.exists() and not overwrite:
        raise UsageError(
            f"{path} exists; choose another {kind} with --out, or replace it with --overwrite"
        )


def plain_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def print_table(
    columns: tuple[str, ...],
    rows: Iterable[Sequence[str]],
    right: tuple[str, ...] = (),
    name_style: str = "",
) -> None:
    from rich.text import Text

    table = plain_table(*columns, right=right)
    for name, *rest in rows:
        table.add_row(Text(name, name_style), *map(Text, rest))
    screen().print(table, soft_wrap=False)


def read_images(
    opened: OpenedRun, data: str | None, labels_from_folders: bool, workers: int | None
) -> ImageData:
    """The data of a run, or `data`; says which images were refused."""
    from rich.console import Console

    opened.encoder()  # fails before any image is read if the run has no model
    images = opened.data(
        data, labels_from_folders=labels_from_folders, workers=workers, progress=True
    )
    if images.quarantine:
        path, reason = (short(text) for text in images.quarantine[0])
        number, total = len(images.quarantine), len(images) + len(images.quarantine)
        text = (
            f"{number:,} of {total:,} images refused, the first is {path}: {reason}; `kinfolk data`"
            " lists all of them"
        )
        Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)
    return images


DATA, TRAINING, RUNNING = "Data", "Training", "Running"
SOURCE_HELP = "Folder, .npz, .npy, .csv, .tsv, .parquet, CIFAR archive, shards (.tar), or `digits`."


def option(
    about: str, *flags: str, metavar: str | None = None, panel: str | None = None, **more: Any
) -> Any:
    """An option with a value. A default that is not the one of the parameter stands after ";
    default: "; `name_values` sets a missing metavar."""
    text, _, default = about.partition("; default: ")
    if default:
        text += f". [dim]Default: {default}[/]"
    return typer.Option(*flags, metavar=metavar, help=text, rich_help_panel=panel, **more)


def name_values(command: Callable[..., None]) -> None:
    """Sets the metavar of the options of a command by their type."""
    names: dict[Any, str] = {int: "N", float: "X", Path: "FILE", str: "NAME"}
    signature = inspect.signature(command, eval_str=True)
    command.__signature__ = signature  # type: ignore[attr-defined]
    for parameter in signature.parameters.values():
        kind, *about = get_args(parameter.annotation)
        for option_info in about:
            if isinstance(option_info, OptionInfo) and option_info.metavar is None:
                parts = [part for part in get_args(kind) if part is not type(None)] or [kind]
                option_info.metavar = names.get((get_args(parts[0]) or parts)[0])


def flag(name: str, about: str, panel: str | None = RUNNING) -> Any:
    return option(about, name, metavar="", panel=panel)


def overwrite_option(what: str) -> Any:
    return flag("--overwrite", f"Replace {what}.")


RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run folder written by `kinfolk train --out`.")
]
Data = Annotated[str, option(SOURCE_HELP, "--data", "-d", metavar="DATA", panel=DATA)]
RunsData = Annotated[
    str | None,
    option(
        f"{SOURCE_HELP[:-1]}; default: the data of the run.",
        *("--data", "-d"),
        metavar="DATA",
        panel=DATA,
    ),
]
Settings = Annotated[
    list[str] | None,
    option(
        "Any other setting, see `kinfolk settings`. Can be repeated.",
        "--set",
        metavar="KEY=VALUE",
        panel=TRAINING,
    ),
]
NoReport = Annotated[bool, flag("--no-report", "Do not write report.html.")]
Recipe = Annotated[
    str | None,
    option(
        "Start from a recipe: a name or a YAML file; see `kinfolk recipes`.",
        *("--recipe", "--config"),
        panel=TRAINING,
    ),
]
LabelsFromFolders = Annotated[
    bool,
    flag("--labels-from-folders", "Use the first folder of each file as its class.", DATA),
]
Workers = Annotated[
    int | None,
    option("Processes that decode images; default: one per core.", panel=RUNNING),
]


def with_settings(keys: Mapping[str, str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces the parameter `chosen` of a command by options for settings; it receives those that
    were given. `keys`: the key of each setting by the names of its option, such as "--method
    -m"."""
    from kinfolk.training.config import list_settings

    settings = {setting.key: setting for setting in list_settings()}
    options = dict[str, inspect.Parameter]()
    for names, key in keys.items():
        setting, flags = settings[key], names.split()
        kind = setting.type.split()[0]
        is_flag = "true or false" in setting.type
        metavar = "FILE" if key in ("data.exclude", "model.init") else "NAME"
        about, value = setting.description, setting.default.strip('"')
        if value == "null":
            about = about.replace("; null: ", "; default: ")
        elif value not in ("false", "[]", "auto"):
            about = f"{about.rstrip('.')}; default: {value}."
        described_option = option(
            about.partition("; null: ")[0].rstrip(".") + ".",
            *flags,
            metavar="" if is_flag else {"whole": "N", "number": "X"}.get(kind, metavar),
            panel={"data": DATA, "trainer": RUNNING}.get(setting.section, TRAINING),
            show_default=False,
        )
        value_type: Any = bool if is_flag else list[str] if kind == "list," else str
        options[key] = inspect.Parameter(
            flags[0].partition("/")[0].removeprefix("--").replace("-", "_"),
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[value_type | None, described_option],
        )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_options(**given: Any) -> None:
            values = {key: given.pop(each.name) for key, each in options.items()}
            chosen = {key: value for key, value in values.items() if value is not None}
            command(**given, chosen=chosen)

        signature = inspect.signature(command, eval_str=True)
        parameters = list[inspect.Parameter]()
        for each in signature.parameters.values():
            parameters += options.values() if each.name == "chosen" else [each]
        with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return with_options

    return decorate


def wrap_help(text: str) -> str:
    """The terminal wraps paragraphs. One with wide gaps is a table."""
    return "\n\n".join(
        paragraph if "   " in paragraph else paragraph.replace("\n", " ")
        for paragraph in text.split("\n\n")
    )


def examples(*commands: str) -> str:
    return "[bold]Examples[/]\n" + "\n".join(f"[dim]$[/] {command}" for command in commands)
