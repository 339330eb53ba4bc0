"""Prepared data handed from one process to the others of a training: they map its table and its pixels, and never list the source.

A process that lists the source itself needs about 1,500 bytes a sample for a while, and rank r of a node would do so for each r.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kinfolk.data.cache import map_cache
from kinfolk.data.images import ImageData
from kinfolk.data.samples import Samples
from kinfolk.errors import KinfolkError
from kinfolk.files import read_sealed_text, write_atomically, write_sealed_text


def hand_over(data: ImageData, note: Path) -> None:
    """Writes to `note` where the data is. Data in memory alone is not handed over: `note` is removed."""
    if data.folder is None or data.samples.file is None:
        note.unlink(missing_ok=True)
        return
    places = {"folder": str(data.folder), "samples": str(data.samples.file), "rows": None, "digest": None}
    if data.rows is not None:
        rows, file = data.rows.numpy(), data.samples.file.with_suffix(".npy")
        write_atomically(file, lambda opened: np.save(opened, rows))
        places |= {"rows": str(file), "digest": _digest(rows)}
    write_sealed_text(note, json.dumps(places))


def take_over(note: Path) -> ImageData | None:
    """The data that `hand_over` wrote of; None where it is not there, as on another machine with a cache folder of its own, or damaged."""
    try:
        places = json.loads(read_sealed_text(note))
        found = map_cache(Path(places["folder"]))
        rows = None if places["rows"] is None else np.load(places["rows"])
        samples = Samples.open(places["samples"])
    except (OSError, ValueError, KeyError, TypeError, KinfolkError):
        return None
    if found is None or (rows is not None and _digest(rows) != places["digest"]):
        return None
    cache, verify = found
    if (len(samples) if rows is None else int(rows.max()) + 1) > len(cache):
        return None
    data = ImageData(samples, cache, None if rows is None else torch.from_numpy(rows), [])
    data.folder, data.verify = Path(places["folder"]), verify
    return data


def _digest(rows: Any) -> str:
    return hashlib.blake2b(rows.tobytes(), digest_size=16).hexdigest()
