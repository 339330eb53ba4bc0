"""Parses method names, `framework[+detector[:variant][:action]]`, and builds frameworks and
detectors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import get_type_hints

from kinfolk.detectors import DETECTORS, Graded, StartAt, StopAt
from kinfolk.detectors.base import Detector
from kinfolk.errors import UsageError, did_you_mean
from kinfolk.frameworks import FRAMEWORKS, Framework
from kinfolk.kinship import ACTIONS, Action
from kinfolk.objectives import NTXentLoss

_SET_BY_TRAINING = {
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
    "similarities",
    "positives",
    "detector",
    "action",
}
"""Arguments that the training passes or that only objects have. All others can be set by the
user."""


@dataclass(frozen=True)
class Method:
    """A parsed method name.

    Example:
        >>> parse("sogclr+glofnd")
        Method(framework='sogclr', detector='glofnd', action='eliminate', variant=None)
        >>> str(parse("simclr+oracle:attract"))
        'simclr+oracle:attract'
    """

    framework: str
    detector: str | None = None
    action: Action = "eliminate"
    variant: str | None = None

    @property
    def named_arguments(self) -> Mapping[str, Any]:
        """Arguments that the variant stands for."""
        return (
            {}
            if self.detector is None or self.variant is None
            else DETECTORS[self.detector].variants[self.variant]
        )

    def __str__(self) -> str:
        if self.detector is None:
            return self.framework
        variant = "" if self.variant is None else f":{self.variant}"
        return f"{self.framework}+{self.detector}{variant}" + (
            ""
            if self.action == DETECTORS[self.detector].default_action == "eliminate"
            else f":{self.action}"
        )


@dataclass(frozen=True)
class Context:
    """What a method needs besides encoder and head."""

    num_samples: int
    labels: Tensor | None = None
    text: tuple[nn.Module, nn.Module] | None = None
    keys: Sequence[str] | None = None
    second_head: nn.Module | None = None


def parse(name: str) -> Method:
    """An unknown part is an error that suggests similar names."""
    framework, plus, rest = name.strip().lower().partition("+")
    detector, *modifiers = rest.split(":")
    if framework in DETECTORS and framework not in FRAMEWORKS:
        raise UsageError(
            f"{framework} is a detector; write it after a framework, as in simclr+{framework}"
        )
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
    """The method in the config.yaml of a run, with its action. Runs have never left out another
    action than `eliminate`, also before the default of a detector was another one.

    Example:
        >>> stored_method("simclr+guide"), stored_method("simclr")
        ('simclr+guide:eliminate', 'simclr')
    """
    return name if "+" not in name or name.rpartition(":")[2] in ACTIONS else f"{name}:eliminate"


def framework_arguments(method: Method) -> dict[str, inspect.Parameter]:
    """Arguments of the framework that a user may set."""
    return _settable(FRAMEWORKS[method.framework])


def detector_arguments(
    method: Method, given: Mapping[str, Any] | None = None
) -> dict[str, inspect.Parameter]:
    """Arguments of the detector that a user may set, with its defaults next to what is `given`, its
    start epochs, and `degrees`."""
    if method.detector is None:
        return {}
    start = {
        name: inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation="int | None"
        )
        for name in ("start_epoch", "update_from", "stop_epoch")
    }
    start["degrees"] = inspect.Parameter(
        "degrees", inspect.Parameter.KEYWORD_ONLY, default=False, annotation="bool"
    )
    kind = DETECTORS[method.detector]
    settable = _settable(kind)
    usual = kind.defaults(
        {name: value for name, value in (given or {}).items() if name in settable}
    )
    usual = {**usual, **method.named_arguments}
    own = {name: p.replace(default=usual.get(name, p.default)) for name, p in settable.items()}
    return {**own, **start}


def build(
    method: Method,
    encoder: nn.Module,
    head: nn.Module,
    context: Context,
    framework_args: Mapping[str, Any] | None = None,
    detector_args: Mapping[str, Any] | None = None,
    detector: Detector | None = None,
) -> Framework:
    """Builds the framework with its objective and the detector that `method` names, or
    `detector`."""
    kind: Callable[..., Framework] = FRAMEWORKS[method.framework]
    detector = (
        build_detector(method, context, detector_args or {}) if detector is None else detector
    )
    _require_guide(method, detector)
    given = _from_context(FRAMEWORKS[method.framework], context, method)
    return kind(
        encoder, head, detector=detector, action=method.action, **given, **(framework_args or {})
    )


def build_detector(
    method: Method, context: Context, arguments: Mapping[str, Any]
) -> Detector | None:
    """Builds the detector of the method, wrapped in `Graded`, `StartAt` and `StopAt` as its
    arguments ask."""
    if method.detector is None:
        return None
    kind = DETECTORS[method.detector]
    own = {
        name: value
        for name, value in arguments.items()
        if name not in ("start_epoch", "update_from", "stop_epoch", "degrees")
    }
    make: Callable[..., Detector] = kind
    detector = make(
        **_from_context(kind, context, method),
        **{**kind.defaults(own), **method.named_arguments, **own},
    )
    detector = Graded(detector) if arguments.get("degrees") else detector
    start, update_from, stop = (
        arguments.get(name) for name in ("start_epoch", "update_from", "stop_epoch")
    )
    if start is not None:
        detector = StartAt(detector, epoch=start, update_from=update_from)
    elif update_from is not None:
        raise UsageError(
            f"`detector.update_from` (={update_from}) needs `detector.start_epoch`, the epoch from"
            " which kin are masked"
        )
    return detector if stop is None else StopAt(detector, epoch=stop)


def _require_guide(method: Method, detector: Detector | None) -> None:
    """Refuses a detector that needs embeddings which the framework does not have."""
    reads = None if detector is None else detector.guide
    if reads is None or reads in FRAMEWORKS[method.framework].guides:
        return
    able = ", ".join(name for name, kind in FRAMEWORKS.items() if reads in kind.guides)
    reasons = {
        "modality": (
            f"the guide of {method} needs features (--guide FILE; only {able} have a second"
            " modality that can guide without)"
        ),
        "teacher": (
            f"{method} has no teacher: use +teacher with {able}, or +guide with features of any"
            " model"
        ),
    }
    raise UsageError(reasons[reads])


def _settable(kind: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """The arguments of `kind` that a user may set, including those that all losses share."""
    parameters = inspect.signature(kind.__init__).parameters
    own = {
        name: p
        for name, p in parameters.items()
        if name not in _SET_BY_TRAINING and p.kind is not inspect.Parameter.VAR_KEYWORD
    }
    if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return own
    (name,) = (p.name for p in parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD)
    (shared,) = get_type_hints(kind.__init__)[name].__args__  # Unpack[Shared] or Unpack[Estimate]
    defaults = {
        each.name: each.default for each in fields(NTXentLoss) if each.default is not MISSING
    }
    hints = {
        name: hint
        for name, hint in get_type_hints(shared).items()
        if name not in (*_SET_BY_TRAINING, *own)
    }
    return own | {
        name: inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint
        )
        for name, hint in hints.items()
        if name not in ("gather", "compile")
    }


def _from_context(kind: type[nn.Module], context: Context, method: Method) -> dict[str, Any]:
    wanted = inspect.signature(kind.__init__).parameters
    given: dict[str, Any] = {"num_samples": context.num_samples} if "num_samples" in wanted else {}
    if "labels" in wanted:
        given["labels"] = context.labels
    if "num_classes" in wanted and context.labels is not None:
        given["num_classes"] = len(torch.unique(context.labels[context.labels >= 0])) or None
    if "keys" in wanted:
        given["keys"] = context.keys
    if "second_head" in wanted:
        given["second_head"] = context.second_head
    elif context.second_head is not None and issubclass(kind, Framework):
        able = ", ".join(
            name
            for name, each in FRAMEWORKS.items()
            if "second_head" in inspect.signature(each.__init__).parameters
        )
        raise UsageError(
            f"`head.second` (=true) must be false with {method.framework}: a second head is for"
            f" {able}"
        )
    if "text_encoder" in wanted:
        if context.text is None:
            raise UsageError(f"{method} needs a text encoder; `Context.text` must be given")
        given["text_encoder"], given["text_head"] = context.text
    return given


def _require_known(name: str, names: Iterable[str], kind: str, whole: str) -> str:
    names = list(names)
    if name in names:
        return name
    hint = did_you_mean(name, names, limit=2)
    raise UsageError(
        f"unknown {kind} {name!r} in the method {whole!r}{hint} (there are: {', '.join(names)})"
    )
