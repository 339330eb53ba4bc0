"""The protocols of `kinfolk eval` for image–text models: retrieval and zero-shot classification.

Retrieval is recall@k in both directions, with several captions per image. In zero-shot
classification (Radford et al., ICML 2021, section 3.1) a class is the mean text embedding of
several sentences with its name, and an image is assigned to the nearest class.

Dimension key: N samples, I images, M captions, K classes, S templates, D embedding, R rows of a
block, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.data.images import ImageData
from kinfolk.data.labels import TEST_SPLITS
from kinfolk.data.text import TextData, Tokenizer
from kinfolk.embedding import Preparation, embed, evaluating
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.models.towers import Pair

KS = (1, 5, 10)
_ENTRIES = 1 << 22


@dataclass(frozen=True)
class Recalls:
    """Recall@k in both directions, in [0, 1].

    Args:
        image_to_text: share of images that have one of their own captions among the k nearest
            captions.
        text_to_image: share of captions whose own image is among the k nearest images.
    """

    image_to_text: dict[int, float]
    text_to_image: dict[int, float]

    @property
    def mean(self) -> float:
        """Mean over both directions and all k."""
        values = [*self.image_to_text.values(), *self.text_to_image.values()]
        return sum(values) / len(values)


def retrieval(
    images_ID: Tensor, texts_MD: Tensor, owners_M: Tensor, ks: Sequence[int] = KS
) -> Recalls:
    """Recall@k of images and their captions by cosine similarity, in row blocks. No I × M matrix is
    kept.

    An image counts as found if any of its captions is found. Every caption is a query. Candidates
    at the same similarity are ranked in random order (in expectation), so that equal embeddings
    score chance level and not 1.

    Args:
        images_ID: each image once, unit norm.
        texts_MD: all captions, unit norm.
        owners_M: the row of each caption's image.
        ks: values of k.

    Example:
        >>> found = retrieval(torch.eye(3), torch.eye(3)[[0, 0, 1, 2]], torch.tensor([0, 0, 1, 2]))
        >>> found.image_to_text[1], found.text_to_image[1]
        (1.0, 1.0)
    """
    if len(owners_M) != len(texts_MD):
        raise ValueError(
            f"`owners_M` (={len(owners_M)}) must have one entry per row of `texts_MD`"
            f" (={len(texts_MD)})"
        )
    if not len(owners_M) or int(owners_M.min()) < 0 or int(owners_M.max()) >= len(images_ID):
        raise ValueError(f"`owners_M` must be row numbers of `images_ID` (={len(images_ID)} rows)")
    if len(torch.unique(owners_M)) < len(images_ID):
        raise ValueError(
            "`owners_M` must contain every image at least once; an image without a caption cannot"
            " be retrieved"
        )
    if not (images_ID.isfinite().all() and texts_MD.isfinite().all()):
        raise KinfolkError("the embeddings contain values that are not finite")
    rows_I = torch.arange(len(images_ID), device=owners_M.device)
    return Recalls(
        _recall(images_ID, texts_MD, rows_I, owners_M, ks),
        _recall(texts_MD, images_ID, owners_M, rows_I, ks),
    )


def _recall(
    queries: Tensor, candidates: Tensor, keys: Tensor, candidate_keys: Tensor, ks: Sequence[int]
) -> dict[int, float]:
    """Share of queries that have a candidate with their own key among the k nearest."""
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


def class_embeddings(
    embed: Callable[[list[str]], Tensor],
    classes: Sequence[str],
    templates: Sequence[str] = TEMPLATES,
) -> Tensor:
    """(K, D) unit-norm mean embedding of the sentences of each class.

    Args:
        embed: texts → (number, D) unit-norm embeddings.
        classes: K names.
        templates: sentences with {} in place of the name.
    """
    if not classes:
        raise UsageError(
            "zero-shot classification needs the names of the classes; give labelled data whose"
            " classes have names, or a file"
        )
    for template in templates:
        if "{}" not in template:
            raise UsageError(
                f"the template {template!r} does not contain {{}}, which stands for the name of the"
                " class"
            )
    if not templates:
        raise UsageError("zero-shot classification needs at least one template")
    sentences = [
        template.replace("{}", name.replace("_", " ")) for name in classes for template in templates
    ]
    each_KSD = embed(sentences).view(len(classes), len(templates), -1)
    return F.normalize(each_KSD.mean(1), dim=-1)


def zero_shot(
    images_ND: Tensor, labels_N: Tensor, classes_KD: Tensor, ks: Sequence[int] = (1, 5)
) -> dict[int, float]:
    """Share of images whose class is among the k nearest, for each k. Images with a label below 0
    are left out."""
    known = labels_N >= 0
    images_ND, labels_N = images_ND[known], labels_N[known]
    if not len(labels_N):
        raise UsageError("the data has no labels, which zero-shot accuracy needs")
    if int(labels_N.max()) >= len(classes_KD):
        raise UsageError(
            f"the data has the label {int(labels_N.max())}, but there are names for"
            f" {len(classes_KD)} classes"
        )
    if not (images_ND.isfinite().all() and classes_KD.isfinite().all()):
        raise KinfolkError("the embeddings contain values that are not finite")
    sim_NK = images_ND @ classes_KD.T
    own_N1 = sim_NK.gather(1, labels_N[:, None])
    nearer_N = (sim_NK > own_N1).sum(1)
    equal_N = (sim_NK == own_N1).sum(1)  # includes the own class; ties are ranked in random order
    return {k: float(((k - nearer_N).double() / equal_N).clamp(0, 1).mean()) for k in ks}


def read_lines(path: str | Path) -> list[str]:
    """Class names or templates from a text file, one per line. Empty lines are skipped."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise UsageError(f"{path} is empty; it must contain one name or template per line")
    return found


