"""Recipes: ready configurations. Each is a YAML file whose header says what it is for and what result to expect."""

from __future__ import annotations

import os
from pathlib import Path

from kinfolk.errors import UsageError
from kinfolk.training.config import TrainConfig, suggest

FOLDER = Path(__file__).parent / "recipes"


def recipe_names() -> list[str]:
    """The names of the recipes of the library.

    Example:
        >>> "simclr-cpu" in recipe_names()
        True
    """
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def recipe_path(recipe: str | os.PathLike[str]) -> Path:
    """The file of a recipe, by name or by the path of a YAML file."""
    named = FOLDER / f"{os.fspath(recipe)}.yaml"
    if isinstance(recipe, str) and recipe in recipe_names():
        return named
    path = Path(recipe)
    if path.is_file():
        return path
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise UsageError(f"there is no recipe file {path}; the recipes of the library are {', '.join(recipe_names())}")
    raise UsageError(f"unknown recipe `{recipe}`{suggest(os.fspath(recipe), recipe_names())}")


def load_recipe(recipe: str | os.PathLike[str]) -> TrainConfig:
    """The configuration of a recipe, with defaults for the settings that it does not name."""
    return TrainConfig.load(recipe_path(recipe))


def recipe_summary(recipe: str | os.PathLike[str]) -> str:
    """The first line of the header of a recipe."""
    first = recipe_path(recipe).read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip()
