"""`kinfolk recipes`: lists the recipes of the library, or prints one."""

from __future__ import annotations

from typing import Annotated

import typer

from kinfolk.cli.options import Debug, examples
from kinfolk.errors import UsageError

EPILOG = examples("kinfolk recipes", "kinfolk recipes show simclr-cpu", "kinfolk train --recipe simclr-cpu --data IMAGES --out runs/first")


def recipes(
    action: Annotated[str, typer.Argument(metavar="[show]", help="show: print one recipe.", show_default=False)] = "list",
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Name of the recipe to print.", show_default=False)] = None,
    debug: Debug = False,
) -> None:
    """List the recipes of the library, or print one with its header.

    A recipe is a YAML file with the settings of a training. Its header names paper, command, hardware, time and expected result.
    """
    from kinfolk.cli.options import plain_table, screen
    from kinfolk.training.recipes import recipe_names, recipe_path, recipe_summary

    if action == "show":
        if name is None:
            raise UsageError("give the name of a recipe, as in `kinfolk recipes show simclr-cpu`; `kinfolk recipes` lists them")
        screen().print(recipe_path(name).read_text(encoding="utf-8").rstrip(), markup=False)
        return
    if action != "list":
        raise UsageError(f"unknown action {action!r}; write `kinfolk recipes` or `kinfolk recipes show NAME`")
    table = plain_table("recipe", "what it trains")
    for each in recipe_names():
        table.add_row(each, recipe_summary(each))
    screen().print(table)
