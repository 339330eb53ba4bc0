"""Parses method names, `framework[+detector[:variant][:action]]`, and builds frameworks and
detectors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import get_type_hints

from kinfolk.detectors import DETECTORS, StartAt, StopAt
from kinfolk.detectors.base import Detector
from kinfolk.errors import UsageError, did_you_mean, require
from kinfolk.frameworks import FRAMEWORKS, Framework
from kinfolk.pairs import ACTIONS, Action

_SET_BY_TRAINING = {  # or arguments that only objects have
    "self",
    "encoder",
    "head",
    "text_encoder",
    "text_head",
    "second_head",
    "num_samples",
    "labels",
    "keys",
    "num_classes",
    "positives",
    "detector",
    "action",
    "gather",
    "compile",
}


@dataclass(frozen=True)
class Method:
    """A parsed method name.

    Example:
        >>> parse("sogclr+glofnd")
        Method(framework='sogclr', detector='glofnd', action='eliminate', variant=None)
    """

    framework: str
    detector: str | None = None
    action: Action = "eliminate"
    variant: str | None = None

    @property
    def named_arguments(self) -> Mapping[str, Any]:
        if self.detector is None or self.variant is None:
            return {}
        return DETECTORS[self.detector].variants[self.variant]

    def __str__(self) -> str:
        if self.detector is None:
            return self.framework
        variant = "" if self.variant is None else f":{self.variant}"
        short = self.action == DETECTORS[self.detector].default_action == "eliminate"
        return f"{self.framework}+{self.detector}{variant}" + ("" if short else f":{self.action}")


@dataclass(frozen=True)
class Context:
    """What a method needs besides encoder and head."""

    num_samples: int
    labels: Tensor | None = None
    text: tuple[nn.Module, nn.Module] | None = None
    keys: Sequence[str] | None = None
    second_head: nn.Module | None = None


def parse(name: str) -> Method:
    framework, plus, rest = name.strip().lower().partition("+")
    detector, *modifiers = rest.split(":")
    if framework in DETECTORS and framework not in FRAMEWORKS:
        raise UsageError(f"{framework} is a detector; write it as in simclr+{framework}")
    framework = _require_known(framework, FRAMEWORKS, "framework", name)
    if not plus:
        return Method(framework)
    detector = _require_known(detector, DETECTORS, "detector", name)
    variants = DETECTORS[detector].variants
    variant = modifiers.pop(0) if modifiers and modifiers[0] in variants else None
    if not modifiers:
        return Method(framework, detector, DETECTORS[detector].default_action, variant)
    action = _require_known(
        ":".join(modifiers), [*ACTIONS, *(variants if variant is None else ())], "action", name
    )
    return Method(framework, detector, cast(Action, action), variant)


def stored_method(name: str) -> str:
    """The method in the config.yaml of a run, with its action: an action that is left out there is
    `eliminate`, whatever the default of the detector."""
    return name if "+" not in name or name.rpartition(":")[2] in ACTIONS else f"{name}:eliminate"


def framework_arguments(method: Method) -> dict[str, inspect.Parameter]:
    """Arguments that a user may set."""
    return _settable(FRAMEWORKS[method.framework])


_OF_ANY_DETECTOR = {
    name: inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation="int | None"
    )
    for name in ("start_epoch", "update_from", "stop_epoch")
}


def detector_arguments(
    method: Method, given: Mapping[str, Any] | None = None
) -> dict[str, inspect.Parameter]:
    """Arguments that a user may set; defaults may depend on what is `given`."""
    if method.detector is None:
        return {}
    kind = DETECTORS[method.detector]
    settable = _settable(kind)
    known = {name: value for name, value in (given or {}).items() if name in settable}
    defaults = {**kind.defaults(known), **method.named_arguments}
    found = {
        name: each.replace(default=defaults.get(name, each.default))
        for name, each in settable.items()
    }
    return {**found, **_OF_ANY_DETECTOR}


def build(
    method: Method,
    encoder: nn.Module,
    head: nn.Module,
    context: Context,
    framework_args: Mapping[str, Any] | None = None,
    detector_args: Mapping[str, Any] | None = None,
    detector: Detector | None = None,
) -> Framework:
    """Builds the framework with the detector that `method` names, or `detector`."""
    kind: Callable[..., Framework] = FRAMEWORKS[method.framework]
    if detector is None:
        detector = build_detector(method, context, detector_args or {})
    _require_guide(method, detector)
    given = _from_context(FRAMEWORKS[method.framework], context, method)
    given |= {"detector": detector, "action": method.action, **(framework_args or {})}
    return kind(encoder, head, **given)


def build_detector(
    method: Method, context: Context, arguments: Mapping[str, Any]
) -> Detector | None:
    """Builds the detector in the wrappers that its arguments ask for."""
    if method.detector is None:
        return None
    kind = DETECTORS[method.detector]
    own = {name: value for name, value in arguments.items() if name not in _OF_ANY_DETECTOR}
    make: Callable[..., Detector] = kind
    given = {**kind.defaults(own), **method.named_arguments, **own}
    detector = make(**_from_context(kind, context, method), **given)
    start, update_from, stop = map(arguments.get, _OF_ANY_DETECTOR)
    if start is not None:
        detector = StartAt(detector, epoch=start, update_from=update_from)
    elif update_from is not None:
        raise UsageError(f"`detector.update_from` (={update_from}) needs `detector.start_epoch`")
    return detector if stop is None else StopAt(detector, epoch=stop)


def _require_guide(method: Method, detector: Detector | None) -> None:
    guide = None if detector is None else detector.guide
    if guide is None or guide in FRAMEWORKS[method.framework].guides:
        return
    able = ", ".join(name for name, kind in FRAMEWORKS.items() if guide in kind.guides)
    if guide == "modality":
        what = "needs features: give --guide FILE (without features a guide works only with"
        raise UsageError(f"the guide of {method} {what} {able}, which have a second modality)")
    raise UsageError(
        f"{method} has no teacher: use +teacher with {able}, or +guide with features of any model"
    )


def _parameters(kind: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """The arguments of `kind`, and of its loss."""
    hints = get_type_hints(kind.__init__)
    parameters = dict(inspect.signature(kind.__init__).parameters)
    if (loss := getattr(kind, "loss_kind", None)) is not None and "given" in parameters:
        del parameters["given"]
        parameters = {**parameters, **inspect.signature(loss.__init__).parameters, **parameters}
        hints = {**get_type_hints(loss), **hints}
    for name, each in parameters.items():
        hint = hints.get(name, each.annotation)
        parameters[name] = each.replace(annotation=getattr(hint, "type", hint))  # of an `InitVar`
    return parameters


def _settable(kind: type[nn.Module]) -> dict[str, inspect.Parameter]:
    found = _parameters(kind).items()
    return {name: each for name, each in found if name not in _SET_BY_TRAINING}


def _from_context(kind: type[nn.Module], context: Context, method: Method) -> dict[str, Any]:
    known, parameters, labels = vars(context).copy(), _parameters(kind), context.labels
    known["text_encoder"], known["text_head"] = known.pop("text") or (None, None)
    if labels is not None:
        known["num_classes"] = len(torch.unique(labels[labels >= 0])) or None
    if "text_encoder" in parameters and context.text is None:
        raise UsageError(f"{method} needs a text encoder; `Context.text` must be given")
    if context.second_head is not None and issubclass(kind, Framework):
        able = [name for name, each in FRAMEWORKS.items() if "second_head" in _parameters(each)]
        must = f"false with {method.framework}: a second head is for {', '.join(able)}"
        require(method.framework in able, "head.second", True, must)
    return {name: value for name, value in known.items() if name in parameters}


def _require_known(name: str, names: Iterable[str], kind: str, whole: str) -> str:
    names = list(names)
    if name in names:
        return name
    hint = f"{did_you_mean(name, names, limit=2)} (there are: {', '.join(names)})"
    raise UsageError(f"unknown {kind} {name!r} in the method {whole!r}{hint}")