def embedder(
    model: Callable[[Tensor], Tensor],
    encode: Callable[[Sequence[str]], Tensor],
    batch_size: int = 256,
) -> Callable[[list[str]], Tensor]:
    """A function from texts to embeddings on the CPU, made from a text tower and a tokenizer."""

    @torch.no_grad()
    def embed(texts: list[str]) -> Tensor:
        tokens = encode(texts)
        return torch.cat(
            [
                model(tokens[start : start + batch_size]).float().cpu()
                for start in range(0, len(tokens), batch_size)
            ]
        )

    return embed


@dataclass(frozen=True)
class Towers:
    """Both towers of a run, the preparation of its images, and its tokenizer."""

    pair: Pair
    views: Preparation
    tokenizer: Tokenizer
    device: torch.device | str = "cpu"

    def texts(self, texts: Sequence[str]) -> Tensor:
        """(M, D) unit-norm text embeddings on the CPU."""
        self.pair.to(self.device)
        with evaluating(self.pair):
            return embedder(
                lambda tokens: self.pair.embed_text(tokens.to(self.device)), self.tokenizer.encode
            )(list(texts))

    def images(self, data: ImageData, ids: Tensor, progress: bool) -> Tensor:
        """(I, D) unit-norm image embeddings on the CPU."""
        return embed(
            self.pair, data, self.views, ids, device=self.device, projected=True, progress=progress
        )


def run_retrieval(towers: Towers, data: ImageData, *, progress: bool = False) -> dict[str, Any]:
    """Recall@1, 5, 10 in both directions over the test split, or over all samples if there is none.
    An image that several samples share counts once, with the captions of all of them."""
    ids, where = measured(data)
    text = TextData(data.samples, towers.tokenizer)
    rows_M = text.rows(ids)
    first_I, owners_M = data.distinct(text.owners[rows_M])
    images_ID = towers.images(data, text.owners[rows_M][first_I], progress)
    towers.pair.to(towers.device)
    with evaluating(towers.pair), torch.no_grad():
        tokens_MT = text.tokens[rows_M]
        parts = [
            towers.pair.embed_text(part.to(towers.device)).float().cpu()
            for part in tokens_MT.split(256)  # type: ignore[no-untyped-call]
        ]
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
    """Accuracy over the labelled samples of the test split, or over all if there is none. `classes`
    defaults to those of the data."""
    names = list(classes) if classes is not None else list(data.classes or ())
    if data.labels is None:
        raise UsageError(
            "the data has no labels, which zero-shot accuracy needs; give labelled data, or"
            " --labels-from-folders if folders are classes"
        )
    ids, where = measured(data)
    ids = ids[data.labels[ids] >= 0]
    if not len(ids):
        raise UsageError("none of the evaluated samples has a label")
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
    """Ids of the test split, or of all samples if there is none, and a name for the result."""
    splits = data.samples.splits
    chosen = next((split for split in TEST_SPLITS if split in splits), None)
    if chosen is None:
        return torch.arange(len(data)), "all samples"
    return (
        torch.tensor([row for row, split in enumerate(splits) if split == chosen]),
        f"{chosen} split",
    )
