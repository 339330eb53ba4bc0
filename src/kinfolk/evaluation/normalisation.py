"""Images normalised by the mean and deviation of the data they come from.

Ring paper, section 5, on transfer: "we compute mean and variance from a training split to normalize input images, which we found important
for generalization to new visual domains".

Dimension key: N samples, B batch, C = 3 channels, S pixels of a side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.data.views import Views
from kinfolk.evaluation.embed import Images


def own_normalisation(data: Images, views: Views, ids: Tensor, *, batch_size: int = 512) -> Views:
    """The same views, but normalised by mean and standard deviation of the channels over the samples `ids`, as `evaluate` shows them.

    A channel that never changes keeps its deviation of 1.
    """
    plain = Views(**{**views.config(), "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)})
    number, sum_C, square_C = 0, torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for ids_B in ids.cpu().split(batch_size):  # type: ignore[no-untyped-call]
        x_BCSS = plain.evaluate(data.pixels(ids_B), data.aspect(ids_B)).double()
        number += x_BCSS.numel() // 3
        sum_C += x_BCSS.sum((0, 2, 3))
        square_C += x_BCSS.square().sum((0, 2, 3))
    mean_C = sum_C / number
    std_C = (square_C / number - mean_C.square()).clamp(min=0).sqrt()
    std_C = std_C.where(std_C > 1e-6, 1.0)
    return Views(**{**views.config(), "mean": mean_C.tolist(), "std": std_C.tolist()})
