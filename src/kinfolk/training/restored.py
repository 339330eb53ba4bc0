"""The whole method of a run as its last checkpoint has it: networks, per-sample state, clusters, queues."""

from __future__ import annotations

from pathlib import Path

import torch

from kinfolk.data.difference import key_difference
from kinfolk.data.images import ImageData
from kinfolk.data.samples import Samples
from kinfolk.errors import UsageError
from kinfolk.frameworks import Framework
from kinfolk.training.config import TrainConfig
from kinfolk.training.flagged import trained
from kinfolk.training.run import Run
from kinfolk.training.towers import learns_from_text


def restore(path: Path, config: TrainConfig, data: ImageData) -> Framework:
    """The framework of the run at `path`, in evaluation mode, its schedules where the training ended. `data` must hold the run's own
    training samples, for the state of a method is addressed by sample id."""
    run = Run(path)
    if learns_from_text(config):
        raise UsageError(f"{path} was trained with {config.method}, on captions; its false negatives can't be measured from images alone")
    if not run.checkpoint.is_file():
        raise UsageError(f"there is no {run.checkpoint.relative_to(path)} in {path}; the state of the method can't be measured without it")
    own = Samples.read(run.samples)
    different = key_difference(own.keys[: own.num_train], data.samples.keys[: data.num_train])
    if different is not None:
        raise UsageError(f"the method of {path} knows its own training samples alone: {different}; leave --data out")
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        return trained(config, run, data)
