"""Galleries of the report: anchors with their kin and the bounds of the detector, and for
image-text runs the retrieval in both directions.

The run's detector is applied after the training to one augmented view of each sample, because
detectors see augmented views in training.

Dimension key: N samples of the map, M training samples among them, D embedding, R rows of a block,
K kin shown, I images, Q queries, C candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from kinfolk.data.text import TextData
from kinfolk.detectors.base import Bound
from kinfolk.detectors.thresholds import batch_quantile
from kinfolk.embedding import embed
from kinfolk.errors import short
from kinfolk.evaluation.protocols import Augmented
from kinfolk.report.html import Panel, figure, outlines, render_template, rounded
from kinfolk.report.maps import choose, data_uri, square_images
from kinfolk.seeding import generator, preserve_random_state
from kinfolk.training.load_run import flagged_candidates, load_framework
from kinfolk.training.run_folder import Run

if TYPE_CHECKING:
    from markupsafe import Markup

    from kinfolk.data.images import ImageData
    from kinfolk.data.views import Views
    from kinfolk.detectors import Detector
    from kinfolk.evaluation.retrieval import Towers
    from kinfolk.frameworks import Framework
    from kinfolk.training.load_run import OpenedRun

SHOWN = 10
ROWS = 512


@dataclass(frozen=True)
class Compared:
    """Training samples that are compared with each other: their places on the map (M,), ids (M,)
    and unit-norm embeddings (M, D): projected ones of augmented views for a detector, else features
    of the images as they are."""

    places: NDArray[np.int64]
    ids: Tensor
    embedding: Tensor
    detector: Detector | None

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields the slice of some anchors, (R, M) similarities with −inf at the anchor itself, and
        the mask of those."""
        for start in range(0, len(self.ids), ROWS):
            rows = slice(start, start + ROWS)
            same_RM = self.ids[rows].unsqueeze(1) == self.ids
            sim_RM = self.embedding[rows] @ self.embedding.T
            yield rows, sim_RM.masked_fill(same_RM, -torch.inf), same_RM


@dataclass(frozen=True)
class Gallery:
    """Places of the anchors (M,) on the map, and of their closest kin (M, K) with cosines; −1 and
    −inf where there are fewer. `flagged`, `right`: number of all kin (M,), and of those with the
    anchor's label."""

    anchors: NDArray[np.int64]
    kin: NDArray[np.int64]
    similarity: NDArray[np.float32]
    flagged: NDArray[np.int64] | None
    right: NDArray[np.int64] | None
    thresholds: NDArray[np.float32] | None
    has_labels: bool

    @property
    def title(self) -> str:
        return "Nearest neighbours" if self.flagged is None else "Anchors and their kin"

    @property
    def intro(self) -> str:
        what = (
            "each embedded from one augmented view, with the closest samples that the detector"
            " flags as its kin (likely false negatives), and their similarity."
        )
        if self.flagged is None:
            what = "each with its nearest neighbours by the encoder's features, and their cosine."
        if self.has_labels:
            what += " ✓ marks the anchor's label, ✗ another label."
        number = f"{len(self.anchors):,} training samples"
        return f"{number}, {what} Click an image to make it the anchor, or use the arrow keys."

    def as_json(self) -> dict[str, Any]:
        """In random order, as samples are often sorted by class."""
        order = torch.randperm(len(self.anchors), generator=generator(0, "gallery")).numpy()

        columns = {"anchors": self.anchors, "flagged": self.flagged, "right": self.right}
        return {
            **{name: None if c is None else c[order].tolist() for name, c in columns.items()},
            "kin": [row[row >= 0].tolist() for row in self.kin[order]],
            "similarity": [rounded(row[np.isfinite(row)], 3) for row in self.similarity[order]],
            "thresholds": None if self.thresholds is None else rounded(self.thresholds[order], 3),
        }


def embed_samples(
    framework: Framework,
    data: ImageData,
    views: Views,
    ids_N: NDArray[np.int64],
    seed: int,
    *,
    progress: bool = False,
) -> Compared:
    """Only the training samples among `ids_N`. `framework`: in evaluation mode."""
    places = np.flatnonzero(ids_N < data.num_train)
    ids_M = torch.from_numpy(ids_N[places])
    if len(framework.detectors) != 1:
        features = embed(framework, data, views, ids_M, progress=progress)
        return Compared(places, ids_M, F.normalize(features, dim=1), None)
    augmented = Augmented(views, seed, 0)
    embedding = embed(framework, data, augmented, ids_M, progress=progress, projected=True)
    return Compared(places, ids_M, embedding, framework.detectors[0])


