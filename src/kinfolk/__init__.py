"""Contrastive representation learning that detects false negatives."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kinfolk.api import embed as embed
    from kinfolk.api import evaluate as evaluate
    from kinfolk.api import load as load
    from kinfolk.api import train as train
    from kinfolk.auditing import audit as audit
    from kinfolk.clustering import PatchFeatures as PatchFeatures
    from kinfolk.comparing import compare as compare
    from kinfolk.detectors import FNC as FNC
    from kinfolk.detectors import IFND as IFND
    from kinfolk.detectors import Cave as Cave
    from kinfolk.detectors import Components as Components
    from kinfolk.detectors import Detector as Detector
    from kinfolk.detectors import GloFND as GloFND
    from kinfolk.detectors import Guide as Guide
    from kinfolk.detectors import Hierarchy as Hierarchy
    from kinfolk.detectors import Known as Known
    from kinfolk.detectors import Neighbours as Neighbours
    from kinfolk.detectors import Oracle as Oracle
    from kinfolk.detectors import PositiveMargin as PositiveMargin
    from kinfolk.detectors import Ring as Ring
    from kinfolk.detectors import StartAt as StartAt
    from kinfolk.detectors import StopAt as StopAt
    from kinfolk.detectors import Teacher as Teacher
    from kinfolk.exporting import export as export
    from kinfolk.objectives import BimodalSogCLRLoss as BimodalSogCLRLoss
    from kinfolk.objectives import CLIPLoss as CLIPLoss
    from kinfolk.objectives import FastCLIPLoss as FastCLIPLoss
    from kinfolk.objectives import LocalAggregationLoss as LocalAggregationLoss
    from kinfolk.objectives import NTXentLoss as NTXentLoss
    from kinfolk.objectives import RelativeContrastLoss as RelativeContrastLoss
    from kinfolk.objectives import SigLIPLoss as SigLIPLoss
    from kinfolk.objectives import SogCLRLoss as SogCLRLoss
    from kinfolk.objectives import group_ids_of as group_ids_of
    from kinfolk.pairs import Block as Block
    from kinfolk.pairs import Kin as Kin
    from kinfolk.pairs import Pairs as Pairs
    from kinfolk.plugins import register_detector as register_detector
    from kinfolk.plugins import register_framework as register_framework
    from kinfolk.stats import Stats as Stats
    from kinfolk.sweeping import sweep as sweep

__version__ = "0.1.0"

# Names are imported on first access: the losses need only torch, `train` also needs Lightning, and
# `kinfolk --help` needs neither.
_MODULE_OF = {
    "BimodalSogCLRLoss": "kinfolk.objectives",
    "Block": "kinfolk.pairs",
    "CLIPLoss": "kinfolk.objectives",
    "Cave": "kinfolk.detectors",
    "Components": "kinfolk.detectors",
    "Detector": "kinfolk.detectors",
    "FNC": "kinfolk.detectors",
    "FastCLIPLoss": "kinfolk.objectives",
    "GloFND": "kinfolk.detectors",
    "Guide": "kinfolk.detectors",
    "Hierarchy": "kinfolk.detectors",
    "IFND": "kinfolk.detectors",
    "Kin": "kinfolk.pairs",
    "Known": "kinfolk.detectors",
    "LocalAggregationLoss": "kinfolk.objectives",
    "NTXentLoss": "kinfolk.objectives",
    "Neighbours": "kinfolk.detectors",
    "Oracle": "kinfolk.detectors",
    "Pairs": "kinfolk.pairs",
    "PatchFeatures": "kinfolk.clustering",
    "PositiveMargin": "kinfolk.detectors",
    "RelativeContrastLoss": "kinfolk.objectives",
    "Ring": "kinfolk.detectors",
    "SigLIPLoss": "kinfolk.objectives",
    "SogCLRLoss": "kinfolk.objectives",
    "StartAt": "kinfolk.detectors",
    "Stats": "kinfolk.stats",
    "StopAt": "kinfolk.detectors",
    "Teacher": "kinfolk.detectors",
    "audit": "kinfolk.auditing",
    "compare": "kinfolk.comparing",
    "embed": "kinfolk.api",
    "evaluate": "kinfolk.api",
    "export": "kinfolk.exporting",
    "group_ids_of": "kinfolk.objectives",
    "load": "kinfolk.api",
    "register_detector": "kinfolk.plugins",
    "register_framework": "kinfolk.plugins",
    "sweep": "kinfolk.sweeping",
    "train": "kinfolk.api",
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if not name[:1].isupper() and name not in _MODULE_OF:
        raise AttributeError(f"module 'kinfolk' has no attribute {name!r}")
    if name not in _MODULE_OF:  # a detector that only its own file registers
        detectors = importlib.import_module("kinfolk.detectors").DETECTORS
        value = next((kind for kind in detectors.values() if kind.__name__ == name), None)
        if value is None:
            raise AttributeError(f"module 'kinfolk' has no attribute {name!r}")
        return value
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
