"""Who is kin."""

from kinfolk.detectors.base import Detector, Found
from kinfolk.detectors.fnc import FNC
from kinfolk.detectors.glofnd import GloFND
from kinfolk.detectors.ifnd import IFND
from kinfolk.detectors.neighbours import Neighbours
from kinfolk.detectors.oracle import Oracle
from kinfolk.detectors.start_at import StartAt

DETECTORS: dict[str, type[Detector]] = {"oracle": Oracle, "fnc": FNC, "glofnd": GloFND, "ifnd": IFND, "neighbours": Neighbours}
"""The names of the method grammar."""

__all__ = ["DETECTORS", "FNC", "IFND", "Detector", "Found", "GloFND", "Neighbours", "Oracle", "StartAt"]
