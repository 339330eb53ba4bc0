"""Plugins: modules or .py files that register detectors and frameworks when imported, as in
`--plugin my_detector.py`. Opening a run imports those of its configuration again."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kinfolk.errors import UsageError
from kinfolk.files import first_line


def register_detector(name: str, detector: type) -> None:
    """Makes a subclass of `kinfolk.detectors.Detector` available as `framework+NAME`.

    Example:
        >>> from kinfolk.detectors import DETECTORS, FNC
        >>> class Mine(FNC): ...
        >>> register_detector("mine", Mine)
        >>> DETECTORS.pop("mine").__name__
        'Mine'
    """
    from kinfolk.detectors import DETECTORS
    from kinfolk.detectors.base import Detector

    _register(DETECTORS, name, detector, Detector)


def register_framework(name: str, framework: type) -> None:
    """Makes a subclass of `kinfolk.frameworks.Framework` available as `--method NAME`."""
    from kinfolk.frameworks import FRAMEWORKS, Framework

    _register(FRAMEWORKS, name, framework, Framework)


def load_plugins(names: Iterable[str]) -> None:
    for name in names:
        _load(name)


def _load(name: str) -> None:
    try:
        if not name.endswith(".py"):
            # the `kinfolk` command does not look into the working directory by itself
            folder = os.getcwd()
            sys.path.insert(0, folder)
            try:
                importlib.import_module(name)
            finally:
                sys.path.remove(folder)
            return
        path = Path(name).absolute()
        module_name = f"kinfolk_plugin_{path.stem}"
        if getattr(sys.modules.get(module_name), "__file__", None) == str(path):
            return
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    except Exception as error:  # the code of a plugin may raise anything
        raise UsageError(
            f"the plugin `{name}` cannot be imported: {first_line(error)}; give an importable"
            " module or a .py file"
        ) from error


def _register(registry: dict[str, Any], name: str, kind: type, base: type) -> None:
    if not (isinstance(kind, type) and issubclass(kind, base)):
        what = base.__name__
        raise UsageError(
            f"`{what.lower()}` (={kind!r}) must be a subclass of kinfolk.{what.lower()}s.{what}"
        )
    if not name.isidentifier() or name != name.lower():
        raise UsageError(f"`name` (={name!r}) must be a lower-case identifier, such as my_detector")
    if name in registry and registry[name].__module__.startswith("kinfolk."):
        raise UsageError(f"`name` (={name!r}) is already taken; choose another one")
    registry[name] = kind
