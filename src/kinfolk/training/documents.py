"""YAML files and the metrics.jsonl of a run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from kinfolk.errors import UsageError
from kinfolk.files import first_line

LARGEST_FILE = 1 << 20
LARGEST_DOCUMENT = 100_000
"""Nodes of a document with all aliases expanded: a few lines of nested aliases make billions."""


def parse_yaml(text: str) -> Any:
    """The value of a YAML document. One that is too large or too deep raises `yaml.YAMLError`."""
    if len(text) > LARGEST_FILE:
        raise yaml.YAMLError(f"it has {len(text):,} characters, more than {LARGEST_FILE:,}")
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _num_values(node, {}) > LARGEST_DOCUMENT:
            raise yaml.YAMLError(f"it has more than {LARGEST_DOCUMENT:,} values")
        return loader.construct_document(node)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ValueError, OverflowError) as error:  # an invalid date
        raise yaml.YAMLError(first_line(error)) from None
    finally:
        loader.dispose()


def _num_values(node: yaml.Node, known: dict[int, int]) -> int:
    if id(node) not in known:
        known[id(node)] = LARGEST_DOCUMENT + 1  # a node that contains itself is infinite
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in parts for part in pair]
        total = 1 + sum(_num_values(part, known) for part in parts)
        known[id(node)] = min(LARGEST_DOCUMENT + 1, total)
    return known[id(node)]


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
        raise UsageError(
            f"{path} must contain a mapping of settings, not {type(document).__name__}"
        )
    return document


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The lines of a metrics.jsonl, and the numbers (from 1) of lines that are torn or are not an
    entry of an epoch."""
    rows, torn = [], []
    for number, line in enumerate(path.read_bytes().split(b"\n") if path.is_file() else (), 1):
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
    which = ", ".join(map(str, torn[:5])) + (" …" if len(torn) > 5 else "")
    return f"{path} has torn lines, which are left out: {which}"


def row_warnings(row: Mapping[str, float]) -> dict[str, str]:
    """What is wrong by the metrics of an epoch, by the metric that shows it."""
    found, where = {}, f"in epoch {int(row.get('epoch', 0))}"
    if row.get("clustered", 1) < 0.01:
        found["clustered"] = (
            f"the hierarchy is empty {where}: {row['clustered']:.1%} of the samples share a cluster"
            " with another; choose larger `radii` or a lower `merge_similarity`, or leave both out"
        )
    if row.get("with_key", 1) < 0.5:
        found["with_key"] = (
            f"{1 - row['with_key']:.0%} of the anchors had no retrieved key {where} and were"
            " contrasted with their other view alone; larger clusters (`radii`) or a larger queue"
            " give more of them a key"
        )
    # an untrained predictor is at 0 but for the third digit
    if round(row.get("tp_similarity", 0), 2) < 0:
        found["tp_similarity"] = (
            f"the similarity of anchors and their positives is {row['tp_similarity']:.2f} {where},"
            " below 0: embeddings share a direction that positives are pushed away from; use a"
            " head with `head.last_norm=true`, or fewer keys"
        )
    return found


def first_warnings(rows: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """The first warning about each metric over all epochs."""
    return {name: message for row in reversed(rows) for name, message in row_warnings(row).items()}
