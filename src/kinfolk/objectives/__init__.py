"""Losses: what is minimised, given similarities and kin."""

from kinfolk.objectives.base import Objective
from kinfolk.objectives.bimodal import (
    BimodalLoss,
    BimodalSogCLRLoss,
    CLIPLoss,
    SigLIPLoss,
    group_ids_of,
)
from kinfolk.objectives.fastclip import FastCLIPLoss
from kinfolk.objectives.ntxent import NTXentLoss
from kinfolk.objectives.prototypes import LocalAggregationLoss, RelativeContrastLoss
from kinfolk.objectives.sogclr import SogCLRLoss

__all__ = [
    "BimodalLoss",
    "BimodalSogCLRLoss",
    "CLIPLoss",
    "FastCLIPLoss",
    "LocalAggregationLoss",
    "NTXentLoss",
    "Objective",
    "RelativeContrastLoss",
    "SigLIPLoss",
    "SogCLRLoss",
    "group_ids_of",
]
