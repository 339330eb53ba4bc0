"""The embedding through the training: a map of each snapshot, side by side, with the pseudo-labels of its time (IFND paper, Figure 3).

Dimension key: S samples of the snapshots, D embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kinfolk.report.map import project
from kinfolk.training.snapshots import Snapshot


@dataclass(frozen=True)
class Stage:
    """The map after an epoch; `pseudo`: (S,) pseudo-labels, −1 where none was accepted, None before there were any; `note` counts them."""

    epoch: int
    points: NDArray[np.float32]
    pseudo: list[int] | None
    note: str


@dataclass(frozen=True)
class Stages:
    """All of them; `place`: (S,) where their samples stand on the map of all."""

    maps: list[Stage]
    place: list[int]
    method: str
    has_labels: bool

    @property
    def clusters(self) -> int:
        """Above the largest pseudo-label there is; 0 without any."""
        return 1 + max((label for stage in self.maps for label in stage.pseudo or ()), default=-1)

    @property
    def choice(self) -> bool:
        """Whether points may be coloured in two ways."""
        return self.clusters > 0 and self.has_labels

    @property
    def intro(self) -> str:
        """What is shown."""
        colour = "coloured by pseudo-label, grey where none was accepted" if self.clusters else "coloured by label" * self.has_labels
        samples = f"{len(self.place):,} training samples, drawn at random before the training"
        return (
            f"{self.method} of the projected embeddings of {samples}{', ' + colour if colour else ''}. A sample is marked in all at once."
        )

    def as_json(self) -> dict[str, Any]:
        """What the page's script draws."""
        maps = []
        for stage in self.maps:
            x, y = ([round(float(value), 3) for value in axis] for axis in stage.points.T)
            maps.append({"epoch": stage.epoch, "x": x, "y": y, "pseudo": stage.pseudo})
        return {"maps": maps, "place": self.place, "clusters": self.clusters}


def draw_stages(snapshots: Sequence[Snapshot], ids_N: NDArray[np.int64], has_labels: bool, seed: int) -> Stages | None:
    """Each map starts from the one before, so that what moves is what has changed. None without snapshots of samples of the map."""
    if not snapshots:
        return None
    place = np.searchsorted(ids_N, snapshots[0].ids)
    if len(ids_N) == 0 or not np.array_equal(ids_N[np.minimum(place, len(ids_N) - 1)], snapshots[0].ids):
        return None
    clusters = any(snapshot.pseudo is not None for snapshot in snapshots)
    maps, points, method = [], None, ""
    for snapshot in snapshots:
        points, method = project(snapshot.embedding.astype(np.float32), seed, points)
        pseudo = None if snapshot.pseudo is None else snapshot.pseudo.tolist()
        maps.append(Stage(snapshot.epoch, points, pseudo, _note(pseudo) if clusters else ""))
    return Stages(maps, place.tolist(), method, has_labels)


def _note(pseudo: list[int] | None) -> str:
    if pseudo is None:
        return "before the first clusters"
    named = [label for label in pseudo if label >= 0]
    return f"{len(named) / len(pseudo):.0%} with a pseudo-label, {len(set(named)):,} clusters"
