"""Detectors: which candidates are kin, that is, detected false negatives.

Every module of this package is imported, so that a new file with a `register` decorator is enough
for a new detector.
"""

import importlib
import pkgutil

from kinfolk.detectors.base import DETECTORS, Detector, StartAt, StopAt, register
from kinfolk.detectors.clusters import Cave, Neighbours
from kinfolk.detectors.components import Components
from kinfolk.detectors.fnc import FNC, PositiveMargin
from kinfolk.detectors.glofnd import GloFND
from kinfolk.detectors.guide import Guide, Teacher
from kinfolk.detectors.hierarchy import Hierarchy
from kinfolk.detectors.ifnd import IFND
from kinfolk.detectors.known import Known, Oracle
from kinfolk.detectors.ring import Ring
from kinfolk.detectors.union import Union

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
for _name in sorted(DETECTORS):  # the order of all tables
    DETECTORS[_name] = DETECTORS.pop(_name)

__all__ = [
    "DETECTORS",
    "FNC",
    "IFND",
    "Cave",
    "Components",
    "Detector",
    "GloFND",
    "Guide",
    "Hierarchy",
    "Known",
    "Neighbours",
    "Oracle",
    "PositiveMargin",
    "Ring",
    "StartAt",
    "StopAt",
    "Teacher",
    "Union",
    "register",
]
