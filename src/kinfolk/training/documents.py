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


class _Loader(yaml.SafeLoader):
    """Without aliases, which may expand to billions of values."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not supported")
        return super().compose_node(parent, index)


def parse_yaml(text: str) -> Any:
    """Raises `yaml.YAMLError` also for a document that is too large or too deep."""
    if len(text) > LARGEST_FILE:
        raise yaml.YAMLError(f"it has {len(text):,} characters, more than {LARGEST_FILE:,}")
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ValueError, OverflowError) as error:  # an invalid date
        raise yaml.YAMLError(first_line(error)) from None


def read_yaml(path: Path) -> dict[str, Any]:
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
    """The lines of a metrics.jsonl, and the numbers (from 1) of torn ones."""
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
    return f"{path} has incomplete lines, which are left out: {which}"


def row_warnings(row: Mapping[str, float]) -> dict[str, str]:
    found, where = {}, f"in epoch {int(row.get('epoch', 0))}"
    if row.get("clustered", 1) < 0.01:
        found["clustered"] = (
            f"the hierarchy is empty {where}: {row['clustered']:.1%} of the samples share a"
            " cluster; choose larger `radii` or a lower `merge_similarity`"
        )
    if row.get("with_key", 1) < 0.5:
        found["with_key"] = (
            f"{1 - row['with_key']:.0%} of the anchors had no retrieved key {where}; choose larger"
            " clusters (`radii`) or a larger queue"
        )
    # an untrained predictor is at 0 but for the third digit
    if round(row.get("tp_similarity", 0), 2) < 0:
        found["tp_similarity"] = (
            f"the similarity of anchors and their positives is {row['tp_similarity']:.2f} {where},"
            " below 0; "
            + (
                "use a head with `head.last_norm=true`, or fewer keys"
                if "with_key" in row
                else "the encoder has learned nothing so far"
            )
        )
    return found


def first_warnings(rows: Sequence[Mapping[str, float]]) -> dict[str, str]:
    return {name: message for row in reversed(rows) for name, message in row_warnings(row).items()}
