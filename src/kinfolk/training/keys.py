"""Names of settings: reading `a.b=c`, refusing unknown keys with the nearest ones, and turning a pydantic error into a sentence."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from kinfolk.errors import UsageError
from kinfolk.training.documents import parse_yaml


def parse_settings(settings: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """`["optimizer.lr=0.1"]` → `{"optimizer.lr": 0.1}`; values are YAML, so lists, true and null work."""
    if isinstance(settings, Mapping):
        return dict(settings)
    if isinstance(settings, str):
        settings = [settings]
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"a setting must have the form KEY=VALUE, as in optimizer.lr=0.1; received {setting!r}")
        try:
            parsed[key.strip()] = _number(parse_yaml(text))
        except yaml.YAMLError:
            raise UsageError(f"the value of `{key.strip()}` cannot be read: {text!r}; quote it if it holds special characters") from None
    return parsed


def _number(value: Any) -> Any:
    """YAML 1.1 takes 1e-3 for a text."""
    if not isinstance(value, str) or not value[:1].isdigit():
        return value
    try:
        return float(value)
    except ValueError:
        return value


def nearest(name: str, valid: Iterable[str], also: Iterable[str] = ()) -> str:
    """The end of a sentence about an unknown name: the nearest of `valid` and `also`, and all that are valid."""
    valid = list(valid)
    close = difflib.get_close_matches(name, [*valid, *also], n=3, cutoff=0.5)
    close += [other for other in also if other.split(".")[-1] == name and other not in close]
    hint = f"; did you mean {' or '.join(f'`{match}`' for match in close)}?" if close else "."
    return f"{hint} Valid: {', '.join(valid) if valid else 'none'}"


def refuse_unknown(document: Mapping[str, Any], model: type[BaseModel], where: str, prefix: str = "") -> None:
    """Raises for the first key that `model` or one of its sections does not have."""
    fields = model.model_fields
    for key, value in document.items():
        if key not in fields:
            raise UsageError(f"unknown key `{prefix}{key}` in {where}{nearest(str(key), fields, _inner_keys(model))}")
        section = fields[key].annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            if not isinstance(value, Mapping):
                raise UsageError(f"`{prefix}{key}` (={value!r}) is a section with the keys {', '.join(section.model_fields)}")
            refuse_unknown(value, section, where, f"{prefix}{key}.")


def refuse_not_finite(document: Mapping[str, Any], prefix: str = "") -> None:
    """Raises for a number that is not finite, in any section: a dump as JSON would turn it into null, and messages would say so."""
    for key, value in document.items():
        if isinstance(value, Mapping):
            refuse_not_finite(value, f"{prefix}{key}.")
        elif any(isinstance(each, float) and not math.isfinite(each) for each in (value if isinstance(value, list | tuple) else (value,))):
            raise UsageError(f"`{prefix}{key}` (={value}) must be a finite number")


def sentence(error: ValidationError, prefix: str = "") -> str:
    """The first fault of a validation in the house's form: "`optimizer.lr` (=-1) must be greater than 0"."""
    fault = error.errors(include_url=False)[0]
    place = prefix + ".".join(str(part) for part in fault["loc"] if part not in ("int", "float") and not str(part).startswith("literal"))
    if fault["type"] == "missing":
        return f"`{place}` is required and was not given; set it with `{place}=VALUE`"
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return (
        f"`{place}` (={fault['input']!r}) must be {message}"
        if "Input should be" in fault["msg"]
        else f"`{place}` (={fault['input']!r}): {message}"
    )


def _inner_keys(model: type[BaseModel]) -> list[str]:
    """`section.key` of all sections, so that a key given without its section finds its place."""
    sections = ((name, field.annotation) for name, field in model.model_fields.items())
    return [
        f"{name}.{key}"
        for name, section in sections
        if isinstance(section, type) and issubclass(section, BaseModel)
        for key in section.model_fields
    ]
