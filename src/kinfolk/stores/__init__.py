"""State that outlives a step: per sample, in a queue, in a bank."""

from kinfolk.stores.bank import Bank
from kinfolk.stores.draw import Draw
from kinfolk.stores.per_sample import PerSample
from kinfolk.stores.queue import Queue

__all__ = ["Bank", "Draw", "PerSample", "Queue"]
