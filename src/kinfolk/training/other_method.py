"""A recipe with another method than its own: the baseline of a method, or its rival, at the same settings."""

from __future__ import annotations

from kinfolk.frameworks import FRAMEWORKS
from kinfolk.frameworks.method import framework_arguments, parse
from kinfolk.training.changes import flat
from kinfolk.training.config import TrainConfig

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
