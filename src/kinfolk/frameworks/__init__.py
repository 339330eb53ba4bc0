"""Frameworks: where anchors and candidates come from."""

from kinfolk.frameworks.base import Framework
from kinfolk.frameworks.clip import CLIP, FastCLIPFramework, SigLIP, SogCLRCLIP, TextPairs
from kinfolk.frameworks.memory_bank_methods import CMC, IR, LA
from kinfolk.frameworks.moco import MoCo, MoCoV3
from kinfolk.frameworks.pcl import PCL
from kinfolk.frameworks.rcl import NNCLR, RCL
from kinfolk.frameworks.simclr import SimCLR, SogCLRFramework
from kinfolk.frameworks.spcl import SPCL

FRAMEWORKS: dict[str, type[Framework]] = {
    "simclr": SimCLR,
    "sogclr": SogCLRFramework,
    "moco": MoCo,
    "mocov3": MoCoV3,
    "ir": IR,
    "pcl": PCL,
    "cmc": CMC,
    "la": LA,
    "nnclr": NNCLR,
    "rcl": RCL,
    "spcl": SPCL,
    "clip": CLIP,
    "sogclr-clip": SogCLRCLIP,
    "fastclip": FastCLIPFramework,
    "siglip": SigLIP,
    "pairs": TextPairs,
}
"""Frameworks by their name in a method."""

__all__ = [
    "CLIP",
    "CMC",
    "FRAMEWORKS",
    "IR",
    "LA",
    "NNCLR",
    "PCL",
    "RCL",
    "SPCL",
    "FastCLIPFramework",
    "Framework",
    "MoCo",
    "MoCoV3",
    "SigLIP",
    "SimCLR",
    "SogCLRCLIP",
    "SogCLRFramework",
    "TextPairs",
]
