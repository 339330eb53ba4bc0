"""The protocols of `kinfolk eval` for text pairs: retrieval in both directions, and the agreement
of similarities with those by people (STS).

Dimension key: N evaluated pairs, L labelled anchors, Q queries, C candidates, R rows of a block, D
embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kinfolk.data.images import ImageData
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.evaluation.retrieval import KS, Towers, measured
from kinfolk.seeding import generator

MOST = 20_000
"""Pairs that are evaluated; of more, so many are drawn."""
DEPTH = 10
_ENTRIES = 1 << 22


@dataclass(frozen=True)
class Ranking:
    """How well candidates are ranked, as means over queries, in [0, 1].

    Args:
        recall: share of queries with a relevant candidate among the first k.
        map: mean average precision over all candidates.
        ndcg: normalised discounted cumulative gain of the first 10.
        queries: number of queries that have a relevant candidate.
    """

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
    itself: bool = False,
) -> Ranking:
    """Ranks all candidates of each query by cosine similarity, in row blocks. A candidate with the
    query's key is relevant.

    Candidates at the same similarity are ranked with the relevant ones last, so that equal
    embeddings score as low as possible. Queries without a relevant candidate are left out.

    Args:
        queries_QD, candidates_CD: unit norm.
        keys_Q, candidate_keys_C: key of each.
        itself: candidate i is query i, and is no candidate of it.

    Example:
        >>> found = rank(torch.eye(3), torch.eye(3)[[0, 2, 1]], *torch.tensor([[0, 1, 2]] * 2))
        >>> found.recall[1], round(found.map, 3)
        (0.3333333333333333, 0.556)
    """
    if not (queries_QD.isfinite().all() and candidates_CD.isfinite().all()):
        raise KinfolkError("the embeddings contain values that are not finite")
    discount_K = 1 / torch.arange(2, DEPTH + 2).double().log2()
    sums, number = torch.zeros(len(KS) + 2, dtype=torch.float64), 0
    size = max(1, _ENTRIES // len(candidates_CD))
    for start in range(0, len(queries_QD), size):
        sim_RC = queries_QD[start : start + size] @ candidates_CD.T
        own_RC = keys_Q[start : start + size, None] == candidate_keys_C
        if itself:
            at_R = torch.arange(len(sim_RC))
            sim_RC[at_R, at_R + start], own_RC[at_R, at_R + start] = -torch.inf, False
        kept_R = own_RC.any(1)
        sim_RC, own_RC = sim_RC[kept_R], own_RC[kept_R]
        by_relevance_RC = own_RC.to(torch.uint8).argsort(stable=True, dim=1)
        order_RC = sim_RC.gather(1, by_relevance_RC).argsort(stable=True, dim=1, descending=True)
        hit_RC = own_RC.gather(1, by_relevance_RC.gather(1, order_RC)).double()
        total_R = hit_RC.sum(1)
        precision_RC = hit_RC.cumsum(1) / torch.arange(1, hit_RC.shape[1] + 1)
        first = hit_RC[:, :DEPTH]
        gain_R = (first * discount_K[: first.shape[1]]).sum(1)
        best_R = discount_K.cumsum(0)[total_R.clamp(max=min(DEPTH, hit_RC.shape[1])).long() - 1]
        recalls = [hit_RC[:, :k].amax(1).sum() for k in KS]
        sums += torch.stack(
            [*recalls, ((hit_RC * precision_RC).sum(1) / total_R).sum(), (gain_R / best_R).sum()]
        )
        number += len(hit_RC)
    means = (sums / number).tolist() if number else [math.nan] * len(sums)
    return Ranking(dict(zip(KS, means, strict=False)), means[-2], means[-1], number)


def run_pair_retrieval(
    towers: Towers, data: ImageData, seed: int = 0, *, progress: bool = False
) -> dict[str, Any]:
    """Recall@1, 5 and 10, mAP and nDCG@10 in both directions over the test split, or over all
    samples if there is none. Each distinct text is one candidate; relevant are the texts of the
    query's pair and of known positives.

    With labels also mAP and nDCG@10 of anchors that search other anchors of their label.
    """
    assert data.texts is not None
    ids, where = _evaluated(data, seed)
    groups_N, pairs = data.texts.groups[ids], data.texts.of(ids)
    sides = []
    for side in (0, 1):
        first: dict[str, int] = {}
        for row, texts in enumerate(pairs):
            first.setdefault(texts[side], row)
        rows = torch.tensor(list(first.values()))
        sides.append((towers.texts(list(first)), groups_N[rows], rows))
    (anchors, anchor_keys, anchor_rows), (positives, positive_keys, _) = sides
    found: dict[str, Any] = {}
    both = (
        (anchors, positives, anchor_keys, positive_keys),
        (positives, anchors, positive_keys, anchor_keys),
    )
    recalls = []
    for name, given in zip(("anchor_to_positive", "positive_to_anchor"), both, strict=True):
        ranking = rank(*given)
        recalls += list(ranking.recall.values())
        found[name] = {
            **{f"R@{k}": share for k, share in ranking.recall.items()},
            "mAP": ranking.map,
            "nDCG@10": ranking.ndcg,
        }
    if data.labels is not None:
        labels_A = data.labels[ids][anchor_rows]
        known_L = labels_A >= 0
        if int(known_L.sum()) > 1:
            z_LD, labels_L = anchors[known_L], labels_A[known_L]
            ranking = rank(z_LD, z_LD, labels_L, labels_L, itself=True)
            found |= {"label_map": ranking.map, "label_ndcg": ranking.ndcg}
    return {
        **found,
        "mean": sum(recalls) / len(recalls),
        "anchors": len(anchors),
        "positives": len(positives),
        "chance": 1 / len(positives),
        "measured_on": where,
    }


def run_sts(towers: Towers, data: ImageData) -> dict[str, Any]:
    """Spearman's correlation of the cosine similarity of anchor and positive with the column
    `score`, over the test split, or over all samples if there is none."""
    if data.texts is None or data.texts.scores is None:
        raise UsageError(
            "the data has no column `score`, with the similarity of the two texts by people; give"
            " such a table with --data"
        )
    ids, where = measured(data)
    ids = ids[~data.texts.scores[ids].isnan()]
    if len(ids) < 3:
        raise UsageError(f"{len(ids)} pairs have a score; a correlation needs at least 3")
    pairs = data.texts.of(ids)
    one, other = (towers.texts([texts[side] for texts in pairs]) for side in (0, 1))
    spearman = rank_correlation((one * other).sum(1), data.texts.scores[ids])
    return {"spearman": spearman, "pairs": len(ids), "measured_on": where}


def rank_correlation(x_N: Tensor, y_N: Tensor) -> float:
    """Spearman's correlation; equal values have their mean rank. NaN if one side is constant.

    Example:
        >>> rank_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 9.0, 5.0]))
        0.5
    """
    ranks = []
    for values in (x_N, y_N):
        _, place_N, count = torch.unique(values, return_inverse=True, return_counts=True)
        last = count.cumsum(0).double()
        ranks.append((last - (count - 1) / 2)[place_N])
    one, other = (each - each.mean() for each in ranks)
    return float((one * other).sum() / (one.square().sum() * other.square().sum()).sqrt())


def _evaluated(data: ImageData, seed: int) -> tuple[Tensor, str]:
    ids, where = measured(data)
    if len(ids) <= MOST:
        return ids, where
    drawn = torch.randperm(len(ids), generator=generator(seed, "pair-retrieval"))[:MOST]
    return ids[drawn.sort().values], f"{MOST:,} pairs of {where}, drawn"
