"""Features of all training samples for the methods that cluster them: in data-set order, in parts over ranks, the same on every rank.

Dimension key: N samples, F features.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kinfolk import distributed
from kinfolk.evaluation.embed import Images, Preparation, Tracker, embed


def embed_in_parts(
    model: nn.Module,
    data: Images,
    views: Preparation,
    num_samples: int,
    *,
    batch_size: int = 512,
    device: torch.device | None = None,
    autocast: torch.dtype | None = None,
    progress: bool | Tracker = False,
    projected: bool = False,
) -> Tensor:
    """(N, F) float32 on the CPU: the features of the samples 0 to N − 1, of which every rank computes one stretch.

    Every rank has counted its own running statistics of BatchNorm since the last step; those of rank zero, which are in the checkpoint,
    are taken by all, as the next step would have it. Other arguments: see `embed`.
    """
    world = distributed.world_size()
    if world == 1:
        ids = torch.arange(num_samples)
        return embed(model, data, views, ids, batch_size=batch_size, autocast=autocast, progress=progress, projected=projected)
    share_statistics(model)
    sizes = [num_samples // world + (rank < num_samples % world) for rank in range(world)]
    rank = dist.get_rank()
    first = sum(sizes[:rank])
    own_ids = torch.arange(first, first + sizes[rank])
    own_MF = embed(model, data, views, own_ids, batch_size=batch_size, autocast=autocast, progress=progress, projected=projected)
    return distributed.gather_rows(own_MF if device is None else own_MF.to(device), sizes).cpu()


def share_statistics(model: nn.Module) -> None:
    """All ranks take rank zero's running statistics of BatchNorm; of one process nothing changes."""
    if distributed.world_size() == 1:
        return
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            for buffer in part.buffers(recurse=False):
                dist.broadcast(buffer, 0)
