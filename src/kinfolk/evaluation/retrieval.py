"""How similar the views of a sample are, and samples of one class: SPCL paper, Table 2 and Figure 2; and how far thresholds are off.

Dimension key: N samples, V views, D embedding, K classes.

Image–text retrieval: recall@k in both directions, with several captions per image.

Dimension key: I images, M captions, D embedding, R rows of a block, C candidates.

Zero-shot classification: a class is what the text tower makes of its name, in several sentences.

Radford et al., ICML 2021, section 3.1: the embeddings of a class's sentences are averaged, and the picture goes to the nearest class.

Dimension key: N images, K classes, S templates, D embedding.

The protocols of two towers as `kinfolk eval` runs them: retrieval and zero-shot classification.

Dimension key: I images, M captions, K classes, D embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.nn.functional as functional
from torch import Tensor

from kinfolk.data.images import ImageData
from kinfolk.data.labels import TEST_SPLITS
from kinfolk.data.text import TextData, Tokenizer
from kinfolk.embedding import Preparation, embed, evaluating
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.models.towers import Pair


class Similarity(NamedTuple):
    """Mean cosines: of two views of a sample (true positives), of views of different samples of one class (false negatives), and of samples
    of different classes (true negatives). NaN where there are no such pairs."""

    true_positive: float
    false_negative: float
    true_negative: float


def kin_similarity(embeddings: Tensor, labels: Tensor) -> Similarity:
    """Over all pairs of the data set, from the sums of the samples and of the classes: no N × N matrix.

        Σ over pairs of samples of a class of z·z′ = ‖Σ z‖² − Σ ‖zᵢ‖²

    Args:
        embeddings: (N, V, D), made unit norm.
        labels: (N,) classes; below 0: unknown, counts for the true positives alone.

    Example:
        >>> kin_similarity(torch.eye(2).repeat_interleave(2, 0).unsqueeze(1).expand(4, 2, 2), torch.tensor([0, 0, 1, 1]))
        Similarity(true_positive=1.0, false_negative=1.0, true_negative=0.0)
    """
    if embeddings.ndim != 3 or labels.shape != embeddings.shape[:1]:
        raise ValueError(
            f"`embeddings` (={tuple(embeddings.shape)}) and `labels` (={tuple(labels.shape)}) must have the shapes (N, views, size), (N,)"
        )
    unit_NVD = functional.normalize(embeddings.double(), dim=2)
    num_views = unit_NVD.shape[1]
    sum_ND = unit_NVD.sum(1)
    square_N = sum_ND.square().sum(1)
    own = (square_N - num_views).sum() / (len(sum_ND) * num_views * (num_views - 1)) if num_views > 1 else torch.tensor(torch.nan)
    known_N = labels >= 0
    class_N = torch.unique(labels[known_N], return_inverse=True)[1]
    size_K = torch.bincount(class_N).double()
    sum_KD = torch.zeros(len(size_K), sum_ND.shape[1], dtype=torch.float64).index_add_(0, class_N, sum_ND[known_N])
    within, everybody = sum_KD.square().sum(), sum_KD.sum(0).square().sum()
    alike, others = (size_K * (size_K - 1)).sum(), size_K.sum().square() - size_K.square().sum()
    per_pair = num_views**2
    false_negative = float((within - square_N[known_N].sum()) / (alike * per_pair)) if alike else math.nan
    return Similarity(float(own), false_negative, float((everybody - within) / (others * per_pair)) if others else math.nan)


class ThresholdError(NamedTuple):
    """Learned thresholds against the exact quantiles: mean absolute error, root mean square error, and mean difference."""

    mae: float
    rmse: float
    bias: float


def threshold_error(thresholds: Tensor, exact: Tensor) -> ThresholdError:
    """How far (N,) thresholds are from (N,) exact ones; the GloFND paper's section 5 reports MAE and RMSE.

    Example:
        >>> threshold_error(torch.tensor([0.5, 0.7]), torch.tensor([0.25, 0.95]))
        ThresholdError(mae=0.25, rmse=0.25, bias=0.0)
    """
    if thresholds.shape != exact.shape or thresholds.ndim != 1 or not len(exact):
        raise ValueError(f"`thresholds` (={tuple(thresholds.shape)}) and `exact` (={tuple(exact.shape)}) must have one shape (N,)")
    error = thresholds.double() - exact.double()
    return ThresholdError(float(error.abs().mean()), float(error.square().mean().sqrt()), float(error.mean()))


KS = (1, 5, 10)
_ENTRIES = 1 << 22


@dataclass(frozen=True)
class Recalls:
    """Shares in [0, 1], by k.

    Args:
        image_to_text: images that have one of their own captions among the k nearest captions.
        text_to_image: captions whose own image is among the k nearest images.
    """

    image_to_text: dict[int, float]
    text_to_image: dict[int, float]

    @property
    def mean(self) -> float:
        """Over both directions and all k."""
        values = [*self.image_to_text.values(), *self.text_to_image.values()]
        return sum(values) / len(values)


def retrieval(images_ID: Tensor, texts_MD: Tensor, owners_M: Tensor, ks: Sequence[int] = KS) -> Recalls:
    """Recall@k of images and their captions, by cosine, in row blocks: no I × M matrix is kept.

    An image counts as found if any of its captions is; every caption is a query of its own. Candidates as near as the own one stand
    before or after it by chance, so that embeddings that are all alike come to chance and not to 1.

    Args:
        images_ID: each image once, unit norm.
        texts_MD: all captions, unit norm.
        owners_M: the row of each caption's image.
        ks: the numbers of nearest candidates looked at.

    Example:
        >>> found = retrieval(torch.eye(3), torch.eye(3)[[0, 0, 1, 2]], torch.tensor([0, 0, 1, 2]))
        >>> found.image_to_text[1], found.text_to_image[1]
        (1.0, 1.0)
    """
    if len(owners_M) != len(texts_MD):
        raise ValueError(f"`owners_M` (={len(owners_M)}) must be as many as `texts_MD` (={len(texts_MD)} rows)")
    if not len(owners_M) or int(owners_M.min()) < 0 or int(owners_M.max()) >= len(images_ID):
        raise ValueError(f"`owners_M` must name rows of `images_ID` (={len(images_ID)} rows)")
    if len(torch.unique(owners_M)) < len(images_ID):
        raise ValueError("`owners_M` must name every image at least once: an image without a caption can't be found")
    if not (images_ID.isfinite().all() and texts_MD.isfinite().all()):
        raise KinfolkError("the embeddings are not all finite numbers; nothing can be found by them")
    rows_I = torch.arange(len(images_ID), device=owners_M.device)
    return Recalls(_recall(images_ID, texts_MD, rows_I, owners_M, ks), _recall(texts_MD, images_ID, owners_M, rows_I, ks))


def _recall(queries: Tensor, candidates: Tensor, keys: Tensor, candidate_keys: Tensor, ks: Sequence[int]) -> dict[int, float]:
    """The share of queries that have a candidate of their own key among the k nearest."""
    hits = dict.fromkeys(ks, 0.0)
    size = max(1, _ENTRIES // len(candidates))
    for start in range(0, len(queries), size):
        sim_RC = queries[start : start + size] @ candidates.T
        own_RC = keys[start : start + size, None] == candidate_keys
        best_R1 = sim_RC.masked_fill(~own_RC, -torch.inf).amax(1, keepdim=True)
        others_RC = sim_RC.masked_fill(own_RC, -torch.inf)
        nearer_R, equal_R = (others_RC > best_R1).sum(1), (others_RC == best_R1).sum(1)
        for k in ks:
            hits[k] += float(((k - nearer_R).double() / (equal_R + 1)).clamp(0, 1).sum())
    return {k: hit / len(queries) for k, hit in hits.items()}


TEMPLATES = (
    "a photo of a {}.",
    "a photo of the {}.",
    "a picture of a {}.",
    "a photo of a small {}.",
    "a photo of a large {}.",
    "a close-up photo of a {}.",
    "{}",
)


def class_embeddings(embed: Callable[[list[str]], Tensor], classes: Sequence[str], templates: Sequence[str] = TEMPLATES) -> Tensor:
    """(K, D) unit norm: the mean of each class's sentences.

    Args:
        embed: texts → (number, D), unit norm.
        classes: K names.
        templates: sentences with {} for the name.
    """
    if not classes:
        raise UsageError("zero-shot classification needs the names of the classes; give labelled data whose classes have names, or a file")
    for template in templates:
        if "{}" not in template:
            raise UsageError(f"the template {template!r} has no place for the name of a class; write {{}} where it belongs")
    if not templates:
        raise UsageError("zero-shot classification needs at least one template")
    sentences = [template.replace("{}", name.replace("_", " ")) for name in classes for template in templates]
    each_KSD = embed(sentences).view(len(classes), len(templates), -1)
    return F.normalize(each_KSD.mean(1), dim=-1)


def zero_shot(images_ND: Tensor, labels_N: Tensor, classes_KD: Tensor, ks: Sequence[int] = (1, 5)) -> dict[int, float]:
    """The share of images whose class is among the k nearest, by k; images with a label below 0 are left out."""
    known = labels_N >= 0
    images_ND, labels_N = images_ND[known], labels_N[known]
    if not len(labels_N):
        raise UsageError("the data has no labels to measure with")
    if int(labels_N.max()) >= len(classes_KD):
        raise UsageError(f"the data has the label {int(labels_N.max())}, and there are names for {len(classes_KD)} classes only")
    if not (images_ND.isfinite().all() and classes_KD.isfinite().all()):
        raise KinfolkError("the embeddings are not all finite numbers; nothing can be found by them")
    sim_NK = images_ND @ classes_KD.T
    own_N1 = sim_NK.gather(1, labels_N[:, None])
    nearer_N = (sim_NK > own_N1).sum(1)
    equal_N = (sim_NK == own_N1).sum(1)  # itself among them; as near as the own one, by chance before or after it
    return {k: float(((k - nearer_N).double() / equal_N).clamp(0, 1).mean()) for k in ks}


def read_lines(path: str | Path) -> list[str]:
    """The lines of a text file, without empty ones: names of classes, or templates."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can't be read: {error}") from error
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise UsageError(f"{path} is empty; it must hold one name or template a line")
    return found


