"""What ties a checkpoint to its run, and what may differ between a run and its resumption."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kinfolk.errors import KinfolkError, UsageError
from kinfolk.foreign import shown
from kinfolk.training.config import TrainConfig

WITHOUT_EFFECT = (
    "data.source",
    "data.hierarchy",
    "data.workers",
    "data.cache_dir",
    "knn",
    "checkpoint",
    "snapshots",
    "trainer.accelerator",
    "trainer.strategy",
    "trainer.loggers",
    "trainer.log_every",
    "trainer.compile",
)
"""Settings that do not touch the result. The data may have been moved: whether they are the same samples is asked of the samples
themselves. `knn` is among them unless the detector goes by the accuracy."""

FREE = ("epochs", "model.init", "text.tokenizer", *WITHOUT_EFFECT)
"""Settings that may change when a run is resumed; docs/training.md lists them. Weights and a tokenizer to begin from are not read again.
With other `epochs` all schedules go by the new number from there on, so the result is not that of a run that had it from the start."""

PROCESSES = "trainer.devices × trainer.num_nodes"
FILES = ("detector.pairs",)
"""Files that are read again on resuming: their content counts, not their place."""


def shaping(config: TrainConfig) -> dict[str, Any]:
    """The settings that shape the result, by key; what is not among them may change on resuming."""
    settings = flat(config.model_dump(mode="json"))
    devices, nodes = settings.pop("trainer.devices"), settings.pop("trainer.num_nodes")
    settings[PROCESSES] = devices * nodes if isinstance(devices, int) else devices
    by_accuracy = "knn" in map(str, flat(config.detector).values())
    free = [name for name in FREE if not (name == "knn" and by_accuracy)]
    kept = {key: value for key, value in settings.items() if not any(key == name or key.startswith(f"{name}.") for name in free)}
    return {key: _content(value) if key in FILES else value for key, value in kept.items()}


def refuse_changes(stored: TrainConfig, given: TrainConfig) -> None:
    """Raises for the first key whose value differs from the stored one and would change the result."""
    found = _first_difference(shaping(stored), shaping(given))
    if found is not None:
        key, before, now = found
        raise UsageError(
            f"`{key}` (={_told(now)}) was {_told(before)} when the run began; a resumed run must keep its settings to end in the "
            "same result. Leave it out, or start a new run in another folder"
        )


def identity(config: TrainConfig, samples: str, num_train: int) -> dict[str, Any]:
    """What a checkpoint says of the run it belongs to. `samples`: the digest of the list of samples."""
    settings = shaping(config)
    return {
        "samples": samples,
        "num_samples": num_train,
        "source": config.data.source,
        "settings": settings,
        "settings_digest": settings_digest(settings),
    }


def settings_digest(settings: Mapping[str, Any]) -> str:
    """32 hexadecimal digits of the settings that shape the result, but for files, which may be gone once a run is finished."""
    counted = {key: value for key, value in settings.items() if key not in FILES}
    return hashlib.blake2b(json.dumps(counted, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def require_identity(state: Mapping[str, Any], config: TrainConfig, samples: str, num_train: int, path: Path) -> None:
    """Refuses a checkpoint of other samples or other settings, and names what differs.

    Args:
        state: what the checkpoint says of itself.
        config, samples, num_train: of this run: its settings, the digest and the number of its training samples.
        path: of the checkpoint.
    """
    if not {"samples", "settings", "num_samples"} <= state.keys():
        raise KinfolkError(f"the checkpoint {path} is of an older version and does not say which run it belongs to; start a new run")
    if state["samples"] != samples:
        theirs = f"{state['num_samples']:,} training samples of {shown(str(state.get('source')))}, digest {state['samples'][:8]}"
        raise KinfolkError(
            f"the checkpoint {path} belongs to another run: it was saved for {theirs}; samples.parquet lists {num_train:,}, digest "
            f"{samples[:8]}. Put the run's own checkpoint back, or start a new run"
        )
    found = _first_difference(state["settings"], json.loads(json.dumps(shaping(config))))
    if found is not None:
        key, before, now = found
        raise KinfolkError(
            f"the checkpoint {path} was saved with `{key}` = {_told(before)}, and config.yaml or the options say {_told(now)}; set it "
            "back, put the run's own checkpoint back, or start a new run"
        )


def flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"detector": {"alpha": 0.1}}` as `{"detector.alpha": 0.1}`."""
    found: dict[str, Any] = {}
    for key, value in document.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    keys = [*before, *(key for key in now if key not in before)]
    return next(((key, before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)), None)


def _content(place: Any) -> Any:
    """A digest of a file; a place where there is none stays as it is, to be refused by whoever reads it."""
    path = Path(str(place))
    if place is None or not path.is_file():
        return place
    return f"file {hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()}"


def _told(value: Any) -> str:
    return shown(repr(value))
