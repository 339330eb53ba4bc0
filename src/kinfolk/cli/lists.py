"""`kinfolk methods`, `kinfolk recipes` and `kinfolk settings`: list what can be composed, ready
configurations, and every key of the configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from kinfolk.cli.options import Debug, examples
from kinfolk.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console


ACTIONS = {
    "eliminate": "remove from the denominator (default)",
    "attract": "use as an additional positive",
    "reweight": "keep in the denominator with a weight between 0 and 1",
}
METHODS_EPILOG = examples("kinfolk methods", "kinfolk train --method sogclr+glofnd:attract …")


def methods(debug: Debug = False) -> None:
    """List frameworks, detectors, actions and recipes, and how to compose them."""
    from rich.text import Text

    from kinfolk.cli.options import screen
    from kinfolk.detectors import DETECTORS
    from kinfolk.frameworks import FRAMEWORKS
    from kinfolk.plugins import load_plugins
    from kinfolk.training.settings import recipe_names, recipe_summary

    load_plugins()
    console = screen()
    parts = ("name", "paper", "needs")
    frameworks = [(name, kind.paper, kind.needs or "nothing") for name, kind in FRAMEWORKS.items()]
    detectors = [
        (
            ", ".join((name, *(f"{name}:{variant}" for variant in kind.variants))),
            kind.paper,
            kind.needs or "nothing",
        )
        for name, kind in DETECTORS.items()
    ]
    recipes = [(name, recipe_summary(name)) for name in recipe_names()]
    _print_table(console, "Frameworks", "where anchors and candidates come from", parts, frameworks)
    _print_table(
        console, "Detectors", "which candidates are kin (false negatives)", parts, detectors
    )
    _print_table(console, "Actions", "what is done with kin", ("name", "effect"), ACTIONS.items())
    _print_table(
        console, "Recipes", "complete configurations for --recipe", ("name", "description"), recipes
    )
    grammar = "framework[+detector[:variant][:action]]"
    compose = Text(
        f"Compose: {grammar}, as in simclr, sogclr+glofnd, moco+ring:learned or"
        " simclr+oracle:attract (which is SupCon)"
    )
    compose.stylize("bold", 0, len("Compose:"))
    compose.highlight_words(
        [grammar, "simclr,", "sogclr+glofnd", "moco+ring:learned", "simclr+oracle:attract"], "cyan"
    )
    console.print(compose, soft_wrap=False)
    console.print(
        "Settings of framework and detector: --set framework.KEY=VALUE, --set detector.KEY=VALUE",
        markup=False,
        soft_wrap=False,
    )


def _print_table(
    console: Console,
    title: str,
    subtitle: str,
    columns: tuple[str, ...],
    rows: Iterable[tuple[str, ...]],
) -> None:
    from rich.text import Text

    from kinfolk.cli.options import plain_table

    table = plain_table(*columns)
    for name, *rest in rows:
        table.add_row(Text(name, "bold cyan"), *(Text(entry) for entry in rest))
    console.print(Text.assemble((title, "bold"), (f": {subtitle}", "dim")))
    console.print(table, soft_wrap=False)


RECIPES_EPILOG = examples(
    "kinfolk recipes",
    "kinfolk recipes show simclr-cpu",
    "kinfolk train --recipe simclr-cpu --data IMAGES --out runs/first",
)


def recipes(
    action: Annotated[
        str, typer.Argument(metavar="[show]", help="show: print one recipe.", show_default=False)
    ] = "list",
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Name of the recipe to print.", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """List the recipes of the library, or print one with its header.

    A recipe is a YAML file with the settings of a training. Its header names paper, command,
    hardware, time and expected result.
    """
    from kinfolk.cli.options import plain_table, screen
    from kinfolk.training.settings import recipe_names, recipe_path, recipe_summary

    if action == "show":
        if name is None:
            raise UsageError(
                "give the name of a recipe, as in `kinfolk recipes show simclr-cpu`; `kinfolk"
                " recipes` lists them"
            )
        screen().print(recipe_path(name).read_text(encoding="utf-8").rstrip(), markup=False)
        return
    if action != "list":
        raise UsageError(
            f"unknown action {action!r}; write `kinfolk recipes` or `kinfolk recipes show NAME`"
        )
    table = plain_table("recipe", "what it trains")
    for each in recipe_names():
        table.add_row(each, recipe_summary(each))
    screen().print(table)


SETTINGS_EPILOG = examples(
    "kinfolk settings", "kinfolk settings optimizer", "kinfolk settings data.cache_dir"
)


def settings(
    prefix: Annotated[
        str,
        typer.Argument(
            metavar="[PREFIX]", help="Section, key, or the beginning of one.", show_default=False
        ),
    ] = "",
    debug: Debug = False,
) -> None:
    """List every key of the configuration with its type, default and meaning.

    A key is set with `--set KEY=VALUE` of `kinfolk train`, or in a YAML file for `--config`.
    """
    from rich.padding import Padding
    from rich.text import Text

    from kinfolk.cli.options import screen
    from kinfolk.training.config import list_settings, sections

    found = list_settings(prefix)
    console = screen()
    for section, about in sections().items():
        rows = [setting for setting in found if setting.section == section]
        if rows:
            heading = Text.assemble((section or "no section", "bold"), (f": {about}", "dim"))
            console.print(heading, soft_wrap=False)
        for row in rows:
            about_value = (f"  {row.type}; default {row.default}", "dim")
            console.print(Text.assemble("  ", (row.key, "bold cyan"), about_value))
            console.print(Padding(Text(row.description), (0, 0, 0, 6)), soft_wrap=False)
