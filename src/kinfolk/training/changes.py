"""What may differ between a run and its resumption."""

from __future__ import annotations

from typing import Any

from kinfolk.errors import UsageError
from kinfolk.training.config import TrainConfig

FREE = (
    "data.source",
    "data.hierarchy",
    "data.workers",
    "data.cache_dir",
    "knn",
    "checkpoint",
    "snapshots",
    "trainer.loggers",
    "trainer.log_every",
    "trainer.compile",
)
"""Keys that do not touch the result. The data may have been moved: whether they are the same samples is asked of the samples themselves."""


def refuse_changes(stored: TrainConfig, given: TrainConfig) -> None:
    """Raises for the first key whose value differs from the stored one and would change the result."""
    before, now = flat(stored.model_dump(mode="json")), flat(given.model_dump(mode="json"))
    for key in [*before, *(key for key in now if key not in before)]:
        if before.get(key) == now.get(key) or any(key == free or key.startswith(f"{free}.") for free in FREE):
            continue
        raise UsageError(
            f"`{key}` (={now.get(key)!r}) was {before.get(key)!r} when the run began; a resumed run must keep its settings to end in the "
            "same result. Leave it out, or start a new run in another folder"
        )


def flat(document: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"detector": {"alpha": 0.1}}` as `{"detector.alpha": 0.1}`."""
    found: dict[str, Any] = {}
    for key, value in document.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
