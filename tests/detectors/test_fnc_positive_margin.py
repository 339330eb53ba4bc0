from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kinfolk as kf
from kinfolk.frameworks.registry import Context, build_detector, parse
from kinfolk.pairs import Pairs
from tests.detectors.blocks import kin, random_block

B, D = 6, 5


def towers(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    one, other = (torch.randn(B, D, dtype=torch.float64, generator=g) for _ in range(2))
    return one.requires_grad_(), (other + one.detach()).requires_grad_()


def slow_loss(anchors: Tensor, others: Tensor, margin: float, relative: bool, t: float) -> Tensor:
    """NV-Retriever's rule in loops: negatives above the level leave the sum, but one is kept."""
    anchors, others = F.normalize(anchors, dim=1), F.normalize(others, dim=1)
    losses = []
    for i in range(B):
        sims = [anchors[i] @ others[j] for j in range(B)]
        seen = [float(sim.detach()) for sim in sims]
        own = seen[i]
        level = own - margin * abs(own) if relative else own - margin
        kept = [j for j in range(B) if j != i and seen[j] <= level]
        kept = kept or [min((j for j in range(B) if j != i), key=seen.__getitem__)]
        logits = torch.stack([sims[i], *(sims[j] for j in kept)]) / t
        losses.append(logits.logsumexp(0) - logits[0])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("margin", [-0.2, 0.0, 0.3])
def test_equals_the_rule_in_loops(margin: float, relative: bool) -> None:
    one, other = towers()
    detector = kf.PositiveMargin(margin=margin, relative=relative)
    loss_fn = kf.CLIPLoss(temperature=0.3, learnable=False, detector=detector, block_rows=4)
    slow = sum(slow_loss(*pair, margin, relative, 0.3) for pair in ((one, other), (other, one))) / 2
    ours = loss_fn(one, other)
    torch.testing.assert_close(ours, slow)
    grads = zip(
        torch.autograd.grad(ours, (one, other)),
        torch.autograd.grad(slow, (one, other)),  # type: ignore[arg-type]
        strict=True,
    )
    for a, b in grads:
        torch.testing.assert_close(a, b)
    assert 0 < int(loss_fn.stats.flagged) < 2 * B * (B - 1)


def test_of_several_positives_the_nearest_counts() -> None:
    z = torch.eye(4)
    near, far = torch.tensor([0.9, 0.1, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0, 0.0])
    candidates = torch.tensor([[0.8, 0.6, 0.0, 0.0], [1.0, 0.01, 0.0, 0.0]])
    pairs = Pairs(
        z[:1],
        candidates,
        torch.stack((near, far)).unsqueeze(0),
        torch.tensor([0]),
        torch.tensor([1, 2]),
    )
    loss_fn = kf.NTXentLoss(temperature=0.5, detector=kf.PositiveMargin(margin=0.0))
    loss_fn.on(pairs)
    assert int(loss_fn.stats.flagged) == 1  # both are nearer than the mean of 0.99 and 0


def test_a_margin_that_no_candidate_meets_is_the_plain_loss() -> None:
    one = F.normalize(torch.eye(B, D + 1, dtype=torch.float64), dim=1)
    plain = kf.CLIPLoss(temperature=0.3)(one, one)
    flagged = kf.CLIPLoss(temperature=0.3, detector=kf.PositiveMargin(margin=0.5))
    torch.testing.assert_close(flagged(one, one), plain)
    assert int(flagged.stats.flagged) == 0


def test_without_positives_nothing_is_flagged() -> None:
    assert not kin(kf.PositiveMargin(), random_block(0, [0, 1, 2])).any()


def test_a_method_name_builds_it() -> None:
    context = Context(8)
    built = build_detector(
        parse("simclr+positive_margin"), context, {"margin": 0.1, "start_epoch": 2, "stop_epoch": 5}
    )
    shown = "StopAt(StartAt(PositiveMargin(margin=0.1), epoch=2, update_from=None), epoch=5)"
    assert repr(built) == shown
    built = build_detector(parse("clip+positive_margin:absolute:reweight"), context, {})
    assert repr(built) == "PositiveMargin(relative=False)"


def test_an_impossible_margin_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`margin` \(=1.5\) must be in \[-1, 1\]"):
        kf.PositiveMargin(margin=1.5)
