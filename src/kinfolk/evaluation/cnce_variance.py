"""Mean and variance of NCE and CNCE against the number of negatives: theorem 3.2 of the CNCE paper, with the numbers of its appendix C.

The paper studies IR and MoCo on images; here it is the toy, or any two arrays with embeddings of two views.

Dimension key: A anchors, C candidates, M of them in the support, N points, D embedding, R draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfolk.data.seeding import generator
from kinfolk.errors import UsageError
from kinfolk.evaluation.cnce import draw, log_ratio, scores, support
from kinfolk.evaluation.cnce_table import count_epochs
from kinfolk.evaluation.cnce_toy import Toy, draw_points, train_critic, true_information

NEGATIVES = (16, 32, 64, 128, 256, 512, 1024, 4096)  # appendix C
OMEGAS = (0, 50, 90)


def variance_study(
    num_seeds: int, toy: Toy | None = None, *, anchors: int = 128, draws: int = 32, progress: bool = False
) -> dict[str, Any]:
    """Mean and variance of NCE and CNCE on fresh points of the toy, with a critic trained by NCE, for each number of negatives.

    The variance is that of theorem 3.2: of Z over draws of the negatives, with (u, v_1) fixed; the mean of it over anchors and seeds.
    """
    if num_seeds < 1:
        raise ValueError(f"`num_seeds` (={num_seeds}) must be at least 1")
    toy = toy or Toy()
    rows: list[list[dict[str, Any]]] = []
    with count_epochs(num_seeds, toy, progress) as after_epoch:
        for seed in range(num_seeds):
            critic = train_critic(*draw_points(toy.num_points, seed, "train"), toy, seed, after_epoch=after_epoch)
            x_N, y_N = draw_points(toy.num_points, seed, "fresh")
            rows.append(against_negatives(critic.embed_x(x_N[:anchors]), critic.embed_y(y_N), toy.temperature, draws=draws, seed=seed))
    joined = [
        {**same[0], "mean": fmean(row["mean"] for row in same), "variance": fmean(row["variance"] for row in same)}
        for same in zip(*rows, strict=True)
    ]
    settings = {**asdict(toy), "seeds": num_seeds, "anchors": min(anchors, toy.num_points), "draws": draws}
    return {"study": "variance", "settings": settings, "true": true_information(), "rows": joined}


def views_study(first: Path, second: Path, temperature: float, *, anchors: int = 128, draws: int = 32) -> dict[str, Any]:
    """The same for embeddings of two views, arrays of one shape in two .npy files; the first `anchors` rows are the anchors."""
    views = [_read(path) for path in (first, second)]
    if views[0].ndim != 2 or views[0].shape != views[1].shape or len(views[0]) < 2:
        shapes = " and ".join(str(tuple(view.shape)) for view in views)
        raise UsageError(f"the two views have the shapes {shapes}; they must have the same, samples × features, and at least two samples")
    if not all(bool(view.isfinite().all()) for view in views):
        raise UsageError("the two views hold values that are not finite numbers")
    rows = against_negatives(views[0][:anchors], views[1], temperature, draws=draws)
    settings = {"views": [str(first), str(second)], "temperature": temperature, "anchors": min(anchors, len(views[0])), "draws": draws}
    return {"study": "variance", "settings": settings, "true": None, "rows": rows}


@torch.no_grad()
def against_negatives(
    u_AD: Tensor,
    v_ND: Tensor,
    temperature: float,
    *,
    draws: int = 32,
    seed: int = 0,
    negatives: Sequence[int] = NEGATIVES,
    omegas: Sequence[float] = OMEGAS,
) -> list[dict[str, Any]]:
    """Mean and variance over `draws` draws of the negatives, for two views' embeddings: row i of `u_AD` belongs to row i of `v_ND`."""
    if draws < 2:
        raise ValueError(f"`draws` (={draws}) must be at least 2")
    positive_A, others_AC = scores(u_AD, v_ND, temperature)
    ordered_AC = others_AC.sort(1).values
    rows = []
    for number in negatives:
        for omega in omegas:
            kept_AM = support(ordered_AC, omega)
            found_RA = torch.stack([log_ratio(positive_A, draw(kept_AM, number, generator(seed, "draw", number, r))) for r in range(draws)])
            rows.append({"negatives": number, "omega": omega, "mean": float(found_RA.mean()), "variance": float(found_RA.var(0).mean())})
    return rows


def _read(path: Path) -> Tensor:
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False).astype(np.float32))
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"{path} can't be read as an array of numbers (.npy): {error}") from error
