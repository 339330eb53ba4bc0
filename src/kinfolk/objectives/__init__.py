"""What the loss is, given similarities and roles."""

from kinfolk.objectives.base import Objective
from kinfolk.objectives.bimodal import Bimodal, CLIPLoss
from kinfolk.objectives.bimodal_sogclr import BimodalSogCLR
from kinfolk.objectives.fastclip import FastCLIP
from kinfolk.objectives.ntxent import NTXent
from kinfolk.objectives.prototypes import LocalAggregation
from kinfolk.objectives.relative import RelativeContrast
from kinfolk.objectives.siglip import SigLIPLoss
from kinfolk.objectives.sogclr import SogCLR

__all__ = [
    "Bimodal",
    "BimodalSogCLR",
    "CLIPLoss",
    "FastCLIP",
    "LocalAggregation",
    "NTXent",
    "Objective",
    "RelativeContrast",
    "SigLIPLoss",
    "SogCLR",
]
