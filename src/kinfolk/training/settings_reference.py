"""The reference of all settings, from the fields of the configuration: for `kinfolk settings` and
for docs/settings.md, which `docs/generate.py` writes."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kinfolk.errors import UsageError
from kinfolk.training.config import TrainConfig, suggest

TYPES: dict[type, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    dict: "mapping",
}
TYPES[type(None)] = "null"
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclass(frozen=True)
class Setting:
    """A key of the configuration.

    Args:
        key: as in `--set KEY=VALUE`.
        type: in words, with the bounds of a number.
        default: as it is written in YAML.
        description: one sentence.
    """

    key: str
    type: str
    default: str
    description: str

    @property
    def section(self) -> str:
        """The part of the key before its last dot; empty for a key of no section."""
        return self.key.rpartition(".")[0]


def list_settings(prefix: str = "") -> list[Setting]:
    """All settings whose key is `prefix`, is in the section `prefix`, or begins with it.

    Example:
        >>> [setting.key for setting in list_settings("checkpoint.every")]
        ['checkpoint.every_epochs', 'checkpoint.every_minutes']
        >>> list_settings("seed")[0].type
        'whole number'
    """
    every = list(_settings(TrainConfig, ""))
    found = [setting for setting in every if setting.key.startswith(prefix)]
    if not found:
        names = [*dict.fromkeys(filter(None, (each.section for each in every)))]
        names += [each.key for each in every]
        raise UsageError(f"there is no setting `{prefix}`{suggest(prefix, names[:18], names)}")
    return found


def sections() -> dict[str, str]:
    """The sections with the first sentence of their docstring; the settings of none come first."""
    fields = TrainConfig.model_fields.items()
    inner = {name: field.annotation for name, field in fields if _is_section(field.annotation)}
    return {"": "The method and the length of the training."} | {
        name: " ".join((kind.__doc__ or "").split()) for name, kind in inner.items()
    }


def _settings(model: type[BaseModel], prefix: str) -> Iterator[Setting]:
    fields = model.model_fields.items()
    for name, field in sorted(fields, key=lambda item: _is_section(item[1].annotation)):
        if _is_section(field.annotation):
            assert isinstance(field.annotation, type)
            yield from _settings(field.annotation, f"{prefix}{name}.")
        else:
            kind = type_words(field.annotation) + _bounds(field)
            default = json.dumps(_plain(field.get_default(call_default_factory=True)))
            yield Setting(f"{prefix}{name}", kind, default, field.description or "")


def _is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def type_words(kind: Any) -> str:
    """A type in words.

    Example:
        >>> type_words(int | None)
        'whole number or null'
        >>> type_words(Literal["a", "b"])
        'a or b'
    """
    *others, last = _choices(kind)
    return f"{', '.join(others)} or {last}" if others else last


def _choices(kind: Any) -> list[str]:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return [str(part) for part in parts]
    if origin in (typing.Union, types.UnionType):
        return [choice for part in parts for choice in _choices(part)]
    if origin is tuple:
        number = "list" if parts[-1] is Ellipsis else f"{len(parts)} values"
        return [f"{number}, each {type_words(parts[0])}"]
    return [TYPES.get(origin or kind, getattr(kind, "__name__", str(kind)))]


def _bounds(field: FieldInfo) -> str:
    found = [
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in BOUNDS.items()
        if getattr(rule, name, None) is not None
    ]
    return f", {' and '.join(found)}" if found else ""


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
