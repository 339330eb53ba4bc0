"""Reading YAML files and metrics.jsonl of a run folder, with limits on their size and one-sentence errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from kinfolk.errors import UsageError
from kinfolk.files import first_line

LARGEST_FILE = 1 << 20
LARGEST_DOCUMENT = 100_000
"""Largest number of nodes of a document with all aliases expanded: a few lines of nested aliases could make billions."""


def parse_yaml(text: str) -> Any:
    """The value of a YAML document. Raises `yaml.YAMLError`, also if it is too large or nested too deeply."""
    if len(text) > LARGEST_FILE:
        raise yaml.YAMLError(f"it has {len(text):,} characters, more than {LARGEST_FILE:,}")
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            if _size(node, {}) > LARGEST_DOCUMENT:
                raise yaml.YAMLError(f"it has more than {LARGEST_DOCUMENT:,} values, with its aliases expanded")
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except (RecursionError, ValueError, OverflowError) as error:  # ValueError: an invalid date
        raise yaml.YAMLError("it is nested too deeply" if isinstance(error, RecursionError) else first_line(error)) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping."""
    try:
        with open(path, encoding="utf-8") as file:
            document = parse_yaml(file.read(LARGEST_FILE + 1)) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(document, dict):
        raise UsageError(f"{path} must contain a mapping of settings, not {type(document).__name__}")
    return document


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The lines of a metrics.jsonl, and the numbers (from 1) of lines that are torn or are not an entry of an epoch."""
    if not path.is_file():
        return [], []
    rows, torn = [], []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and isinstance(row.get("epoch"), int):
            rows.append(row)
        else:
            torn.append(number)
    return rows, torn


def describe_torn_lines(path: Path, torn: list[int]) -> str:
    """The message about lines that could not be read."""
    which = ", ".join(map(str, torn[:5])) + (" …" if len(torn) > 5 else "")
    return f"{path} has torn lines, which are left out: {which}"


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Number of values of a node with its aliases expanded; counted once per node."""
    if id(node) not in known:
        known[id(node)] = LARGEST_DOCUMENT + 1  # a node that contains itself is infinite
        parts = node.value if isinstance(node, yaml.SequenceNode) else []
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else parts
        known[id(node)] = min(LARGEST_DOCUMENT + 1, 1 + sum(_size(part, known) for part in parts))
    return known[id(node)]
