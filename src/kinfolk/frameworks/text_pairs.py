"""Text pairs: anchors and positives of one encoder in one embedding space, as in
`MultipleNegativesRankingLoss` of sentence-transformers.

Henderson et al., Efficient Natural Language Response Suggestion for Smart Reply, 2017; Reimers and
Gurevych, Sentence-BERT, EMNLP 2019.

Dimension key: B batch, K explicit negatives of each pair, T tokens, F features, D embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from typing_extensions import Unpack

from kinfolk.frameworks.clip import Bimodal
from kinfolk.objectives import CLIPLoss
from kinfolk.objectives.ntxent import Estimate


class TextPairs(Bimodal):
    """InfoNCE of anchors against the positives of the batch and all explicit negatives, and of
    positives against anchors.

    Args:
        encoder, head: (B, T) token ids → (B, F) → (B, D), of all texts.
        own_negatives_only: an explicit negative counts for the anchor of its row only.
        known_groups: whether pairs that share a text or a group are known positives. If False, they
            are negatives.
        temperature, learnable, min_temperature, detector, action, min_negatives, kin_weight,
            block_rows: see `CLIPLoss`.
    """

    paper: ClassVar[str] = "Henderson et al., 2017"
    needs: ClassVar[str] = "text pairs"
    modalities: ClassVar[tuple[str, ...]] = ("text",)
    directions: ClassVar[tuple[str, str]] = ("anchor_to_positive", "positive_to_anchor")
    head_options: ClassVar[Mapping[str, object]] = {"layers": 0}

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        temperature: float = 0.05,
        learnable: bool = False,
        min_temperature: float = 0.01,
        own_negatives_only: bool = False,
        known_groups: bool = True,
        **shared: Unpack[Estimate],
    ) -> None:
        loss = CLIPLoss(
            temperature=temperature, learnable=learnable, min_temperature=min_temperature, **shared
        )
        super().__init__(encoder, head, loss, known_groups)
        self.own_negatives_only = own_negatives_only

    def forward(
        self,
        views: Tensor,
        ids: Tensor,
        tokens: Tensor | None = None,
        groups: Tensor | None = None,
        negative_ids: Tensor | None = None,
    ) -> Tensor:
        """Scalar loss of anchors (1, B, T), and of positives and explicit negatives (B, 1 + K, T);
        `groups` (B,) are known positives, `negative_ids` (B, K) the ids of the negatives."""
        if tokens is None:
            raise ValueError("`tokens` (=None) must be given: the positive of each sample")
        anchor_BD = self.head(self.encoder(views[0]))
        other_BND = self.head(self.encoder(tokens.flatten(0, 1))).unflatten(0, tokens.shape[:2])
        explicit: dict[str, Any] = {}
        if tokens.shape[1] > 1:
            explicit = {
                "negatives": other_BND[:, 1:],
                "negative_ids": negative_ids,
                "own_only": self.own_negatives_only,
            }
        known = groups if self.known_groups else None
        loss: Tensor = self.loss(anchor_BD, other_BND[:, 0], ids, known, **explicit)
        return loss

    def embed_text(self, tokens: Tensor) -> Tensor:
        """(B, D) unit-norm embeddings of the positives in (B, 1 + K, T), or of texts (B, T)."""
        return self.embed(tokens[:, 0] if tokens.ndim == 3 else tokens)
