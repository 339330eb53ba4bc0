"""Writes what the documents say of the program itself: settings.md, and the lists of detectors in
README.md, methods.md, api.md and mkdocs.yml, from the registry of detectors and their pages.

Run: python docs/generate.py, or make format. A list stands between two comments `detectors:`.
"""

from __future__ import annotations

import re
from pathlib import Path

from kinfolk.detectors import DETECTORS
from kinfolk.training.config import list_settings, sections
from kinfolk.training.settings import recipe_names

ROOT = Path(__file__).parents[1]
INTRODUCTION = """# Settings

Every key of the configuration, from the source. `kinfolk settings` prints the same list, and
`kinfolk settings optimizer` one section. A key is set with `--set optimizer.lr=0.1`, with
`settings={"optimizer.lr": 0.1}` in Python, or in a YAML file (`--config FILE`) under its section.
[Training](training.md#settings) explains the most important ones. The keys of `framework` and
`detector` are the arguments of the classes on the pages of the [methods](methods.md), those of
`views.options` are on the page [Data](data.md#views).
"""


def settings_page() -> str:
    """The text of docs/settings.md."""
    every = list_settings()
    parts = [INTRODUCTION]
    for section, about in sections().items():
        rows = [setting for setting in every if setting.section == section]
        lines = [f"## {section or 'No section'}", "", about, ""]
        lines += ["| key | type | default | what it does |", "|---|---|---|---|"]
        lines += [
            f"| `{row.key}` | {row.type} | `{row.default}` | {row.description} |" for row in rows
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def table_row(name: str) -> str:
    """The row of a detector in docs/methods.md."""
    kind = DETECTORS[name]
    recipes = [f"`{recipe}`" for recipe in recipe_names() if name in recipe.split("-")[1:]]
    used = ", ".join(sorted(recipes)) or "—"
    return (
        f"| `+{name}` | {kind.paper} | `kf.{kind.__name__}` | {kind.needs} | {used} |"
        f" [{name}](methods/{name}.md) |"
    )


def readme_row(name: str) -> str:
    """The row of a detector in the README: the first sentence of its docstring."""
    text = " ".join((DETECTORS[name].__doc__ or "").split())
    return (
        f"| [`{name}`](docs/methods/{name}.md) | {text.split('. ')[0].rstrip('.')} |"
        f" {DETECTORS[name].paper} |"
    )


def lists() -> dict[str, list[str]]:
    """The generated lines of each file."""
    names = [name for name, kind in DETECTORS.items() if kind.__module__.startswith("kinfolk.")]
    return {
        "README.md": [readme_row(name) for name in names],
        "docs/methods.md": [table_row(name) for name in names],
        "docs/api.md": [
            f"::: {DETECTORS[name].__module__}.{DETECTORS[name].__name__}" for name in names
        ],
        "mkdocs.yml": [f"          - {name}: methods/{name}.md" for name in names],
    }


def generated() -> dict[str, str]:
    """The text of every file that has a generated part, by its path."""
    found = {"docs/settings.md": settings_page()}
    for name, lines in lists().items():
        text = (ROOT / name).read_text(encoding="utf-8")
        pattern = re.compile(
            r"(?P<start>[^\n]*detectors: generated[^\n]*\n(?:\n?\|[^\n]*\n\|[-|"
            r" ]+\n)?).*?(?P<end>[^\n]*detectors: end)",
            re.S,
        )
        found[name] = pattern.sub(
            lambda m, lines=lines: f"{m['start']}" + "\n".join(lines) + f"\n{m['end']}", text
        )
    return found


if __name__ == "__main__":
    for path, content in generated().items():
        (ROOT / path).write_text(content, encoding="utf-8")