def embedder(
    model: Callable[[Tensor], Tensor], encode: Callable[[Sequence[str]], Tensor], batch_size: int = 256
) -> Callable[[list[str]], Tensor]:
    """Texts → embeddings on the CPU, from a tower and a tokenizer."""

    @torch.no_grad()
    def embed(texts: list[str]) -> Tensor:
        tokens = encode(texts)
        return torch.cat([model(tokens[start : start + batch_size]).float().cpu() for start in range(0, len(tokens), batch_size)])

    return embed


@dataclass(frozen=True)
class Towers:
    """What a run left to measure: both towers, how its pictures are prepared, and its tokenizer."""

    pair: Pair
    views: Preparation
    tokenizer: Tokenizer
    device: torch.device | str = "cpu"

    def texts(self, texts: Sequence[str]) -> Tensor:
        """(M, D) unit norm, on the CPU."""
        self.pair.to(self.device)
        with evaluating(self.pair):
            return embedder(lambda tokens: self.pair.embed_text(tokens.to(self.device)), self.tokenizer.encode)(list(texts))

    def images(self, data: ImageData, ids: Tensor, progress: bool) -> Tensor:
        """(I, D) unit norm, on the CPU."""
        return embed(self.pair, data, self.views, ids, device=self.device, projected=True, progress=progress)


