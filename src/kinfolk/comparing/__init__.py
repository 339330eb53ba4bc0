"""Compares runs: one table over methods and seeds."""

from kinfolk.comparing.table import Comparison, compare

__all__ = ["Comparison", "compare"]
