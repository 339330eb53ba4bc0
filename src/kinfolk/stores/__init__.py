"""State that outlives a step: per sample, in a queue, in a bank."""

from kinfolk.stores.memory_bank import Bank, Draw
from kinfolk.stores.per_sample import PerSample
from kinfolk.stores.queue import Queue

__all__ = ["Bank", "Draw", "PerSample", "Queue"]
