"""The `framework.*` and `detector.*` keys: read off the signatures they are handed to, checked and completed."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from kinfolk.errors import UsageError
from kinfolk.training.keys import nearest, sentence


def checked_arguments(
    target: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any], section: str, owner: str
) -> dict[str, Any]:
    """`given` with types checked, texts turned into numbers where the annotation says so, and defaults filled in: what the call receives.

    Args:
        target: the class or function whose annotations are read.
        parameters: the parameters a user may set, without those that training fills in.
        given: what the user set.
        section: the name of the section, for messages: "detector".
        owner: whom it belongs to, for messages: "glofnd".
    """
    filled = _filled(target, parameters, given, section, owner)
    return {name: getattr(filled, name) for name in parameters}


def written_arguments(
    target: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any], section: str, owner: str
) -> dict[str, Any]:
    """The same in the plain types that config.yaml holds (a tuple is a list there)."""
    return _filled(target, parameters, given, section, owner).model_dump(mode="json")


def _filled(
    target: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any], section: str, owner: str
) -> BaseModel:
    for key in given:
        if key not in parameters:
            raise UsageError(f"unknown key `{section}.{key}` for {owner}{nearest(key, parameters)}")
    try:
        return _model_of(target, parameters, section)(**given)
    except ValidationError as error:
        raise UsageError(sentence(error, f"{section}.")) from None


def _model_of(target: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], section: str) -> type[BaseModel]:
    hints = typing.get_type_hints(inspect.getattr_static(target, "__init__") if isinstance(target, type) else target)
    fields: dict[str, Any] = {
        name: (hints.get(name, parameter.annotation), ... if parameter.default is inspect.Parameter.empty else parameter.default)
        for name, parameter in parameters.items()
    }
    return create_model(
        section.title(), __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=()), **fields
    )
