"""The protocols of two towers as `kinfolk eval` runs them: retrieval and zero-shot classification.

Dimension key: I images, M captions, K classes, D embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kinfolk.data.images import ImageData
from kinfolk.data.splits import TEST_SPLITS
from kinfolk.data.text import TextData
from kinfolk.data.tokenizer import Tokenizer
from kinfolk.errors import UsageError
from kinfolk.evaluation.embed import Preparation, embed, evaluating
from kinfolk.evaluation.retrieval import retrieval
from kinfolk.evaluation.zero_shot import TEMPLATES, class_embeddings, embedder, zero_shot
from kinfolk.models.pair import Pair


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
