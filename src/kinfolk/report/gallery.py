"""Galleries of the report: anchors with their kin and the bounds of the detector, and for
image-text runs the retrieval in both directions.

The run's detector is applied after the training to one augmented view of each sample, because
detectors see augmented views in training. Without a detector the gallery shows nearest neighbours.

Dimension key: N samples of the map (in the retrieval: training samples), M training samples among
them (captions), D embedding, R rows of a block, K kin shown, I images, Q queries, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from kinfolk.report.html import Panel, figure, outlines, render_template
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
    """Training samples that are compared with each other.

    Args:
        places, ids: (M,) positions among the samples of the map, and sample ids.
        embedding: (M, D) unit norm: projected embeddings of augmented views for a detector,
            features of the images as they are without one.
    """

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
    """Each anchor with its closest kin.

    Args:
        anchors: (M,) positions on the map.
        kin, similarity: (M, K) positions and cosines, the closest first; −1 and −inf where there
            are fewer.
        flagged, right: (M,) number of all kin and of kin with the anchor's label; None without a
            detector or without labels.
        thresholds: (M,) learned thresholds, if there are any.
        same: without a detector, the share of labelled anchors whose nearest neighbour has their
            label.
    """

    anchors: NDArray[np.int64]
    kin: NDArray[np.int64]
    similarity: NDArray[np.float32]
    flagged: NDArray[np.int64] | None
    right: NDArray[np.int64] | None
    thresholds: NDArray[np.float32] | None
    has_labels: bool
    same: float | None = None

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
            if self.same is not None:
                what += f" For {self.same:.1%} of the anchors the nearest has their label."
        if self.has_labels:
            what += " ✓ marks the anchor's label, ✗ another label."
        number = f"{len(self.anchors):,} training samples"
        return f"{number}, {what} Click an image to make it the anchor, or use the arrow keys."

    def as_json(self) -> dict[str, Any]:
        """Data for the page's script."""
        # samples are often sorted by class
        order = torch.randperm(len(self.anchors), generator=generator(0, "gallery")).numpy()

        def rounded(values: Any) -> list[float]:
            return [round(float(value), 3) for value in values]

        kin = [row[row >= 0] for row in self.kin[order]]
        similarity = [row[np.isfinite(row)] for row in self.similarity[order]]
        return {
            "anchors": self.anchors[order].tolist(),
            "kin": [row.tolist() for row in kin],
            "similarity": [rounded(row) for row in similarity],
            "flagged": None if self.flagged is None else self.flagged[order].tolist(),
            "right": None if self.right is None else self.right[order].tolist(),
            "thresholds": None if self.thresholds is None else rounded(self.thresholds[order]),
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
    """Embeds the training samples among `ids_N`; the framework must be in evaluation mode."""
    places = np.flatnonzero(ids_N < data.num_train)
    ids_M = torch.from_numpy(ids_N[places])
    if len(framework.detectors) != 1:
        features = embed(framework, data, views, ids_M, progress=progress)
        return Compared(places, ids_M, F.normalize(features, dim=1), None)
    augmented = Augmented(views, seed, 0)
    embedding = embed(framework, data, augmented, ids_M, progress=progress, projected=True)
    return Compared(places, ids_M, embedding, framework.detectors[0])


def find_kin(
    compared: Compared, labels: Tensor | None, thresholds: Tensor | None = None
) -> Gallery:
    """Applies the detector to all pairs; without a detector the nearest neighbours are shown."""
    detector, ids_M = compared.detector, compared.ids
    label_M = None if labels is None else labels[ids_M]
    kin, similarity, flagged, right = [], [], [], []
    for rows, sim_RM, same_RM in compared.blocks():
        kin_RM = ~same_RM
        if detector is not None:
            kin_RM = flagged_candidates(detector, sim_RM, ids_M[rows], ids_M, same_RM)
        nearest = sim_RM.masked_fill(~kin_RM, -torch.inf).topk(min(SHOWN, len(ids_M)), dim=1)
        kin.append(nearest.indices.masked_fill(nearest.values == -torch.inf, -1))
        similarity.append(nearest.values)
        flagged.append(kin_RM.sum(1))
        if label_M is not None:
            label_R1 = label_M[rows].unsqueeze(1)
            right.append((kin_RM & (label_R1 == label_M) & (label_R1 >= 0)).sum(1))
    kin_MK, same = torch.cat(kin).numpy(), None
    if label_M is not None and detector is None and bool((known_M := label_M >= 0).any()):
        nearest_M = label_M[torch.from_numpy(kin_MK[:, 0])]
        same = float((nearest_M == label_M)[known_M].double().mean())
    return Gallery(
        anchors=compared.places,
        kin=np.where(kin_MK < 0, -1, compared.places[kin_MK]),
        similarity=torch.cat(similarity).numpy(),
        flagged=None if detector is None else torch.cat(flagged).numpy(),
        right=torch.cat(right).numpy() if right and detector is not None else None,
        thresholds=None if thresholds is None else thresholds.float().numpy(),
        has_labels=label_M is not None and bool((label_M >= 0).any()),
        same=same,
    )


# ---- the bounds of the detector


def bounds_of(compared: Compared) -> list[Bound]:
    return [] if compared.detector is None else compared.detector.inner.bounds(compared.ids)


def level_panels(compared: Compared, batch_size: int, seed: int) -> list[Panel]:
    """A panel with the distribution of each bound: learned, exact and, for thresholds, what FNC
    would use in a batch (GloFND paper, Figure 3a). Empty without bounds or with too few samples."""
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

    exact, colours = exact_levels(compared, bounds), ("accent", "second")
    title, where = "Ring", ""
    for bound, exact_M, colour in zip(bounds, exact, colours, strict=False):
        is_threshold = bound.name == "threshold"
        prefix = "" if is_threshold else f"{bound.name}, "
        if bound.learned is not None:
            add(f"{prefix}learned", bound.learned, exact_M, colour)
        add(f"{prefix}exact", exact_M, exact_M, colour, "solid")
        if is_threshold:
            title, where = "Thresholds of the samples", f", FNC in batches of {batch_size:,}"
            batch_M = batch_levels(compared, bound.above, batch_size, seed)
            add("FNC", batch_M, exact_M, "third")
    shares = " and ".join(f"{bound.above:.4g}" for bound in bounds)
    note = f"a share of {shares} lies above; exact over {len(compared.ids):,} samples{where}"
    drawn = figure(outlines(groups), "similarity", share=True)
    return [Panel("levels", title, note, f"Medians: {', '.join(words)}", drawn)]


def exact_levels(compared: Compared, bounds: list[Bound]) -> list[Tensor]:
    """(M,) for each bound, the exact quantile over all other samples."""
    levels: list[list[Tensor]] = [[] for _ in bounds]
    for _, sim_RM, _ in compared.blocks():
        n_R = torch.full((len(sim_RM),), len(compared.ids) - 1)
        for level, bound in zip(levels, bounds, strict=True):
            level.append(batch_quantile(sim_RM, n_R, bound.above))
    return [torch.cat(level) for level in levels]


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
Query = dict[str, Any]
"""A query (`shown`), the number of candidates that are `flagged`, and its nearest `results`, each
with `shown`, its `similarity`, and a `mark`: "positive", "kin" or ""."""


@dataclass(frozen=True)
class Side:
    """The images or the texts, and what to show of each."""

    embeddings: Tensor
    ids: Tensor
    show: Callable[[int], Shown]


def draw_retrieval(opened: OpenedRun, data: ImageData, *, progress: bool = False) -> Markup | None:
    """The retrieval section of the page; None for a run without texts. Queries and candidates are
    training samples, because a detector has state for these only."""
    if "text" not in opened.modalities:
        return None
    towers, config = opened.towers(), opened.config
    titles = "Captions for an image", "Images for a caption"
    if data.texts is None:
        first, groups, second = _images_and_captions(data, towers, config.seed, progress)
    else:
        titles = "Positives for an anchor", "Anchors for a positive"
        first, groups, second = _both_texts(data, towers, config.seed)
    detectors: tuple[Detector | None, ...] = (None, None)
    if "+" in config.method:
        with preserve_random_state():
            run = Run(opened.path)
            detectors = load_framework(config, run, data, towers.tokenizer).detectors
    return retrieval_section(
        _search(first, second, groups, detectors[0], config.seed),
        _search(second, first, groups, detectors[1], config.seed),
        "" if detectors[0] is None else config.method.partition("+")[2].partition(":")[0],
        titles,
    )


def _images_and_captions(
    data: ImageData, towers: Towers, seed: int, progress: bool
) -> tuple[Side, Tensor, Side]:
    text = TextData(data.samples, towers.tokenizer)
    first, of_N = data.distinct(torch.arange(data.num_train))
    ids_I = first[torch.from_numpy(choose(len(first), seed, NUM_IMAGES))]
    words, owners_M = text.all_of(torch.isin(of_N, of_N[ids_I]).nonzero()[:, 0])

    def image(at: int) -> Shown:
        from PIL import Image

        (square,) = square_images(data, ids_I[at : at + 1].numpy(), SIDE)
        uri = data_uri(Image.fromarray(square), quality=80)
        return {"text": data.samples.keys[int(ids_I[at])], "uri": uri}

    images = Side(towers.images(data, ids_I, progress), ids_I, image)
    texts = Side(towers.texts(words), owners_M, lambda at: {"text": words[at], "uri": ""})
    return images, text.groups, texts


def _both_texts(data: ImageData, towers: Towers, seed: int) -> tuple[Side, Tensor, Side]:
    """Anchors and positives of some text pairs, each distinct text once."""
    assert data.texts is not None
    ids = torch.from_numpy(choose(data.num_train, seed, NUM_IMAGES))
    pairs = data.texts.of(ids)

    def side(at: int) -> Side:
        first = {texts[at]: row for row, texts in reversed(list(enumerate(pairs)))}
        words = list(first)
        owners, shown = ids[torch.tensor(list(first.values()))], [short(w, LONGEST) for w in words]
        return Side(towers.texts(words), owners, lambda row: {"text": shown[row], "uri": ""})

    return side(0), data.texts.groups, side(1)


def _search(
    queries: Side, others: Side, groups: Tensor, detector: Detector | None, seed: int
) -> list[Query]:
    """Nearest candidates on the other side for random queries of one side."""
    at_Q = torch.from_numpy(choose(len(queries.ids), seed, NUM_QUERIES))
    ids_Q, sim_QC = queries.ids[at_Q], queries.embeddings[at_Q] @ others.embeddings.T
    positive_QC = groups[ids_Q][:, None] == groups[others.ids]
    pos_Q1 = sim_QC.masked_fill(~positive_QC, -torch.inf).amax(1, keepdim=True)
    kin_QC = torch.zeros_like(positive_QC)
    if detector is not None:
        kin_QC = flagged_candidates(detector, sim_QC, ids_Q, others.ids, positive_QC, pos_Q1)
    nearest = sim_QC.topk(min(NUM_RESULTS, len(others.ids)), dim=1)
    found = []
    for row, at in enumerate(at_Q.tolist()):
        results = []
        for column in nearest.indices[row].tolist():
            mark = "positive" if positive_QC[row, column] else "kin" if kin_QC[row, column] else ""
            similarity = float(sim_QC[row, column])
            results.append({"shown": others.show(column), "similarity": similarity, "mark": mark})
        flagged = int(kin_QC[row].sum())
        found.append({"shown": queries.show(at), "flagged": flagged, "results": results})
    return found


def retrieval_section(
    by_image: Sequence[Query], by_text: Sequence[Query], detector: str, titles: tuple[str, str]
) -> Markup:
    words = {"by_image": by_image, "by_text": by_text, "detector": detector, "titles": titles}
    return render_template("report/retrieval.html", **words)
