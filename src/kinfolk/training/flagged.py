"""Whom the detectors of a run flag, asked after the training: nothing is learned by it.

Dimension key: Q queries, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.data.identity import samples_digest
from kinfolk.data.images import ImageData
from kinfolk.data.samples import Samples
from kinfolk.data.tokenizer import Tokenizer
from kinfolk.detectors.base import Detector
from kinfolk.frameworks import Framework
from kinfolk.kinship import select
from kinfolk.pairs import LEFT_OUT, Block
from kinfolk.training.assemble import build_framework
from kinfolk.training.changes import require_identity
from kinfolk.training.checkpoint import read_checkpoint
from kinfolk.training.config import TrainConfig
from kinfolk.training.run import Run


def trained(config: TrainConfig, run: Run, data: ImageData, tokenizer: Tokenizer | None = None) -> Framework:
    """The framework with its state per sample as the last checkpoint has it, in evaluation mode."""
    checkpoint = read_checkpoint(run.checkpoint)
    require_identity(checkpoint["kinfolk"], config, *_samples_of(run), run.checkpoint)
    framework = build_framework(config, data, tokenizer, resumed=True)
    framework.set_progress(max(int(checkpoint["kinfolk"]["epoch"]) - 1, 0), config.epochs)
    framework.load_state_dict({name.removeprefix("framework."): value for name, value in checkpoint["state_dict"].items()})
    return framework.eval()


def _samples_of(run: Run) -> tuple[str, int]:
    """The digest of the run's samples, and how many are for training."""
    samples = Samples.read(run.samples)
    return samples_digest(samples), samples.num_train


@torch.no_grad()
def kin_of(detector: Detector, sim_QC: Tensor, ids_Q: Tensor, candidate_ids_C: Tensor, own_QC: Tensor) -> Tensor:
    """(Q, C) True where the detector takes the candidate for kin of the query; what is its own is never."""
    sim_QC = sim_QC.masked_fill(own_QC, LEFT_OUT)
    kin_QC, _ = select(sim_QC, detector.find(Block(sim_QC, ids_Q, candidate_ids_C, 1, (~own_QC).sum(1))).levels[0], drops=False)
    return torch.zeros_like(own_QC) if kin_QC is None else kin_QC > 0
