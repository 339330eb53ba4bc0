"""Block functions through `torch.compile`, where a compiler is found."""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

LOG = logging.getLogger("kinfolk.compiling")
P = ParamSpec("P")
T = TypeVar("T")


def compiled(function: Callable[P, T], wanted: bool) -> Callable[P, T]:
    """The function itself, or its compiled form, made once for all callers."""
    return _compiled(function) if wanted and can_compile() and not torch.compiler.is_compiling() else function


@functools.cache
def _compiled(function: Callable[P, T]) -> Callable[P, T]:
    return torch.compile(function, dynamic=True)


@functools.cache
def can_compile() -> bool:
    """Whether there is a C++ compiler, which `torch.compile` needs on any device; says so once where there is none."""
    found = any(shutil.which(name) for name in ("g++", "clang++", "c++"))
    if not found:
        LOG.warning("no C++ compiler was found, so losses are not compiled; install g++ to make them faster")
    return found
