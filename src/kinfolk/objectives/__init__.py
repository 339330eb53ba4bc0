"""What the loss is, given similarities and roles."""

from kinfolk.objectives.base import Objective
from kinfolk.objectives.local_aggregation import LocalAggregation
from kinfolk.objectives.ntxent import NTXent
from kinfolk.objectives.relative import RelativeContrast
from kinfolk.objectives.sogclr import SogCLR

__all__ = ["LocalAggregation", "NTXent", "Objective", "RelativeContrast", "SogCLR"]
