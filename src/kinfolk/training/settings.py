"""Recipes, changes of method, arguments of frameworks and detectors, and what ties a checkpoint to
its run."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from kinfolk.errors import KinfolkError, UsageError, short
from kinfolk.files import file_digest
from kinfolk.frameworks import FRAMEWORKS
from kinfolk.frameworks.registry import framework_arguments, parse
from kinfolk.models.text import SENTENCE
from kinfolk.training.config import TrainConfig, suggest, validation_message

FOLDER = Path(__file__).parent / "recipes"


def recipe_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def recipe_path(recipe: str | os.PathLike[str]) -> Path:
    names, path = recipe_names(), Path(recipe)
    if recipe in names:
        return FOLDER / f"{recipe}.yaml"
    if path.is_file():
        return path
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise UsageError(f"there is no recipe file {path}")
    raise UsageError(f"unknown recipe `{recipe}`{suggest(os.fspath(recipe), names)}")


def load_recipe(recipe: str | os.PathLike[str]) -> TrainConfig:
    return TrainConfig.load(recipe_path(recipe))


def recipe_summary(recipe: str | os.PathLike[str]) -> str:
    first = recipe_path(recipe).read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip()


ANY_DETECTOR = ("start_epoch", "update_from", "stop_epoch")
"""Settings of every detector."""


def with_method(config: TrainConfig, name: str) -> tuple[TrainConfig, list[str]]:
    """Returns also the dropped settings. Settings of another framework are kept if both have them
    with the same type, such as `temperature`; of another detector those in `ANY_DETECTOR`."""
    old, new = parse(config.method), parse(name)
    document = config.model_dump(mode="json") | {"method": name}
    document["framework"] = current_names(config.framework, old.framework)
    document["detector"] = current_names(config.detector, old.detector or "")
    different = set[str]()
    if new.framework != old.framework:
        ours, theirs = framework_arguments(new), framework_arguments(old)
        for key, each in theirs.items():
            if key not in ours or ours[key].annotation != each.annotation:
                different.add(f"framework.{key}")
        if document["framework"].get("queue_size") == 0:  # no queue
            different.add("framework.queue_size")
        different |= {f"views.options.{key}" for key in FRAMEWORKS[old.framework].view_options}
    if new.detector != old.detector:
        kept = ANY_DETECTOR if new.detector is not None else ()
        different |= {f"detector.{key}" for key in document["detector"] if key not in kept}
    dropped = [key for key in flat(document) if key in different]
    for key in dropped:
        section, _, name = key.rpartition(".")
        place = document["views"]["options"] if section == "views.options" else document[section]
        del place[name]
    return TrainConfig.of(document), dropped


SHOWN = (
    *("method", "python.detector", "detector.features", "python.model", "model.name"),
    *("model.width", "model.stem", "views.size", "text.layers", "text.width", "text.context"),
    *("batch_size", "epochs", "optimizer.name", "optimizer.lr", "optimizer.lr_scaling"),
    *("trainer.accelerator", "trainer.devices", "trainer.precision"),
)


def describe_settings(config: TrainConfig) -> list[str]:
    modalities = FRAMEWORKS[parse(config.method).framework].modalities
    unused: tuple[str, ...] = () if "image" in modalities else ("views.", "model.stem")
    unused += () if "text" in modalities else ("text.",)
    if config.text.name != "transformer" or config.model.name.startswith(SENTENCE):
        unused += ("text.layers", "text.width")
    values = flat(config.model_dump(mode="json"))
    shown = [key for key in SHOWN if values.get(key) is not None and not key.startswith(unused)]
    width = max(map(len, shown))
    return [f"  {key:<{width}}  {values[key]}" for key in shown]


def check_arguments(
    target: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
    given: Mapping[str, Any],
    section: str,
    owner: str,
    written: bool = False,
) -> dict[str, Any]:
    """The arguments of a call of `target`: `given`, converted by annotation, and defaults.
    `section`, `owner`: for messages, such as "detector" and "glofnd". `written`: return the plain
    types of config.yaml, where a tuple is a list."""
    refused: Mapping[str, str] = getattr(target, "refused", {})
    given = current_names(given, owner)
    for key, value in given.items():
        if key in refused:
            raise UsageError(
                f"`{section}.{key}` (={value!r}) must be left out with {owner}: {refused[key]}"
            )
        if key not in parameters:
            raise UsageError(f"unknown key `{section}.{key}` for {owner}{suggest(key, parameters)}")
    init = inspect.getattr_static(target, "__init__") if isinstance(target, type) else target
    hints, empty = typing.get_type_hints(init), inspect.Parameter.empty
    fields: dict[str, Any] = {}
    for name, each in parameters.items():
        untyped = isinstance(each.annotation, str) or each.annotation is empty  # of a plugin
        kind = hints.get(name, Any if untyped else each.annotation)
        fields[name] = (kind, ... if each.default is empty else each.default)
    settings = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())
    try:
        model: BaseModel = create_model(section.title(), __config__=settings, **fields)(**given)
    except ValidationError as error:
        raise UsageError(validation_message(error, f"{section}.")) from None
    if written:
        return model.model_dump(mode="json")
    return {name: getattr(model, name) for name in parameters}


_ITERATIONS = {"iterations": 20, "warm_iterations": 5}
_KMEANS = {"warm_start": True, "cluster_seed": 0, "points_per_cluster": 256, **_ITERATIONS}
REMOVED: Mapping[str, Mapping[str, object]] = {
    "rcl": {"rule": "centres", "max_units": 32, "cluster_seed": 0},
    "hierarchy": {"rule": "centres", "max_units": 32},
    "pcl": _KMEANS,
    "spcl": _KMEANS,
    "ring": {"boundaries": "exact"},
    "fastclip": {"individual_lr": None},
    "ifnd": _ITERATIONS,
    "cave": _KMEANS,
    "neighbours": _KMEANS,
}
"""Settings of earlier versions that are left out where they have the value that remains."""


def current_names(given: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Arguments that an earlier version wrote, by their present names."""
    given = dict(given)
    if owner == "fnc" and "fraction" in given:
        given["alpha"] = given.get("alpha", given.pop("fraction"))
    if owner in ("simclr", "spcl") and "positive_in_denominator" in given:
        is_decoupled = not given.pop("positive_in_denominator")
        given["decoupled"] = is_decoupled or given.get("decoupled", False)
    if owner != "guide":  # it was of every detector, and never changed what is flagged
        given.pop("degrees", None)
    removed = REMOVED.get(owner, {})
    return {name: x for name, x in given.items() if name not in removed or x != removed[name]}


