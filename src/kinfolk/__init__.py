"""Contrastive representation learning that detects false negatives."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # isort: off
    from kinfolk.api import embed as embed, evaluate as evaluate, load as load, train as train
    from kinfolk.auditing import audit as audit
    from kinfolk.clustering import PatchFeatures as PatchFeatures
    from kinfolk.comparing import compare as compare
    from kinfolk.detectors import (
        FNC as FNC,
        IFND as IFND,
        Cave as Cave,
        Components as Components,
        Detector as Detector,
        GloFND as GloFND,
        Guide as Guide,
        Hierarchy as Hierarchy,
        Known as Known,
        Neighbours as Neighbours,
        Oracle as Oracle,
        PositiveMargin as PositiveMargin,
        Ring as Ring,
        StartAt as StartAt,
        StopAt as StopAt,
        Teacher as Teacher,
        Union as Union,
    )
    from kinfolk.exporting import export as export
    from kinfolk.objectives import (
        BimodalSogCLRLoss as BimodalSogCLRLoss,
        CLIPLoss as CLIPLoss,
        FastCLIPLoss as FastCLIPLoss,
        LocalAggregationLoss as LocalAggregationLoss,
        NTXentLoss as NTXentLoss,
        RelativeContrastLoss as RelativeContrastLoss,
        SigLIPLoss as SigLIPLoss,
        SogCLRLoss as SogCLRLoss,
        group_ids_of as group_ids_of,
    )
    from kinfolk.pairs import Block as Block, Kin as Kin, Pairs as Pairs
    from kinfolk.plugins import (
        register_detector as register_detector,
        register_framework as register_framework,
    )
    from kinfolk.stats import Stats as Stats
    from kinfolk.sweeping import sweep as sweep

__version__ = "0.1.0"

# Names are imported on first access: the losses need only torch, `train` also needs Lightning, and
# `kinfolk --help` needs neither.
_NAMES = {
    "api": "embed evaluate load train",
    "auditing": "audit",
    "clustering": "PatchFeatures",
    "comparing": "compare",
    "detectors": "FNC IFND Cave Components Detector GloFND Guide Hierarchy Known Neighbours"
    " Oracle PositiveMargin Ring StartAt StopAt Teacher Union",
    "exporting": "export",
    "objectives": "BimodalSogCLRLoss CLIPLoss FastCLIPLoss LocalAggregationLoss NTXentLoss"
    " RelativeContrastLoss SigLIPLoss SogCLRLoss group_ids_of",
    "pairs": "Block Kin Pairs",
    "plugins": "register_detector register_framework",
    "stats": "Stats",
    "sweeping": "sweep",
}
_MODULE_OF = {
    name: f"kinfolk.{module}" for module, names in _NAMES.items() for name in names.split()
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value
    if name[:1].isupper():  # a detector that only its own file registers
        for kind in importlib.import_module("kinfolk.detectors").DETECTORS.values():
            if kind.__name__ == name:
                return kind
    raise AttributeError(f"module 'kinfolk' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
