"""Settings of all tests."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)  # two pytest processes share the cores, and equal bits are promised only for one number of threads
settings.register_profile("kinfolk", deadline=None)  # a busy machine is no failure
settings.load_profile("kinfolk")