WITHOUT_EFFECT = (
    *("data.source", "data.exclude", "data.workers", "data.cache_dir"),
    *("knn", "checkpoint", "plugins"),
    *("trainer.accelerator", "trainer.matmul_precision", "trainer.compile"),
    *("trainer.compile_encoder", "trainer.timeout_minutes", "trainer.loggers"),
    "trainer.log_every",
)
"""Settings that do not change the result; `knn` does if the detector uses the accuracy. The data
may have been moved: the samples themselves are compared."""
CHANGEABLE = ("epochs", "model.init", "text.tokenizer", *WITHOUT_EFFECT)
PROCESSES = "trainer.devices × trainer.num_nodes"
FILES = ("detector.pairs", "detector.features")
"""Files whose content, not path, must be the same on resuming."""
ADDED = {"head.second": False, "framework.rescale_kept": False, "framework.epsilon": 1e-14}
"""Settings that earlier run folders do not have, with their defaults; they count only with another
value."""


def result_settings(config: TrainConfig, files: bool = True) -> dict[str, Any]:
    """The settings that must not change on resuming; without `files`, none is read."""
    settings = {**config.removed, **flat(config.model_dump(mode="json"))}
    devices, nodes = settings.pop("trainer.devices"), settings.pop("trainer.num_nodes")
    settings["method"] = config.method.removesuffix(":eliminate")  # the default
    settings[PROCESSES] = devices * nodes if isinstance(devices, int) else devices
    by_accuracy = "knn" in map(str, flat(config.detector).values())
    free = tuple(f"{name}." for name in CHANGEABLE if not (name == "knn" and by_accuracy))
    return {
        key: _content(value) if key in FILES else value
        for key, value in settings.items()
        if not f"{key}.".startswith(free)
        and (files or key not in FILES)
        and not (key.startswith("python.") and value is None)
        and (key not in ADDED or value != ADDED[key])
    }


def refuse_changes(stored: TrainConfig, given: TrainConfig) -> None:
    if found := _first_difference(result_settings(stored), result_settings(given)):
        key, old, new = found
        raise UsageError(
            f"`{key}` (={new}) was {old} when the run began; leave it out, or start a new run in"
            " another folder"
        )


def identity(config: TrainConfig, samples: str, num_train: int) -> dict[str, Any]:
    return {
        "samples": samples,
        "num_samples": num_train,
        "source": config.data.source,
        "settings": result_settings(config),
        "settings_digest": settings_digest(config),
    }


def settings_digest(config: TrainConfig) -> str:
    return _digest(result_settings(config, files=False))


def digests_of_stored(config: TrainConfig) -> set[str]:
    """The `settings_digest` of a stored configuration, as this version or an earlier one computed
    it: of the settings that it has, and with the defaults that were added to `ADDED` later."""
    written = {**config.removed, **flat(config.model_dump(mode="json", exclude_unset=True))}
    settings = result_settings(config, files=False)
    found = {_digest(settings)}
    settings = {key: value for key, value in settings.items() if key in written or key == PROCESSES}
    for key, default in reversed(ADDED.items()):
        found.add(_digest(settings))
        if key in written and written[key] == default:
            settings[key] = default
    return found | {_digest(settings)}


def _digest(settings: Mapping[str, Any]) -> str:
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def require_identity(
    state: Mapping[str, Any], config: TrainConfig, samples: str, num_train: int, path: Path
) -> None:
    if state["samples"] != samples:
        raise KinfolkError(
            f"the checkpoint {path} belongs to another run: it was saved for"
            f" {state['num_samples']:,} training samples of {short(str(state.get('source')))},"
            f" digest {state['samples'][:8]}; samples.parquet lists {num_train:,}, digest"
            f" {samples[:8]}. Put the run's own checkpoint back, or start a new run"
        )
    now = json.loads(json.dumps(result_settings(config)))
    before = {k: v for k, v in state["settings"].items() if k not in ADDED or v != ADDED[k]}
    if found := _first_difference(before, now):
        key, old, new = found
        raise KinfolkError(
            f"the checkpoint {path} was saved with `{key}` = {old}, and config.yaml or the options"
            f" say {new}; set it back, put the run's own checkpoint back, or start a new run"
        )


def flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"detector": {"alpha": 0.1}}` as `{"detector.alpha": 0.1}`."""
    found: dict[str, Any] = {}
    for key, value in document.items():
        name = f"{prefix}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


def _first_difference(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[str, str, str] | None:
    """A key that only `now` has is newer than the run, and may be False."""
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if old != new and (key in before or new is not False):
            return key, short(repr(old)), short(repr(new))
    return None


def _content(file: Any) -> Any:
    is_file = file is not None and Path(str(file)).is_file()
    return f"file {file_digest(Path(str(file)))}" if is_file else file