def build_gallery(
    compared: Compared, labels: Tensor | None, thresholds: Tensor | None = None
) -> Gallery:
    """Without a detector the nearest neighbours are shown."""
    detector, ids_M = compared.detector, compared.ids
    label_M = torch.full_like(ids_M, -1) if labels is None else labels[ids_M]
    kin, similarity, flagged, right = [], [], [], []
    for rows, sim_RM, same_RM in compared.blocks():
        kin_RM = ~same_RM
        if detector is not None:
            kin_RM = flagged_candidates(detector, sim_RM, ids_M[rows], ids_M, same_RM)
        nearest = sim_RM.masked_fill(~kin_RM, -torch.inf).topk(min(SHOWN, len(ids_M)), dim=1)
        kin.append(nearest.indices.masked_fill(nearest.values == -torch.inf, -1))
        similarity.append(nearest.values)
        flagged.append(kin_RM.sum(1))
        label_R1 = label_M[rows].unsqueeze(1)
        right.append((kin_RM & (label_R1 == label_M) & (label_R1 >= 0)).sum(1))
    kin_MK = torch.cat(kin).numpy()
    return Gallery(
        anchors=compared.places,
        kin=np.where(kin_MK < 0, -1, compared.places[kin_MK]),
        similarity=torch.cat(similarity).numpy(),
        flagged=None if detector is None else torch.cat(flagged).numpy(),
        right=None if labels is None or detector is None else torch.cat(right).numpy(),
        thresholds=None if thresholds is None else thresholds.float().numpy(),
        has_labels=bool((label_M >= 0).any()),
    )


# ---- the bounds of the detector


def bounds_of(compared: Compared) -> list[Bound]:
    return [] if compared.detector is None else compared.detector.inner.bounds(compared.ids)


def level_panels(compared: Compared, batch_size: int, seed: int) -> list[Panel]:
    """The distribution of each bound: learned, exact and, for thresholds, what FNC would use in a
    batch (GloFND paper, Figure 3a)."""
    bounds = bounds_of(compared)
    if not bounds or len(compared.ids) < 3:
        return []
    groups, words = list[tuple[str, Tensor, str, str]](), list[str]()

    def add(name: str, level_M: Tensor, exact_M: Tensor, colour: str, dash: str = "dot") -> None:
        known_M = level_M.isfinite()
        if bool(known_M.any()):
            groups.append((name, level_M[known_M], colour, dash))
            error = float((level_M - exact_M)[known_M].abs().mean())
            difference = f" ({error:.3f} from the exact ones)" if error else ""
            words.append(f"{name} {level_M[known_M].median():.3f}{difference}")

    title, where = "Ring", ""
    for bound, colour in zip(bounds, ("accent", "second"), strict=False):
        exact_M = exact_level(compared, bound)
        is_threshold = bound.name == "threshold"
        prefix = "" if is_threshold else f"{bound.name}, "
        if bound.learned is not None:
            add(f"{prefix}learned", bound.learned, exact_M, colour)
        add(f"{prefix}exact", exact_M, exact_M, colour, "solid")
        if is_threshold:
            title, where = "Thresholds of the samples", f", FNC in batches of {batch_size:,}"
            add("FNC", batch_levels(compared, bound.above, batch_size, seed), exact_M, "third")
    shares = " and ".join(f"{bound.above:.4g}" for bound in bounds)
    note = f"a share of {shares} lies above; exact over {len(compared.ids):,} samples{where}"
    drawn = figure(outlines(groups), "similarity", share=True)
    return [Panel("levels", title, note, f"Medians: {', '.join(words)}", drawn)]


def exact_level(compared: Compared, bound: Bound) -> Tensor:
    n_R = torch.full((ROWS,), len(compared.ids) - 1)
    levels = (
        batch_quantile(sim_RM, n_R[: len(sim_RM)], bound.above)
        for _, sim_RM, _ in compared.blocks()
    )
    return torch.cat(list(levels))


