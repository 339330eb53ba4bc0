"""Detectors: which candidates are kin, that is, detected false negatives."""

from kinfolk.detectors.base import Detector, Found, Refreshed, StartAt
from kinfolk.detectors.cave import Cave
from kinfolk.detectors.components import Components
from kinfolk.detectors.fnc import FNC
from kinfolk.detectors.glofnd import GloFND
from kinfolk.detectors.graded import Graded
from kinfolk.detectors.guide import Guide
from kinfolk.detectors.hierarchy import Hierarchy
from kinfolk.detectors.ifnd import IFND
from kinfolk.detectors.known import Known
from kinfolk.detectors.neighbours import Neighbours
from kinfolk.detectors.oracle import Oracle
from kinfolk.detectors.ring import Ring
from kinfolk.detectors.teacher import Teacher

DETECTORS: dict[str, type[Detector]] = {
    "oracle": Oracle,
    "fnc": FNC,
    "glofnd": GloFND,
    "ifnd": IFND,
    "neighbours": Neighbours,
    "ring": Ring,
    "cave": Cave,
    "hierarchy": Hierarchy,
    "known": Known,
    "guide": Guide,
    "teacher": Teacher,
    "components": Components,
}
"""The names of the method grammar."""
VARIANTS: dict[str, dict[str, dict[str, object]]] = {"ring": {"learned": {"boundaries": "learned"}}}
"""Names that stand for arguments of a detector in the method grammar: `ring:learned`."""

__all__ = [
    "DETECTORS",
    "FNC",
    "IFND",
    "VARIANTS",
    "Cave",
    "Components",
    "Detector",
    "Found",
    "GloFND",
    "Graded",
    "Guide",
    "Hierarchy",
    "Known",
    "Neighbours",
    "Oracle",
    "Refreshed",
    "Ring",
    "StartAt",
    "Teacher",
]
