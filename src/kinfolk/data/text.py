"""The captions of a data set as tokens, by sample id.

Dimension key: N samples, M captions, T tokens of a context, B batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np
import torch
from torch import Tensor

from kinfolk.data.captions import all_of
from kinfolk.data.samples import Samples
from kinfolk.data.tokenizer import Tokenizer
from kinfolk.errors import UsageError


@final
class TextData:
    """All captions as one array of token ids; a sample has one or several of its rows.

    Args:
        samples: who is in the data; all of them have a caption.
        tokenizer: makes the tokens.

    Attributes:
        tokens: (M, T) int32, in the order of samples.
        owners: (M,) the sample of each caption.
        groups: (N,) known positives; see `groups.py`.
    """

    def __init__(self, samples: Samples, tokenizer: Tokenizer) -> None:
        require_captions(samples)
        assert samples.captions is not None
        assert samples.group_ids is not None
        counts = torch.tensor([len(all_of(caption)) for caption in samples.captions])
        self.tokenizer = tokenizer
        self.tokens = tokenizer.encode(list(every_caption(samples)))
        self.owners = torch.arange(len(samples)).repeat_interleave(counts)
        self.groups = torch.from_numpy(samples.group_ids.astype(np.int64))
        self._counts, self._starts = counts, counts.cumsum(0) - counts

    def draw(self, ids: Tensor, uniform: Tensor) -> Tensor:
        """(B, T) a caption for each of `ids` (B,), chosen by numbers in [0, 1) (B,) where there are several."""
        counts = self._counts[ids]
        return self.tokens[self._starts[ids] + (uniform * counts).to(torch.int64).clamp(max=counts - 1)]

    def rows(self, ids: Tensor) -> Tensor:
        """(M',) the rows of `tokens` that belong to `ids`, which may be any of the samples."""
        wanted = torch.zeros(len(self._counts), dtype=torch.bool)
        wanted[ids] = True
        return wanted[self.owners].nonzero()[:, 0]


@final
class StreamedText:
    """Captions of streamed data: drawn and made into tokens batch by batch, so that no token is kept for a sample.

    Args:
        samples: who is in the data; all of them have a caption.
        tokenizer: makes the tokens.

    Attributes:
        groups: (N,) known positives; see `groups.py`.
    """

    def __init__(self, samples: Samples, tokenizer: Tokenizer) -> None:
        require_captions(samples)
        assert samples.group_ids is not None
        self.tokenizer, self._samples = tokenizer, samples
        self.groups = torch.from_numpy(samples.group_ids.astype(np.int64))

    def draw(self, ids: Tensor, uniform: Tensor) -> Tensor:
        """(B, T) a caption for each of `ids` (B,), chosen by numbers in [0, 1) (B,) where there are several."""
        captions = self._samples.captions
        assert captions is not None
        several = [all_of(captions[id_]) for id_ in ids.tolist()]
        chosen = [texts[min(int(number * len(texts)), len(texts) - 1)] for texts, number in zip(several, uniform.tolist(), strict=True)]
        return self.tokenizer.encode(chosen)


def require_captions(samples: Samples) -> None:
    """Refuses data without captions."""
    if samples.captions is None:
        raise UsageError("the data has no captions; give a table with a column `caption` (or name it), or shards with .txt or .json files")


def every_caption(samples: Samples, split: str | None = None) -> Iterator[str]:
    """The captions of all samples, or of one split, one after the other."""
    for caption, own in zip(samples.captions or (), samples.splits, strict=True):
        if split is None or own == split:
            yield from all_of(caption)