def batch_levels(compared: Compared, alpha: float, batch_size: int, seed: int) -> Tensor:
    """(M,) the lowest similarity that FNC flags in random batches."""
    order = torch.randperm(len(compared.ids), generator=generator(seed, "batches"))
    levels = torch.empty(len(order))
    for batch in order.tensor_split(max(1, len(order) // batch_size)):
        sim = (compared.embedding[batch] @ compared.embedding[batch].T).fill_diagonal_(-torch.inf)
        number = max(1, round(alpha * (len(batch) - 1)))
        levels[batch] = sim.topk(number, dim=1).values[:, -1]
    return levels


# ---- retrieval

NUM_IMAGES, NUM_QUERIES, NUM_RESULTS, SIDE, LONGEST = 500, 6, 6, 112, 300

Shown = dict[str, str]
"""The `text` or the key of a sample, and the `uri` of its image, "" for a text."""


@dataclass(frozen=True)
class Side:
    """Embeddings (C, D), ids of their samples (C,), and what to show."""

    embeddings: Tensor
    ids: Tensor
    show: Callable[[int], Shown]


def draw_retrieval(opened: OpenedRun, data: ImageData, *, progress: bool = False) -> Markup:
    """Queries and candidates are training samples, because a detector has state for these only."""
    towers, config, name = opened.towers(), opened.config, ""
    if data.texts is None:
        titles = "Captions for an image", "Images for a caption"
        first, groups, second = _images_and_captions(data, towers, config.seed, progress)
    else:
        titles = "Positives for an anchor", "Anchors for a positive"
        first, groups, second = _both_texts(data, towers, config.seed)
    detectors: tuple[Detector | None, ...] = (None, None)
    if "+" in config.method:
        name = config.method.partition("+")[2].partition(":")[0]
        with preserve_random_state():
            run = Run(opened.path)
            detectors = load_framework(config, run, data, towers.tokenizer).detectors
    return render_template(
        "report/retrieval.html",
        by_image=_search(first, second, groups, detectors[0], config.seed),
        by_text=_search(second, first, groups, detectors[1], config.seed),
        detector=name,
        titles=titles,
    )


def _images_and_captions(
    data: ImageData, towers: Towers, seed: int, progress: bool
) -> tuple[Side, Tensor, Side]:
    from PIL import Image

    text = TextData(data.samples, towers.tokenizer)
    first, of_N = data.distinct(torch.arange(data.num_train))
    ids_I = first[torch.from_numpy(choose(len(first), seed, NUM_IMAGES))]
    words, owners_C = text.all_of(torch.isin(of_N, of_N[ids_I]).nonzero()[:, 0])

    def image(at: int) -> Shown:
        (square,) = square_images(data, ids_I[at : at + 1].numpy(), SIDE)
        uri = data_uri(Image.fromarray(square), quality=80)
        return {"text": data.samples.keys[int(ids_I[at])], "uri": uri}

    images = Side(towers.images(data, ids_I, progress), ids_I, image)
    texts = Side(towers.texts(words), owners_C, lambda at: {"text": words[at], "uri": ""})
    return images, text.groups, texts


def _both_texts(data: ImageData, towers: Towers, seed: int) -> tuple[Side, Tensor, Side]:
    """Each distinct text once."""
    assert data.texts is not None
    ids = torch.from_numpy(choose(data.num_train, seed, NUM_IMAGES))
    pairs = data.texts.of(ids)

    def side(at: int) -> Side:
        first = {texts[at]: row for row, texts in reversed(list(enumerate(pairs)))}
        words, owners = list(first), ids[torch.tensor(list(first.values()))]
        shown = [{"text": short(text, LONGEST), "uri": ""} for text in words]
        return Side(towers.texts(words), owners, shown.__getitem__)

    return side(0), data.texts.groups, side(1)


def _search(
    queries: Side, others: Side, groups: Tensor, detector: Detector | None, seed: int
) -> list[dict[str, Any]]:
    """Random queries of one side, the number of candidates of the other side that are `flagged`,
    and the nearest `results`."""
    at_Q = torch.from_numpy(choose(len(queries.ids), seed, NUM_QUERIES))
    ids_Q, sim_QC = queries.ids[at_Q], queries.embeddings[at_Q] @ others.embeddings.T
    positive_QC = groups[ids_Q][:, None] == groups[others.ids]
    pos_Q1 = sim_QC.masked_fill(~positive_QC, -torch.inf).amax(1, keepdim=True)
    kin_QC = torch.zeros_like(positive_QC)
    if detector is not None:
        kin_QC = flagged_candidates(detector, sim_QC, ids_Q, others.ids, positive_QC, pos_Q1)
    nearest, found = sim_QC.topk(min(NUM_RESULTS, len(others.ids)), dim=1), []
    for row, at in enumerate(at_Q.tolist()):
        results = []
        for column, similarity in zip(
            nearest.indices[row].tolist(), nearest.values[row].tolist(), strict=True
        ):
            mark = "positive" if positive_QC[row, column] else "kin" if kin_QC[row, column] else ""
            shown = others.show(column)
            results.append({"shown": shown, "similarity": similarity, "mark": mark})
        flagged = int(kin_QC[row].sum())
        found.append({"shown": queries.show(at), "flagged": flagged, "results": results})
    return found
