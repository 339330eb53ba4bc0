"""Where anchors and candidates come from."""

from kinfolk.frameworks.base import Framework
from kinfolk.frameworks.simclr import SimCLR
from kinfolk.frameworks.sogclr import SogCLRFramework

FRAMEWORKS: dict[str, type[Framework]] = {"simclr": SimCLR, "sogclr": SogCLRFramework}
"""The names of the method grammar."""

__all__ = ["FRAMEWORKS", "Framework", "SimCLR", "SogCLRFramework"]
