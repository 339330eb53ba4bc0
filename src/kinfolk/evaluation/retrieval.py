"""The protocols of `kinfolk eval` for two towers: retrieval, zero-shot classification (Radford et
al., ICML 2021, section 3.1), and the agreement of text similarities with scores by people (STS).

Dimension key: N samples, I images, M captions, K classes, S templates, D embedding, Q queries, C
candidates, R rows of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.data.images import ImageData
from kinfolk.data.labels import TEST_SPLITS
from kinfolk.data.text import TextData, Tokenizer
from kinfolk.embedding import Preparation, embed
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.models.heads import evaluating
from kinfolk.models.weights import Pair
from kinfolk.seeding import draw_ids

KS = (1, 5, 10)
MOST_PAIRS = 20_000
"""Text pairs that are evaluated; of more, this many are drawn."""
DEPTH = 10
_ENTRIES, _TEXTS = 1 << 22, 256


def recall(
    queries: Tensor,
    candidates: Tensor,
    keys: Tensor,
    candidate_keys: Tensor,
    ks: Sequence[int] = KS,
) -> dict[int, float]:
    """Share of queries that have a candidate with their key among the k nearest by cosine
    similarity. Equal similarities are ranked in random order, in expectation."""
    _require_finite(queries, candidates)
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


def _require_finite(*embeddings: Tensor) -> None:
    if not all(bool(each.isfinite().all()) for each in embeddings):
        raise KinfolkError("the embeddings contain values that are not finite")


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
    """(K, D) unit-norm mean embedding of the templates with the name of each class in place of
    {}."""
    if not classes:
        raise UsageError(
            "zero-shot classification needs the names of the classes; give labelled data whose"
            " classes have names"
        )
    names = [name.replace("_", " ") for name in classes]
    sentences = [template.replace("{}", name) for name in names for template in templates]
    each_KSD = embed(sentences).view(len(classes), len(templates), -1)
    return F.normalize(each_KSD.mean(1), dim=-1)


@dataclass(frozen=True)
class Towers:
    pair: Pair
    views: Preparation
    tokenizer: Tokenizer
    device: torch.device | str = "cpu"

    def texts(self, texts: Sequence[str]) -> Tensor:
        self.pair.to(self.device)
        with evaluating(self.pair), torch.no_grad():
            parts = torch.split(self.tokenizer.encode(texts), _TEXTS)
            embedded = [self.pair.embed_text(part.to(self.device)).float().cpu() for part in parts]
        return torch.cat(embedded)

    def images(self, data: ImageData, ids: Tensor, progress: bool) -> Tensor:
        return embed(
            self.pair, data, self.views, ids, device=self.device, projected=True, progress=progress
        )


def run_retrieval(towers: Towers, data: ImageData, *, progress: bool = False) -> dict[str, Any]:
    """Over the test split, or over all samples. An image that several samples share counts once,
    with the captions of all of them."""
    ids, where = evaluated_ids(data)
    text = TextData(data.samples, towers.tokenizer)
    captions, samples_M = text.all_of(ids)
    first_I, owners_M = data.distinct(samples_M)
    images_ID, texts_MD = towers.images(data, samples_M[first_I], progress), towers.texts(captions)
    rows_I = torch.arange(len(images_ID))
    forward = recall(images_ID, texts_MD, rows_I, owners_M)
    backward = recall(texts_MD, images_ID, owners_M, rows_I)
    return {
        "image_to_text": {f"R@{k}": value for k, value in forward.items()},
        "text_to_image": {f"R@{k}": value for k, value in backward.items()},
        "mean": fmean((*forward.values(), *backward.values())),
        "images": len(images_ID),
        "captions": len(captions),
        "chance": 1 / len(images_ID),
        "measured_on": where,
    }


def run_zero_shot(towers: Towers, data: ImageData, *, progress: bool = False) -> dict[str, Any]:
    ids, where = evaluated_ids(data)
    if data.labels is None or not len(ids := ids[data.labels[ids] >= 0]):
        raise UsageError(
            "the evaluated samples have no labels, which zero-shot accuracy needs; give labelled"
            " data, or --labels-from-folders if folders are classes"
        )
    classes_KD = class_embeddings(towers.texts, data.classes or ())
    rows_K = torch.arange(len(classes_KD))
    images_ND = towers.images(data, ids, progress)
    found = recall(images_ND, classes_KD, data.labels[ids], rows_K, (1, 5))
    return {
        "accuracy": found[1],
        "top5": found[5],
        "classes": len(classes_KD),
        "templates": len(TEMPLATES),
        "test": len(ids),
        "measured_on": where,
    }


def evaluated_ids(data: ImageData) -> tuple[Tensor, str]:
    """Ids of the test split, or of all samples if there is none, and a name for the result."""
    splits = data.samples.splits
    chosen = next((split for split in TEST_SPLITS if split in splits), None)
    if chosen is None:
        return torch.arange(len(data)), "all samples"
    rows = [row for row, split in enumerate(splits) if split == chosen]
    return torch.tensor(rows), f"{chosen} split"


# Text pairs


@dataclass(frozen=True)
class Ranking:
    """Means over the `queries` that have a relevant candidate."""

    recall: dict[int, float]
    map: float
    ndcg: float
    queries: int


def rank(
    queries_QD: Tensor,
    candidates_CD: Tensor,
    keys_Q: Tensor,
    candidate_keys_C: Tensor,
    *,
    leave_one_out: bool = False,
) -> Ranking:
    """Candidates with the query's key are relevant; they come last among equal similarities.
    `leave_one_out`: the candidates are the queries, and none is a candidate of itself."""
    _require_finite(queries_QD, candidates_CD)
    discount_K = 1 / torch.arange(2, DEPTH + 2).double().log2()
    sums, number = torch.zeros(len(KS) + 2, dtype=torch.float64), 0
    size = max(1, _ENTRIES // len(candidates_CD))
    for start in range(0, len(queries_QD), size):
        sim_RC = queries_QD[start : start + size] @ candidates_CD.T
        own_RC = keys_Q[start : start + size, None] == candidate_keys_C
        if leave_one_out:
            sim_RC.diagonal(start).fill_(-torch.inf)
            own_RC.diagonal(start).fill_(False)
        kept_R = own_RC.any(1)
        sim_RC, own_RC = sim_RC[kept_R], own_RC[kept_R]
        lower_RC = sim_RC.nextafter(sim_RC.new_tensor(-torch.inf))
        order_RC = torch.where(own_RC, lower_RC, sim_RC).argsort(dim=1, descending=True)
        hit_RC = own_RC.gather(1, order_RC).double()
        total_R = hit_RC.sum(1)
        precision_RC = hit_RC.cumsum(1) / torch.arange(1, hit_RC.shape[1] + 1)
        first = hit_RC[:, :DEPTH]
        gain_R = (first * discount_K[: first.shape[1]]).sum(1)
        best_R = discount_K.cumsum(0)[total_R.clamp(max=min(DEPTH, hit_RC.shape[1])).long() - 1]
        recalls = [hit_RC[:, :k].amax(1).sum() for k in KS]
        average_precision = ((hit_RC * precision_RC).sum(1) / total_R).sum()
        sums += torch.stack([*recalls, average_precision, (gain_R / best_R).sum()])
        number += len(hit_RC)
    means = (sums / number).tolist() if number else [math.nan] * len(sums)
    return Ranking(dict(zip(KS, means, strict=False)), means[-2], means[-1], number)


def run_pair_retrieval(towers: Towers, data: ImageData, seed: int = 0) -> dict[str, Any]:
    """In both directions over the test split, or over all samples. Each distinct text is one
    candidate; relevant are the texts of the query's group. With labels also mAP and nDCG@10 of
    anchors that search other anchors of their label."""
    assert data.texts is not None
    ids, where = evaluated_ids(data)
    if len(ids) > MOST_PAIRS:
        ids = ids[draw_ids(len(ids), MOST_PAIRS, seed, "pair-retrieval")]
        where = f"{MOST_PAIRS:,} pairs of {where}, drawn"
    groups_N, pairs = data.texts.groups[ids], data.texts.of(ids)
    sides = []
    for side in (0, 1):
        first = {texts[side]: row for row, texts in reversed(list(enumerate(pairs)))}
        rows = torch.tensor(list(first.values()))
        sides.append((towers.texts(list(first)), groups_N[rows], rows))
    (anchors, anchor_keys, anchor_rows), (positives, positive_keys, _) = sides
    forward = rank(anchors, positives, anchor_keys, positive_keys)
    backward = rank(positives, anchors, positive_keys, anchor_keys)
    found: dict[str, Any] = {}
    for name, ranking in (("anchor_to_positive", forward), ("positive_to_anchor", backward)):
        recalls = {f"R@{k}": share for k, share in ranking.recall.items()}
        found[name] = {**recalls, "mAP": ranking.map, "nDCG@10": ranking.ndcg}
    if data.labels is not None:
        labels_A = data.labels[ids][anchor_rows]
        if int((labels_A >= 0).sum()) > 1:
            z, labels = anchors[labels_A >= 0], labels_A[labels_A >= 0]
            ranking = rank(z, z, labels, labels, leave_one_out=True)
            found |= {"label_map": ranking.map, "label_ndcg": ranking.ndcg}
    return {
        **found,
        "mean": fmean((*forward.recall.values(), *backward.recall.values())),
        "anchors": len(anchors),
        "positives": len(positives),
        "chance": 1 / len(positives),
        "measured_on": where,
    }


def run_sts(towers: Towers, data: ImageData) -> dict[str, Any]:
    """Spearman's correlation of the cosine similarity of anchor and positive with the column
    `score`."""
    from scipy.stats import spearmanr

    if data.texts is None or data.texts.scores is None:
        raise UsageError(
            "the data has no column `score`, with the similarity of the two texts by people; give"
            " such a table with --data"
        )
    ids, where = evaluated_ids(data)
    ids = ids[~data.texts.scores[ids].isnan()]
    if len(ids) < 3:
        raise UsageError(f"{len(ids)} pairs have a score; a correlation needs at least 3")
    pairs = data.texts.of(ids)
    one, other = (towers.texts([texts[side] for texts in pairs]) for side in (0, 1))
    ranked = (one * other).sum(1).numpy(), data.texts.scores[ids].numpy()
    if any((values == values[0]).all() for values in ranked):
        raise UsageError(f"the {len(ids)} pairs have one score, or one similarity: no correlation")
    return {
        "spearman": float(spearmanr(*ranked).statistic),
        "pairs": len(ids),
        "measured_on": where,
    }
