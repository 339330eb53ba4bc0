"""Runs in rows: by method and settings, one for each seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kinfolk.comparing.runs import One
from kinfolk.errors import UsageError


def rows_of(runs: Sequence[One]) -> dict[str, list[One]]:
    """Runs of one method and one configuration are a row, one for each seed; settings that tell rows of a method apart are in its name."""
    kinds: dict[str, list[list[One]]] = {}
    for run in runs:
        groups = kinds.setdefault(run.method, [])
        same = next((group for group in groups if group[0].settings == run.settings), None)
        if same is None:
            groups.append([run])
        elif (twin := next((other for other in same if other.seed == run.seed), None)) is not None:
            raise UsageError(f"{twin.path} and {run.path} are of the same method, settings and seed ({run.seed}); leave one of them out")
        else:
            same.append(run)
    frameworks = list(dict.fromkeys(method.partition("+")[0] for method in kinds))
    rows: dict[str, list[One]] = {}
    for method, groups in sorted(kinds.items(), key=lambda kind: (frameworks.index(kind[0].partition("+")[0]), _place(kind[0]))):
        apart = differing([group[0].settings for group in groups])
        for group in groups:
            text = ", ".join(f"{_short(key, apart)} {_value(group[0].settings.get(key))}" for key in apart)
            rows[f"{method} ({text})" if text else method] = sorted(group, key=lambda run: run.seed)
    return rows


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose value is not the same in all."""
    keys = dict.fromkeys(key for each in settings for key in each)
    return [key for key in keys if any(each.get(key) != settings[0].get(key) for each in settings)]


def _place(method: str) -> int:
    """A framework stands before its detectors, and the oracle after them."""
    return 0 if "+" not in method else 2 if "+oracle" in method else 1


def _short(key: str, keys: Sequence[str]) -> str:
    """The last part of a key where that is enough to know it by."""
    last = key.rpartition(".")[2]
    return last if [other.rpartition(".")[2] for other in keys].count(last) == 1 else key


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + " ".join(_value(part) for part in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool | None) else str(value)
