"""Results on disk: one `RUN/eval/PROTOCOL.json` for each protocol, written whole or not at all."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kinfolk.errors import KinfolkError
from kinfolk.files import write_text

FOLDER = "eval"


def write_result(run: Path | str, protocol: str, result: Mapping[str, Any]) -> Path:
    """Writes `{"protocol": …, **result}` to `RUN/eval/PROTOCOL.json`, over an older one; numbers that are not finite become null."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", protocol):
        raise ValueError(f"`protocol` (={protocol!r}) must be lower-case letters, digits, - and _")
    folder = Path(run) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{protocol}.json"
    text = json.dumps(_plain({"protocol": protocol, **result}), indent=2, allow_nan=False)
    write_text(path, text + "\n")
    return path


def read_results(run: Path | str) -> dict[str, dict[str, Any]]:
    """All results of a run by protocol, in alphabetical order; empty where nothing has been evaluated."""
    results = {}
    for path in sorted((Path(run) / FOLDER).glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise KinfolkError(f"{path} is not valid JSON ({error}); evaluate again or remove it.") from error
        if not isinstance(result, dict):
            raise KinfolkError(f"{path} holds no result; evaluate again or remove it.")
        results[path.stem] = result
    return results


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it: numpy and torch numbers as numbers, keys as text, what is not finite as None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and hasattr(value, "ndim"):
        return _plain(value.item() if value.ndim == 0 else value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
