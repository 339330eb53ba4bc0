"""Explicit negatives of two-tower losses: triplets, several for each anchor; known positives by
key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import kinfolk as kf
from tests.ranks import end_rank, spawn

B, K, D, N = 5, 2, 4, 20


def batch(seed: int = 0, size: int = B) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = (size, D), (size, D), (size, K, D)
    one, two, three = (
        torch.randn(*shape, dtype=torch.float64, generator=g).requires_grad_() for shape in shapes
    )
    return one, two, three


def slow(
    one: Tensor, other: Tensor, negatives: Tensor, t: float, out: Tensor | None = None
) -> Tensor:
    """Cross-entropy over documents and negatives of all, and over questions. `out`: (B, B + B·K)
    left out."""
    q, d, n = (F.normalize(z, dim=-1) for z in (one, other, negatives))
    logits = q @ torch.cat((d, n.flatten(0, 1))).T / t
    if out is not None:
        logits = logits.masked_fill(out, -torch.inf)
    target = torch.arange(len(q))
    return (F.cross_entropy(logits, target) + F.cross_entropy(d @ q.T / t, target)) / 2


def require_equal(ours: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    torch.testing.assert_close(ours, expected)
    for a, b in zip(
        torch.autograd.grad(ours, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("block_rows", [None, 2])
def test_negatives_are_candidates_of_all_anchors(block_rows: int | None) -> None:
    given = batch()
    loss_fn = kf.CLIPLoss(temperature=0.3, learnable=False, block_rows=block_rows)
    require_equal(loss_fn(*given[:2], negatives=given[2]), slow(*given, 0.3), *given)


def test_negatives_of_their_own_anchor_only() -> None:
    given = batch()
    loss_fn = kf.CLIPLoss(temperature=0.3, learnable=False, block_rows=2)
    others = ~torch.eye(B, dtype=torch.bool).repeat_interleave(K, 1)
    out = torch.cat((torch.zeros(B, B, dtype=torch.bool), others), 1)
    found = loss_fn(*given[:2], negatives=given[2], own_only=True)
    require_equal(found, slow(*given, 0.3, out), *given)
    assert int(loss_fn.stats.negatives) == B * (B - 1 + K) + B * (B - 1)


@pytest.mark.parametrize("own_only", [False, True])
def test_explicit_negatives_alone(own_only: bool) -> None:
    given = batch()
    loss_fn = kf.CLIPLoss(temperature=0.3, learnable=False)
    q, d, n = (F.normalize(z, dim=-1) for z in given)
    logits = torch.cat((torch.diag(q @ d.T)[:, None], q @ n.flatten(0, 1).T), 1) / 0.3
    if own_only:
        others = ~torch.eye(B, dtype=torch.bool).repeat_interleave(K, 1)
        logits = logits.masked_fill(F.pad(others, (1, 0)), -torch.inf)
    expected = F.cross_entropy(logits, torch.zeros(B, dtype=torch.int64))
    found = loss_fn(*given[:2], negatives=given[2], own_only=own_only, in_batch=False)
    require_equal(found, expected, *given)
    assert int(loss_fn.stats.negatives) == B * K * (1 if own_only else B)
    with pytest.raises(ValueError, match="`in_batch`"):
        loss_fn(*given[:2], in_batch=False)


@pytest.mark.parametrize("own_only", [False, True])
def test_a_sigmoid_loss_has_them_as_further_pairs(own_only: bool) -> None:
    one, other, negatives = batch()
    loss_fn = kf.SigLIPLoss(temperature=0.5, bias=-1.0).double()
    q, d, n = (F.normalize(z, dim=-1) for z in (one, other, negatives))
    pairs, extra = q @ d.T / 0.5 - 1, q @ n.flatten(0, 1).T / 0.5 - 1
    sign = 2 * torch.eye(B, dtype=torch.float64) - 1
    counts = (
        torch.eye(B, dtype=torch.float64).repeat_interleave(K, 1)
        if own_only
        else torch.ones_like(extra)
    )
    expected = (F.softplus(-sign * pairs).sum() + (counts * F.softplus(extra)).sum()) / B
    found = loss_fn(one, other, negatives=negatives, own_only=own_only)
    require_equal(found, expected, one, other, negatives)


def test_a_negative_of_the_anchors_group_or_id_is_left_out() -> None:
    given = batch()
    loss_fn = kf.CLIPLoss(temperature=0.3, learnable=False)
    out = torch.zeros(B, B + B * K, dtype=torch.bool)
    out[1, B + 3 * K] = True  # the first negative of row 3 is the document of sample 1
    by_id = torch.arange(N)[-B * K :].view(B, K).clone()
    by_id[3, 0] = 1
    require_equal(
        loss_fn(*given[:2], torch.arange(B), negatives=given[2], negative_ids=by_id),
        slow(*given, 0.3, out),
        *given,
    )
    texts = [f"document {i}" for i in range(B)]
    others = [[f"negative {i} {k}" for k in range(K)] for i in range(B)]
    others[3][0] = texts[1]
    groups = {
        "group_ids": kf.group_ids_of(texts),
        "negative_group_ids": torch.stack([kf.group_ids_of(each) for each in others]),
    }
    require_equal(loss_fn(*given[:2], negatives=given[2], **groups), slow(*given, 0.3, out), *given)
    table = torch.full((N,), -1)
    table[[1, int(by_id[3, 1])]] = 7  # the second negative of row 3 shares the group of sample 1
    loss_fn.set_groups(table)
    out[1, B + 3 * K + 1] = True
    found = loss_fn(*given[:2], torch.arange(B), negatives=given[2], negative_ids=by_id)
    require_equal(found, slow(*given, 0.3, out), *given)


def test_detectors_flag_explicit_negatives_too() -> None:
    one, other, negatives = batch()
    labels = torch.arange(N) % 4
    loss_fn = kf.CLIPLoss(temperature=0.3, learnable=False, detector=kf.Oracle(labels))
    ids, negative_ids = torch.arange(B), torch.arange(B, B + B * K).view(B, K)
    loss_fn(one, other, ids, negatives=negatives, negative_ids=negative_ids)
    all_ids = torch.cat((ids, negative_ids.flatten()))
    same = (labels[ids].unsqueeze(1) == labels[all_ids]) & (ids.unsqueeze(1) != all_ids)
    assert int(loss_fn.image.stats.flagged) == int(same.sum())
    with pytest.raises(ValueError, match="`negative_ids` must be given"):
        loss_fn(one, other, ids, negatives=negatives)


@pytest.mark.parametrize(
    "detector",
    [kf.Components, lambda: kf.FNC(top_k=2), kf.PositiveMargin, lambda: kf.Guide(alpha=0.2)],
)
def test_negatives_without_ids_are_other_samples(detector: Any) -> None:
    one, other, negatives = batch()
    found = [
        kf.CLIPLoss(temperature=0.3, detector=detector())(
            one, other, ids, negatives=negatives, negative_ids=negative_ids
        )
        for ids, negative_ids in (
            (None, None),
            (torch.arange(B), torch.arange(B, B + B * K).view(B, K)),
        )
    ]
    torch.testing.assert_close(*found)


def test_wrong_shapes_are_named() -> None:
    one, other, negatives = batch()
    loss_fn = kf.CLIPLoss(temperature=0.3)
    with pytest.raises(
        ValueError, match=r"`negatives` \(=\(5, 4\)\) must be of the shape \(5, negatives, 4\)"
    ):
        loss_fn(one, other, negatives=one)
    with pytest.raises(
        ValueError, match=r"`negative_ids` \(=\(5,\)\) must have the shape \(5, 2\)"
    ):
        loss_fn(one, other, negatives=negatives, negative_ids=torch.arange(B))


def test_missing_and_empty_values_are_in_no_group() -> None:
    found = kf.group_ids_of(["a", None, "", 3, "3", "a"])
    assert found[[1, 2]].tolist() == [-1, -1]
    assert found[0] == found[5] != found[3]
    assert (found[[0, 3, 4]] >= 0).all()


SIZES = (3, 2, 4)


def joined(
    kind: str, part: slice, own_only: bool
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Loss, gradients and state of one rank's part of the batch, or of all of it."""
    detector = (
        kf.GloFND(num_samples=N + 20, alpha=0.2, init="quantile")
        if kind == "glofnd"
        else kf.FNC(top_k=2)
    )
    loss_fn = kf.CLIPLoss(
        temperature=0.3, learnable=False, detector=detector, block_rows=4
    ).double()
    total = sum(SIZES)
    one, other, negatives = (z.detach()[part].clone().requires_grad_() for z in batch(3, total))
    ids, negative_ids = (
        torch.arange(total)[part],
        torch.arange(total, total + total * K).view(total, K)[part],
    )
    explicit: dict[str, Any] = {"negatives": negatives, "own_only": own_only}
    if kind == "glofnd":
        explicit["negative_ids"] = negative_ids
    loss = loss_fn(one, other, ids, **explicit)
    loss.backward()
    return (
        loss.detach(),
        [z.grad for z in (one, other, negatives) if z.grad is not None],
        dict(loss_fn.state_dict()),
    )


def rank_of(rank: int, folder: str, kind: str, own_only: bool) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/sync", rank=rank, world_size=len(SIZES)
    )
    part = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    torch.save(joined(kind, part, own_only), f"{folder}/{rank}.pt")
    end_rank()


@pytest.mark.parametrize(("kind", "own_only"), [("glofnd", False), ("fnc", True)])
def test_ranks_share_their_negatives(tmp_path: Path, kind: str, own_only: bool) -> None:
    spawn(rank_of, (str(tmp_path), kind, own_only), nprocs=len(SIZES))
    loss, grads, state = joined(kind, slice(None), own_only)
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(len(SIZES))]
    for place, whole in enumerate(grads):
        torch.testing.assert_close(
            torch.cat([part[1][place] for part in parts]) / len(SIZES), whole
        )
    for part in parts:
        torch.testing.assert_close(part[0], loss)
        for name, value in state.items():
            torch.testing.assert_close(part[2][name], value)
