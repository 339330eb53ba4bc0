"""Who is kin."""

from kinfolk.detectors.base import Detector, Found
from kinfolk.detectors.fnc import FNC
from kinfolk.detectors.glofnd import GloFND
from kinfolk.detectors.oracle import Oracle
from kinfolk.detectors.start_at import StartAt

DETECTORS: dict[str, type[Detector]] = {"oracle": Oracle, "fnc": FNC, "glofnd": GloFND}
"""The names of the method grammar."""

__all__ = ["DETECTORS", "FNC", "Detector", "Found", "GloFND", "Oracle", "StartAt"]
