"""Where anchors and candidates come from."""

from kinfolk.frameworks.base import Framework
from kinfolk.frameworks.ir import IR
from kinfolk.frameworks.moco import MoCo
from kinfolk.frameworks.simclr import SimCLR
from kinfolk.frameworks.sogclr import SogCLRFramework

FRAMEWORKS: dict[str, type[Framework]] = {"simclr": SimCLR, "sogclr": SogCLRFramework, "moco": MoCo, "ir": IR}
"""The names of the method grammar."""

__all__ = ["FRAMEWORKS", "IR", "Framework", "MoCo", "SimCLR", "SogCLRFramework"]
