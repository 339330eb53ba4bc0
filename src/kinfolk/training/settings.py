"""What ties a checkpoint to its run, and what may differ between a run and its resumption.

The `framework.*` and `detector.*` keys: read off the signatures they are handed to, checked and completed.

A recipe with another method than its own: the baseline of a method, or its rival, at the same settings.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from kinfolk.errors import KinfolkError, UsageError, shown
from kinfolk.frameworks import FRAMEWORKS
from kinfolk.frameworks.registry import framework_arguments, parse
from kinfolk.training.config import TrainConfig, nearest, sentence

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


ANY_DETECTOR = ("start_epoch", "update_from")
"""Settings of every detector: when it starts."""


def with_method(config: TrainConfig, name: str) -> tuple[TrainConfig, list[str]]:
    """The configuration with the method `name`, and the settings that were dropped as parts of what the method replaces.

    Of another framework's settings those are kept that both frameworks have with the same type, such as `temperature`; of another
    detector's those that say when it starts. A method with the same framework and detector keeps everything.

    Example:
        >>> config = TrainConfig.of({"method": "moco+ifnd", "framework": {"queue_size": 9}, "detector": {"every": 2, "start_epoch": 5}})
        >>> with_method(config, "moco")[1]
        ['detector.every', 'detector.start_epoch']
        >>> with_method(config, "simclr+fnc")[1]
        ['framework.queue_size', 'detector.every']
    """
    old, new = parse(config.method), parse(name)
    framework, detector, options = config.framework, config.detector, config.views.options
    if new.framework != old.framework:
        before, after = framework_arguments(old), framework_arguments(new)
        same = [key for key in framework if key not in before or (key in after and after[key].annotation == before[key].annotation)]
        framework = {key: framework[key] for key in same if (key, framework[key]) != ("queue_size", 0)}  # none: says nothing of another's
        needed = FRAMEWORKS[old.framework].view_options
        options = {key: value for key, value in options.items() if key not in needed}
    if new.detector != old.detector:
        detector = {key: value for key, value in detector.items() if key in ANY_DETECTOR and new.detector is not None}
    document = config.model_dump(mode="json") | {"method": name, "framework": framework, "detector": detector}
    document["views"] |= {"options": options}
    kept = flat({"framework": framework, "detector": detector, "views": {"options": options}})
    had = flat({"framework": config.framework, "detector": config.detector, "views": {"options": config.views.options}})
    return TrainConfig.of(document), [key for key in had if key not in kept]
