"""Prepared data handed from one process to the others of a training: they map its table and its pixels, and never list the source.

A process that lists the source itself needs about 1,500 bytes a sample for a while, and rank r of a node would do so for each r.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch

from kinfolk.data.cache import map_cache
from kinfolk.data.images import ImageData
from kinfolk.data.samples import Samples
from kinfolk.errors import KinfolkError


def hand_over(data: ImageData, note: Path) -> None:
    """Writes to `note` where the data is. Data in memory alone is not handed over: `note` is removed."""
    if data.folder is None or data.samples.file is None:
        note.unlink(missing_ok=True)
        return
    rows = None
    if data.rows is not None:
        rows = data.samples.file.with_suffix(".npy")
        draft = rows.with_name(f"{rows.name}.{os.getpid()}.part")
        with open(draft, "wb") as file:
            np.save(file, data.rows.numpy())
        os.replace(draft, rows)
    places = {"folder": str(data.folder), "samples": str(data.samples.file), "rows": None if rows is None else str(rows)}
    note.parent.mkdir(parents=True, exist_ok=True)
    draft = note.with_name(f"{note.name}.{os.getpid()}.part")
    draft.write_text(json.dumps(places), encoding="utf-8")
    os.replace(draft, note)


def take_over(note: Path) -> ImageData | None:
    """The data that `hand_over` wrote of; None where it is not there, as on another machine with a cache folder of its own."""
    try:
        places = json.loads(note.read_text(encoding="utf-8"))
        cache = map_cache(Path(places["folder"]))
        rows = None if places["rows"] is None else torch.from_numpy(np.load(places["rows"]))
        samples = Samples.open(places["samples"])
    except (OSError, ValueError, KeyError, KinfolkError):
        return None
    if cache is None or (len(samples) if rows is None else int(rows.max()) + 1) > len(cache):
        return None
    data = ImageData(samples, cache, rows, [])
    data.folder = Path(places["folder"])
    return data
