"""Losses with detectors for open_clip's training loop.

    loss = ClipLoss(detector=kf.PositiveMargin())        # instead of open_clip.create_loss(args)
    losses = loss(**model(images, texts), output_dict=True)

The scale and the bias stay parameters of the open_clip model, which passes them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kinfolk.objectives import CLIPLoss, SigLIPLoss
from kinfolk.stats import Stats


class OpenClipLoss(nn.Module):
    """Abstract."""

    kind: ClassVar[type[CLIPLoss | SigLIPLoss]]

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.loss = self.kind(learnable=False, **settings)
        self._next: tuple[Tensor | None, Tensor | None] = (None, None)

    def set_batch(self, ids: Tensor | None, group_ids: Tensor | None = None) -> None:
        """Sets ids and known positives of the next call, for loops that do not pass them."""
        self._next = ids, group_ids

    @property
    def stats(self) -> Stats:
        return self.loss.stats

    def set_progress(self, epoch: float, num_epochs: int) -> None:
        self.loss.set_progress(epoch, num_epochs)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
        ids: Tensor | None = None,
        group_ids: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """The loss, or with `output_dict` {"contrastive_loss": loss}. `logit_scale`: 1 /
        temperature; `logit_bias` has no effect on a softmax."""
        (next_ids, next_groups), self._next = self._next, (None, None)
        ids = next_ids if ids is None else ids
        group_ids = next_groups if group_ids is None else group_ids
        given = image_features, text_features, ids, group_ids
        t, loss_fn = 1 / logit_scale.float(), self.loss
        if isinstance(loss_fn, SigLIPLoss):
            pairs, _ = loss_fn.pairs_of(*given, loss_fn)
            bias = torch.zeros_like(logit_scale) if logit_bias is None else logit_bias
            loss = loss_fn.on(pairs, t, (bias,))
        else:
            of_images, of_texts = loss_fn.pairs_of(*given, loss_fn.image)
            loss = (loss_fn.image.on(of_images, t) + loss_fn.text.on(of_texts, t)) / 2
        return {"contrastive_loss": loss} if output_dict else loss


class ClipLoss(OpenClipLoss):
    """open_clip's `ClipLoss` with a detector, over all ranks. `settings`: arguments of
    `kf.CLIPLoss`, except for the temperature."""

    kind = CLIPLoss


class SigLipLoss(OpenClipLoss):
    """open_clip's `SigLipLoss` with a detector. `settings`: arguments of `kf.SigLIPLoss`, except
    for temperature and bias."""

    kind = SigLIPLoss
