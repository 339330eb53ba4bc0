"""What a run of two towers finds: captions by pictures, pictures by captions, and whom its detector flags among them.

Dimension key: N training samples, I images, M captions, D embedding, Q queries, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kinfolk.data.text import TextData, every_caption
from kinfolk.foreign import without_controls
from kinfolk.report.map import choose, data_uri
from kinfolk.report.material import square_pictures
from kinfolk.training.flagged import kin_of, trained
from kinfolk.training.run import Run
from kinfolk.training.towers import learns_from_text

if TYPE_CHECKING:
    from markupsafe import Markup

    from kinfolk.data.images import ImageData
    from kinfolk.detectors import Detector
    from kinfolk.training.opened import OpenedRun

NUM_IMAGES, NUM_QUERIES, NUM_RESULTS, SIDE = 500, 6, 6, 112


@dataclass(frozen=True)
class Shown:
    """A picture, with its key, or a caption."""

    text: str
    uri: str = ""


@dataclass(frozen=True)
class Result:
    """One of the nearest: `mark` is "own" for a known positive, "kin" for one that the detector flags, or empty."""

    shown: Shown
    similarity: float
    mark: str


@dataclass(frozen=True)
class Query:
    """A query, its nearest candidates in order, and how many of all candidates are flagged."""

    shown: Shown
    results: Sequence[Result]
    flagged: int


@dataclass(frozen=True)
class Side:
    """The pictures or the captions: (C, D) embeddings, (C,) sample ids, and how each is shown."""

    embeddings: Tensor
    ids: Tensor
    show: Callable[[int], Shown]


def draw_retrieval(opened: OpenedRun, data: ImageData, *, progress: bool = False) -> Markup | None:
    """The section of the page; None for a run that did not learn from captions.

    Queries and candidates are training samples, since a detector has learned of these alone: some pictures, each once, and all their
    captions.
    """
    if not learns_from_text(opened.config):
        return None
    towers, seed = opened.towers(), opened.config.seed
    text, captions = TextData(data.samples, towers.tokenizer), list(every_caption(data.samples))
    first, of_N = data.distinct(torch.arange(data.num_train))
    ids_I = first[torch.from_numpy(choose(len(first), seed, NUM_IMAGES))]
    rows_M = text.rows(torch.isin(of_N, of_N[ids_I]).nonzero()[:, 0])
    words = [captions[row] for row in rows_M.tolist()]
    images = Side(towers.images(data, ids_I, progress), ids_I, lambda at: Shown(data.samples.keys[int(ids_I[at])], _uri(data, ids_I[at])))
    texts = Side(towers.texts(words), text.owners[rows_M], lambda at: Shown(words[at]))
    by_image: Detector | None = None
    by_text: Detector | None = None
    if "+" in opened.config.method:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            by_image, by_text = trained(opened.config, Run(opened.path), data, towers.tokenizer).detectors
    return render(
        _found(images, texts, text.groups, by_image, seed),
        _found(texts, images, text.groups, by_text, seed),
        method=opened.config.method,
        detects=by_image is not None,
    )


def _found(queries: Side, others: Side, groups: Tensor, detector: Detector | None, seed: int) -> list[Query]:
    """What some of one side, drawn at random, find on the other."""
    at_Q = torch.from_numpy(choose(len(queries.ids), seed, NUM_QUERIES))
    ids_Q, sim_QC = queries.ids[at_Q], queries.embeddings[at_Q] @ others.embeddings.T
    own_QC = groups[ids_Q][:, None] == groups[others.ids]
    kin_QC = torch.zeros_like(own_QC) if detector is None else kin_of(detector, sim_QC, ids_Q, others.ids, own_QC)
    nearest = sim_QC.topk(min(NUM_RESULTS, len(others.ids)), dim=1)
    found = []
    for row, (at, similarities, columns) in enumerate(zip(at_Q.tolist(), nearest.values.tolist(), nearest.indices.tolist(), strict=True)):
        marks = ["own" if own_QC[row, column] else "kin" if kin_QC[row, column] else "" for column in columns]
        results = [Result(others.show(column), sim, mark) for column, sim, mark in zip(columns, similarities, marks, strict=True)]
        found.append(Query(queries.show(at), results, int(kin_QC[row].sum())))
    return found


def render(by_image: Sequence[Query], by_text: Sequence[Query], *, method: str, detects: bool) -> Markup:
    """The section as HTML; every word of the run is escaped."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    files = resources.files("kinfolk.report")
    template, style = (files.joinpath(f"retrieval.{kind}").read_text(encoding="utf-8") for kind in ("html", "css"))
    environment = Environment(autoescape=True, finalize=without_controls, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    detector = method.partition("+")[2].partition(":")[0] if detects else ""
    return Markup(environment.from_string(template).render(by_image=by_image, by_text=by_text, detector=detector, style=Markup(style)))


def _uri(data: ImageData, id: Tensor) -> str:
    from PIL import Image

    (picture,) = square_pictures(data, id[None].numpy(), SIDE)
    return data_uri(Image.fromarray(picture), quality=80)