def run_retrieval(towers: Towers, data: ImageData, *, progress: bool = False) -> dict[str, Any]:
    """Recall@1, 5, 10 in both directions over the test split, or over all samples where there is none. An image that several samples
    share counts once, with the captions of all of them."""
    ids, where = measured(data)
    text = TextData(data.samples, towers.tokenizer)
    rows_M = text.rows(ids)
    first_I, owners_M = data.distinct(text.owners[rows_M])
    images_ID = towers.images(data, text.owners[rows_M][first_I], progress)
    towers.pair.to(towers.device)
    with evaluating(towers.pair), torch.no_grad():
        tokens_MT = text.tokens[rows_M]
        parts = [towers.pair.embed_text(part.to(towers.device)).float().cpu() for part in tokens_MT.split(256)]  # type: ignore[no-untyped-call]
    found = retrieval(images_ID, torch.cat(parts), owners_M)
    return {
        "image_to_text": {f"R@{k}": value for k, value in found.image_to_text.items()},
        "text_to_image": {f"R@{k}": value for k, value in found.text_to_image.items()},
        "mean": found.mean,
        "images": len(images_ID),
        "captions": len(rows_M),
        "chance": 1 / len(images_ID),
        "measured_on": where,
    }


def run_zero_shot(
    towers: Towers,
    data: ImageData,
    *,
    classes: Sequence[str] | None = None,
    templates: Sequence[str] = TEMPLATES,
    progress: bool = False,
) -> dict[str, Any]:
    """Accuracy over the labelled samples of the test split, or over all where there is none; `classes` are the data's own unless given."""
    names = list(classes) if classes is not None else list(data.classes or ())
    if data.labels is None:
        raise UsageError(
            "the data has no labels to measure with; give labelled data, or --labels-from-folders if its folders are the classes"
        )
    ids, where = measured(data)
    ids = ids[data.labels[ids] >= 0]
    if not len(ids):
        raise UsageError("none of the samples to measure with has a label")
    classes_KD = class_embeddings(towers.texts, names, templates)
    found = zero_shot(towers.images(data, ids, progress), data.labels[ids], classes_KD)
    return {
        "accuracy": found[1],
        "top5": found[5],
        "classes": len(names),
        "templates": len(templates),
        "test": len(ids),
        "measured_on": where,
    }


def measured(data: ImageData) -> tuple[Tensor, str]:
    """The ids of the test split, or of all samples, and what to call them."""
    splits = data.samples.splits
    chosen = next((split for split in TEST_SPLITS if split in splits), None)
    if chosen is None:
        return torch.arange(len(data)), "all samples"
    return torch.tensor([row for row, split in enumerate(splits) if split == chosen]), f"{chosen} split"
