from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.detectors import Teacher
from kinfolk.errors import UsageError
from kinfolk.frameworks.registry import Context, build, parse
from kinfolk.objectives import NTXentLoss
from kinfolk.pairs import Pairs

N, B, D, Q = 30, 6, 4, 9


def given(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, the teacher's embeddings of the same samples, and a queue of the teacher's."""
    g = torch.Generator().manual_seed(seed)
    queries, keys, queue = (torch.randn(n, D, dtype=torch.float64, generator=g) for n in (B, B, Q))
    return queries.requires_grad_(), F.normalize(keys, dim=1), F.normalize(queue, dim=1)


def sce(
    queries: Tensor,
    keys: Tensor,
    queue: Tensor,
    t: float,
    t_m: float,
    own_weight: float,
    own_in_denominator: bool = True,
) -> Tensor:
    """Denize et al., equations 2 to 5, in loops: the online distribution p over the key and the
    queue, and its target w."""
    losses = []
    for z, key in zip(queries, keys, strict=True):
        z = z / z.norm()
        target = torch.stack([torch.exp(key @ other / t_m) for other in queue])
        w = [torch.tensor(own_weight), *((1 - own_weight) * x / target.sum() for x in target)]
        p = torch.stack([torch.exp(z @ other / t) for other in [key, *queue]])
        total = p.sum() if own_in_denominator else p[1:].sum()
        losses.append(
            sum((-y * torch.log(x / total) for y, x in zip(w, p, strict=True)), torch.zeros(()))
        )
    return torch.stack(losses).mean()


def ours(loss_fn: NTXentLoss, queries: Tensor, keys: Tensor, queue: Tensor) -> Tensor:
    ids = torch.arange(B)
    pairs = Pairs(
        queries,
        queue,
        keys.unsqueeze(1),
        ids,
        torch.arange(B, B + Q),
        guide=keys,
        candidate_guide=queue,
    )
    return loss_fn.on(pairs)


def require_equal(one: Tensor, other: Tensor, inputs: Tensor) -> None:
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(*(torch.autograd.grad(x, inputs)[0] for x in (one, other)))


@pytest.mark.parametrize("own_weight", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("block_rows", [None, 2])
def test_attracted_it_is_sce(own_weight: float, block_rows: int | None) -> None:
    queries, keys, queue = given()
    loss_fn = NTXentLoss(
        temperature=0.1,
        detector=Teacher(temperature=0.05, own_weight=own_weight),
        action="attract",
        block_rows=block_rows,
    )
    require_equal(
        ours(loss_fn, queries, keys, queue),
        sce(queries, keys, queue, 0.1, 0.05, own_weight),
        queries,
    )


def test_nothing_for_the_own_positive_is_ressl() -> None:
    """Zheng et al., equations 3 to 5: the cross-entropy of the relations to the queue, without the
    positive in either."""
    queries, keys, queue = given()
    loss_fn = NTXentLoss(
        temperature=0.1,
        detector=Teacher(temperature=0.04, own_weight=0.0),
        action="attract",
        decoupled=True,
    )
    student = F.log_softmax(F.normalize(queries, dim=1) @ queue.T / 0.1, 1)
    ressl = -(F.softmax(keys @ queue.T / 0.04, 1) * student).sum(1).mean()
    require_equal(ours(loss_fn, queries, keys, queue), ressl, queries)
    torch.testing.assert_close(
        ressl, sce(queries, keys, queue, 0.1, 0.04, 0.0, own_in_denominator=False)
    )


def test_all_for_the_own_positive_is_the_plain_loss() -> None:
    queries, keys, queue = given()
    require_equal(
        ours(
            NTXentLoss(temperature=0.1, detector=Teacher(own_weight=1.0), action="attract"),
            queries,
            keys,
            queue,
        ),
        ours(NTXentLoss(temperature=0.1), queries, keys, queue),
        queries,
    )


def test_the_objectives_own_weight_goes_before_the_teachers() -> None:
    queries, keys, queue = given()
    loss_fn = NTXentLoss(
        temperature=0.1,
        detector=Teacher(temperature=0.05, own_weight=0.9),
        action="attract",
        own_weight=0.2,
    )
    torch.testing.assert_close(
        ours(loss_fn, queries, keys, queue), sce(queries, keys, queue, 0.1, 0.05, 0.2)
    )


def test_the_anchors_own_old_key_has_no_degree() -> None:
    queries, keys, queue = given()
    ids = torch.arange(B)
    candidate_ids = torch.cat([ids[:3], torch.arange(B, B + Q - 3)])
    pairs = Pairs(
        queries, queue, keys.unsqueeze(1), ids, candidate_ids, guide=keys, candidate_guide=queue
    )
    total = NTXentLoss(temperature=0.1, detector=Teacher(temperature=0.05), action="attract").on(
        pairs
    )
    rows = [
        sce(queries[i : i + 1], keys[i : i + 1], queue[candidate_ids != i], 0.1, 0.05, 0.5)
        for i in range(B)
    ]
    torch.testing.assert_close(total, torch.stack(rows).mean())


def made(
    name: str, framework: dict[str, Any] | None = None, detector: dict[str, Any] | None = None
) -> Any:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU())
    context = Context(N, None, (nn.EmbeddingBag(30, 8), nn.Linear(8, 4)))
    return build(parse(name), encoder, nn.Linear(8, D), context, framework, detector)


def test_simclr_compares_weak_views_by_a_slow_copy() -> None:
    framework = made("simclr+teacher", {"temperature": 0.2}, {"momentum": 0.5})
    assert framework.num_views == 3
    assert framework.weak_views == (2,)
    views, ids = torch.randn(3, B, 3, 2, 2), torch.arange(B)
    first = framework(views, ids)
    changed = views.clone()
    changed[2] = torch.randn(B, 3, 2, 2)
    assert not torch.equal(framework(changed, ids), first)
    z = F.normalize(framework.head(framework.encoder(views[:2].flatten(0, 1))), dim=1)
    taught = F.normalize(framework.teacher(views[2]), dim=1)
    others = (torch.arange(2 * B) % B).unsqueeze(1) != torch.arange(2 * B) % B
    target = torch.where(others, (taught @ taught.T / 0.05).exp().repeat(2, 2), 0.0)
    target = 0.5 * target / target.sum(1, keepdim=True) + 0.5 * torch.eye(B).repeat(
        2, 2
    ).fill_diagonal_(0)
    logits = (z @ z.T / 0.2).fill_diagonal_(-torch.inf)
    expected = -torch.where(target > 0, target * logits.log_softmax(1), 0.0).sum(1).mean()
    torch.testing.assert_close(first, expected)
    first.backward()
    assert all(p.grad is None for p in framework.teacher.parameters())
    before = framework.teacher.encoder[1].weight.clone()
    with torch.no_grad():
        framework.encoder[1].weight += 1
    framework.after_step()
    torch.testing.assert_close(framework.teacher.encoder[1].weight, before + 0.5)


def test_mocos_keys_are_the_teacher() -> None:
    framework = made("moco+teacher", {"queue_size": 16, "temperature": 0.2})
    assert (framework.num_views, framework.weak_views) == (2, (1,))
    for step in range(2):
        torch.manual_seed(step)
        views, ids = torch.randn(2, B, 3, 2, 2), torch.arange(B) + step * B
        queue = framework.queue.features[:B].clone() if step else None
        keys = F.normalize(framework.slow(views[1]), dim=1)
        loss = framework(views, ids)
    assert queue is not None
    torch.testing.assert_close(
        loss, sce(framework.head(framework.encoder(views[0])), keys, queue, 0.2, 0.05, 0.5).float()
    )


def test_what_has_no_teacher_is_refused_with_a_reason() -> None:
    with pytest.raises(
        UsageError,
        match=(
            r"clip\+teacher:attract has no teacher: use \+teacher with simclr, sogclr, moco, mocov3"
        ),
    ):
        made("clip+teacher")
    with pytest.raises(
        ValueError, match=r"`action` \(='eliminate'\) must be 'attract' or 'reweight' with Teacher"
    ):
        made("simclr+teacher:eliminate")
    with pytest.raises(ValueError, match=r"`symmetric` \(=True\) must be False with a teacher"):
        made("moco+teacher", {"queue_size": 9, "symmetric": True})
    for name, framework in (("moco", {"queue_size": 16}), ("mocov3", {})):
        with pytest.raises(ValueError, match=r"`detector.momentum` must be left out"):
            made(
                f"{name}+teacher",
                dict(framework),
                detector={"momentum": 0.9, "start_epoch": 1},
            )
    with pytest.raises(ValueError, match=r"`detector.momentum` must be left out"):
        made("moco+teacher", {"queue_size": 9}, {"momentum": 0.9})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"temperature": 0.0}, r"`temperature` \(=0.0\) must be above 0"),
        ({"own_weight": 1.5}, r"`own_weight` \(=1.5\) must be in \[0, 1\]"),
        ({"momentum": 1.0}, r"`momentum` \(=1.0\) must be in \[0, 1\)"),
    ],
)
def test_impossible_settings_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Teacher(**arguments)


def test_the_grammar_attracts_by_default() -> None:
    assert str(parse("simclr+teacher")) == "simclr+teacher:attract"
    assert str(parse("simclr+teacher:reweight")) == "simclr+teacher:reweight"
