"""open_clip's losses, transcribed, with our detectors in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kinfolk as kf
from kinfolk.integrations.open_clip import ClipLoss, SigLipLoss

B, D = 6, 5


def model_out(bias: bool) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    image, text = (torch.randn(B, D, dtype=torch.float64, generator=g) for _ in range(2))
    found = {
        "image_features": image,
        "text_features": text,
        "logit_scale": torch.tensor(4.0, dtype=torch.float64),
    }
    if bias:
        found["logit_bias"] = torch.tensor(-2.0, dtype=torch.float64)
    return {name: value.requires_grad_() for name, value in found.items()}


def unit_out(bias: bool) -> dict[str, Tensor]:
    return {
        name: F.normalize(value, dim=1) if value.ndim else value
        for name, value in model_out(bias).items()
    }


def clip(image_features: Tensor, text_features: Tensor, logit_scale: Tensor) -> Tensor:
    """`ClipLoss.forward` of open_clip, whose models return unit vectors."""
    image, text = F.normalize(image_features, dim=1), F.normalize(text_features, dim=1)
    logits, labels = logit_scale * image @ text.T, torch.arange(B)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def siglip(
    image_features: Tensor, text_features: Tensor, logit_scale: Tensor, logit_bias: Tensor
) -> Tensor:
    """`SigLipLoss._loss` of open_clip."""
    image, text = F.normalize(image_features, dim=1), F.normalize(text_features, dim=1)
    logits = logit_scale * image @ text.T + logit_bias
    labels = 2 * torch.eye(B, dtype=torch.float64) - 1
    return -F.logsigmoid(labels * logits).sum() / B


@pytest.mark.parametrize(
    ("make", "slow", "bias"), [(ClipLoss, clip, False), (SigLipLoss, siglip, True)]
)
def test_without_a_detector_it_is_open_clips_loss(make: Any, slow: Any, bias: bool) -> None:
    ours, theirs = model_out(bias), model_out(bias)
    losses = make()(**ours, output_dict=True)
    assert set(losses) == {"contrastive_loss"}
    sum(losses.values()).backward()
    slow(**theirs).backward()
    torch.testing.assert_close(losses["contrastive_loss"], slow(**theirs), check_dtype=False)
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name].grad, value.grad, check_dtype=False, rtol=1e-5, atol=1e-7
        )


def test_detectors_work_with_and_without_ids() -> None:
    given = model_out(False)
    loss = ClipLoss(detector=kf.PositiveMargin())
    assert isinstance(loss(**given), Tensor)
    assert int(loss.stats.flagged) > 0
    labels = torch.arange(B) % 2
    loss = ClipLoss(detector=kf.Oracle(labels), action="attract")
    with pytest.raises(ValueError, match="`ids` must be given"):
        loss(**given)
    direct = loss(**given, ids=torch.arange(B))
    loss.set_batch(torch.arange(B))
    torch.testing.assert_close(loss(**given), direct)
    with pytest.raises(ValueError, match="`ids` must be given"):
        loss(**given)  # ids hold for one call


def test_the_call_is_that_of_open_clip() -> None:
    """With open_clip installed, its own classes give the same numbers."""
    loss = pytest.importorskip("open_clip.loss", exc_type=ImportError)
    given = unit_out(True)
    torch.testing.assert_close(SigLipLoss()(**given), loss.SigLipLoss()(**given), check_dtype=False)
    given = unit_out(False)
    torch.testing.assert_close(ClipLoss()(**given), loss.ClipLoss()(**given), check_dtype=False)
