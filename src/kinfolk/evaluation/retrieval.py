"""Image–text retrieval: recall@k in both directions, with several captions per image.

Dimension key: I images, M captions, D embedding, R rows of a block, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk.errors import KinfolkError

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
