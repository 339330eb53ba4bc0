"""Weak labels of the batch: Zheng et al. (WCL), ICCV 2021, section 3.2.

Dimension key: R rows of a block, C candidates, D embedding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kinfolk.detectors.base import Detector, register
from kinfolk.pairs import OUT, Block, Kin, same_key

_CHUNK_ELEMENTS = 1 << 22


@register("components", "Zheng et al., ICCV 2021", "large batches", action="attract")
class Components(Detector):
    """Kin are the candidates in the anchor's connected component of the graph that links each
    sample of the batch to its nearest.

    The similarity of two samples is the highest of their views. An anchor whose sample is not a
    candidate, as with a queue, is in the component of the nearest candidate. All candidates are
    compared with each other, which is slow for a long queue. No state.

    Deviates from the paper in: one graph of samples; the paper has one for each view and swaps
    their labels.

    Example:
        >>> import torch, kinfolk as kf
        >>> loss_fn = kf.NTXentLoss(temperature=0.1, detector=kf.Components(), action="attract")
        >>> loss_fn(torch.eye(4), torch.eye(4)).isfinite().item()
        True
    """

    @torch.no_grad()
    def prepare(self, ids_C: Tensor, candidates_CD: Tensor, guide_CG: Tensor | None) -> Tensor:
        return find_components(candidates_CD, ids_C)

    @torch.no_grad()
    def find(self, block: Block) -> Kin:
        if block.prepared is None:  # a finished run: only the nearest candidates are known
            return Kin()
        key_C = block.prepared
        sorted_C, order_C = block.candidate_ids.sort()
        place_R = torch.searchsorted(sorted_C, block.row_ids).clamp(max=len(sorted_C) - 1)
        there_R = sorted_C[place_R] == block.row_ids
        key_R = torch.where(there_R, key_C[order_C[place_R]], key_C[block.sim_RC.argmax(1)])
        return Kin(same_key(key_R, key_C))


def find_components(z_CD: Tensor, ids_C: Tensor) -> Tensor:
    """(C,) component of each candidate: the lower place of the two samples in it that are each
    other's nearest. Candidates of one id are one sample.

    Example:
        >>> z = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9], [0.5, 0.5]])
        >>> find_components(z, torch.arange(5)).tolist()
        [0, 0, 2, 2, 0]
    """
    link_C = nearest_samples(z_CD, ids_C)
    # Following the links ends in a cycle, whose lowest member is found by doubling: after k rounds
    # `jump` is 2^k links away, and `low` the lowest of the places on the way.
    jump_C, low_C = link_C, torch.arange(len(link_C), device=link_C.device)
    for _ in range(max(1, math.ceil(math.log2(len(link_C))))):
        low_C = torch.minimum(low_C, low_C[jump_C])
        jump_C = jump_C[jump_C]
    return low_C[jump_C]


def nearest_samples(z_CD: Tensor, ids_C: Tensor) -> Tensor:
    """(C,) the first place of the sample nearest to each candidate's, or of its own if there is no
    other."""
    number = len(ids_C)
    sorted_C, order_C = ids_C.sort(stable=True)
    sample_C = order_C[torch.searchsorted(sorted_C, ids_C)]  # the first place of each one's sample
    best_C, near_C = [], []
    step = max(1, _CHUNK_ELEMENTS // number)
    for start in range(0, number, step):
        sim_rC = z_CD[start : start + step] @ z_CD.T
        own_rC = sample_C[start : start + step].unsqueeze(1) == sample_C
        value_r, place_r = sim_rC.masked_fill_(own_rC, OUT).max(1)
        best_C.append(value_r)
        near_C.append(place_r)
    value_C, near_sample_C = torch.cat(best_C), sample_C[torch.cat(near_C)]
    top_C = torch.full_like(value_C, OUT).scatter_reduce(0, sample_C, value_C, "amax")
    near_sample_C = torch.where(value_C == top_C[sample_C], near_sample_C, number)
    link_C = torch.full_like(sample_C, number).scatter_reduce(0, sample_C, near_sample_C, "amin")
    return torch.where(top_C[sample_C] > OUT, link_C[sample_C], sample_C)
