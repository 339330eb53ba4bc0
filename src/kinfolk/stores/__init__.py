"""State per sample."""

from kinfolk.stores.per_sample import PerSample

__all__ = ["PerSample"]
