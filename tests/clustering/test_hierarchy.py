"""Online hierarchical clustering: what holds after every update, and that it finds and follows what
is there."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kinfolk.clustering import OnlineHierarchy, conforming
from tests.reference.hierarchy import check


def planted(
    per: int = 12, seed: int = 0, dim: int = 16, noise: float = 0.15
) -> tuple[Tensor, Tensor]:
    """(3, N) labels of 3 coarse clusters of 3 fine ones each, and unit-norm features: fine clusters
    at about 0.95, coarse at 0.6."""
    g = torch.Generator().manual_seed(seed)
    top, fine = torch.arange(9 * per) // (3 * per), torch.arange(9 * per) // per
    basis = torch.linalg.qr(torch.randn(dim, dim, generator=g))[0]
    z = (
        basis[top]
        + 0.8 * basis[3 + fine]
        + noise * torch.randn(9 * per, dim, generator=g) / dim**0.5
    )
    return torch.stack((torch.arange(9 * per), fine, top)), F.normalize(z, dim=1)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two labellings are one partition."""
    return torch.equal(
        one.unsqueeze(0) == one.unsqueeze(1), other.unsqueeze(0) == other.unsqueeze(1)
    )


def run(
    hierarchy: OnlineHierarchy, z: Tensor, steps: int, batch: int, seed: int = 0, first: int = 0
) -> None:
    for step in range(first, first + steps):
        ids = torch.randperm(len(z), generator=torch.Generator().manual_seed(1000 * seed + step))[
            :batch
        ]
        hierarchy.update(ids, z[ids])


@given(
    seed=st.integers(0, 10**6),
    num_samples=st.integers(1, 24),
    levels=st.integers(1, 4),
    parts=st.integers(2, 4),
    max_units=st.integers(2, 9),
    started=st.booleans(),
)
@settings(max_examples=15)
def test_all_that_must_hold_holds_after_every_update(
    seed: int, num_samples: int, levels: int, parts: int, max_units: int, started: bool
) -> None:
    """Random walks of clumped features through random batches with repeated ids: thousands of
    splits and merges in all."""
    g = torch.Generator().manual_seed(seed)
    similarity = torch.rand(levels - 1, generator=g).sort(descending=True).values.tolist()
    hierarchy = OnlineHierarchy(
        num_samples, levels, merge_similarity=similarity, parts=parts, max_units=max_units
    )
    check(hierarchy)
    if started:  # from one cluster at every level above the first: the largest there can be
        hierarchy.start(
            torch.stack((torch.arange(num_samples), *torch.zeros(levels - 1, num_samples).long())),
            torch.randn(num_samples, 3),
        )
        check(hierarchy)
    for _ in range(40):
        size = int(torch.randint(1, 12, (1,), generator=g))
        ids = torch.randint(0, num_samples, (size,), generator=g)
        clumps = torch.randn(3, 3, generator=g)
        hierarchy.update(
            ids,
            clumps[torch.randint(0, 3, (size,), generator=g)]
            + 0.1 * torch.randn(size, 3, generator=g),
        )
        check(hierarchy)
    assert conforming(hierarchy.labels) == 1


@pytest.mark.parametrize("start", ["alone", "together"])
def test_finds_planted_levels(start: str) -> None:
    labels, z = planted()
    hierarchy = OnlineHierarchy(len(z), 3, merge_similarity=(0.85, 0.5))
    if start == "together":
        hierarchy.start(torch.stack((labels[0], *torch.zeros(2, len(z)).long())), z)
    run(hierarchy, z, steps=80, batch=24)
    check(hierarchy)
    assert same(hierarchy.labels[1], labels[1])
    assert same(hierarchy.labels[2], labels[2])


def test_follows_features_that_move() -> None:
    labels, z = planted()
    hierarchy = OnlineHierarchy(len(z), 3, merge_similarity=(0.85, 0.5))
    hierarchy.start(labels, z)
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(5))
    run(hierarchy, z[order], steps=160, batch=24)
    assert same(hierarchy.labels[1], labels[1][order])
    assert same(hierarchy.labels[2], labels[2][order])


def test_what_is_planted_and_stays_is_left_alone() -> None:
    labels, z = planted()
    hierarchy = OnlineHierarchy(len(z), 3, merge_similarity=(0.85, 0.5))
    hierarchy.start(labels, z)
    before = hierarchy.labels
    run(hierarchy, z, steps=30, batch=24)
    assert torch.equal(hierarchy.labels, before)


def test_save_load_continue_equals_uninterrupted() -> None:
    _, z = planted(noise=1.0)
    whole, first, second = (
        OnlineHierarchy(len(z), 3, merge_similarity=(0.8, 0.4), max_units=5) for _ in range(3)
    )
    run(whole, z, 20, 16)
    run(first, z, 10, 16)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(second, z, 10, 16, first=10)
    assert all(
        torch.equal(value, second.state_dict()[name]) for name, value in whole.state_dict().items()
    )


def test_the_order_of_rows_is_of_no_consequence() -> None:
    _, z = planted(noise=1.0)
    one, other = (OnlineHierarchy(len(z), 3, merge_similarity=(0.8, 0.4)) for _ in range(2))
    for step in range(20):
        g = torch.Generator().manual_seed(step)
        halves = torch.randint(0, len(z), (2, 12), generator=g)  # of two ranks, with repeated ids
        one.update(halves.flatten(), z[halves.flatten()])
        other.update(halves.flip(0).flatten(), z[halves.flip(0).flatten()])
    assert torch.equal(one.labels, other.labels)
    assert all(
        torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items()
    )


def test_rows_of_one_id_count_as_their_mean_and_broken_rows_not_at_all() -> None:
    hierarchy = OnlineHierarchy(3, 2, merge_similarity=0.9)
    hierarchy.update(
        torch.tensor([1, 1, 2, 0]),
        torch.tensor([[1.0, 0.0], [0.0, 1.0], [torch.nan, 0.0], [0.0, 2.0]]),
    )
    assert hierarchy.tree.features.tolist() == [[0, 1], pytest.approx([0.5**0.5] * 2), [0, 0]]
    hierarchy.update(torch.tensor([2]), torch.tensor([[torch.inf, 0.0]]))
    hierarchy.update(torch.empty(0, dtype=torch.int64), torch.empty(0, 2))
    check(hierarchy)


def test_features_are_moving_averages_and_the_first_counts_whole() -> None:
    hierarchy = OnlineHierarchy(2, 2, merge_similarity=0.9, feature_momentum=0.75)
    for new in ([[1.0, 0.0]], [[0.0, 5.0]]):
        hierarchy.update(torch.tensor([1]), torch.tensor(new))
    assert hierarchy.tree.features.tolist() == [[0, 0], pytest.approx([3 / 10**0.5, 1 / 10**0.5])]


def test_a_cluster_has_the_sum_of_its_members() -> None:
    labels, z = planted()
    hierarchy = OnlineHierarchy(len(z), 3, merge_similarity=0.5)
    hierarchy.start(labels, z)
    for name in set(hierarchy.labels[2].tolist()):
        members = hierarchy.labels[2] == name
        torch.testing.assert_close(hierarchy.tree.sums_at(2)[name], z[members].sum(0))
        assert hierarchy.tree.sizes[2, name] == members.sum()


def test_what_is_wrong_is_named() -> None:
    for words, arguments in (("num_samples", (0, 2)), ("levels", (3, 0))):
        with pytest.raises(ValueError, match=f"`{words}`"):
            OnlineHierarchy(*arguments, merge_similarity=0.5)
    for name, value in (
        ("parts", 1),
        ("max_units", 1),
        ("merge_similarity", (0.5,)),
        ("merge_similarity", 1.5),
        ("feature_momentum", 1.0),
    ):
        with pytest.raises(ValueError, match=f"`{name}`"):
            OnlineHierarchy(3, 3, **{"merge_similarity": 0.5, name: value})  # type: ignore[arg-type]
    hierarchy = OnlineHierarchy(3, 2, merge_similarity=0.5)
    hierarchy.update(torch.tensor([0]), torch.ones(1, 4))
    with pytest.raises(ValueError, match="`ids`"):
        hierarchy.update(torch.tensor([3]), torch.zeros(1, 4))
    with pytest.raises(ValueError, match="`features`"):
        hierarchy.update(torch.tensor([1]), torch.zeros(1, 5))
    with pytest.raises(ValueError, match=r"`ids` .* must be integers, one for each row"):
        hierarchy.update(torch.tensor([1, 2]), torch.zeros(1, 4))
    with pytest.raises(ValueError, match="where each sample is a cluster in the first row"):
        hierarchy.start(torch.tensor([[0, 0, 1], [0, 0, 1]]))
    with pytest.raises(ValueError, match="must be finite"):
        hierarchy.start(torch.arange(3).expand(2, -1), torch.full((3, 4), torch.nan))
    with pytest.raises(ValueError, match="nested"):
        OnlineHierarchy(3, 3, merge_similarity=0.5).start(
            torch.tensor([[0, 1, 2], [0, 0, 1], [0, 1, 1]])
        )
    with pytest.raises(
        RuntimeError,
        match=(
            "has the size 2 × 3, but `levels` × `num_samples` is 2 × 4: use the same data set and"
            " levels"
        ),
    ):
        OnlineHierarchy(4, 2, merge_similarity=0.5).load_state_dict(hierarchy.state_dict())


def test_mixed_precision_around_an_update_changes_nothing() -> None:
    one, other = (OnlineHierarchy(40, levels=3, merge_similarity=(0.9, 0.7)) for _ in range(2))
    for step in range(3):
        g = torch.Generator().manual_seed(step)
        ids, rows = (
            torch.randperm(40, generator=g)[:20],
            torch.randn(4, 6, generator=g)[torch.arange(20) % 4],
        )
        rows = rows + 0.3 * torch.randn(20, 6, generator=g)
        one.update(ids, rows)
        with torch.autocast("cpu", torch.bfloat16):
            other.update(ids, rows)
    assert torch.equal(one.labels, other.labels)
    assert all(
        torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items()
    )


def test_similarities_that_rise_with_the_level_are_refused() -> None:
    OnlineHierarchy(4, 3, merge_similarity=(0.8, 0.8))
    with pytest.raises(ValueError, match=r"`merge_similarity` \(=\(0.3, 0.8\)\) .* not rising"):
        OnlineHierarchy(4, 3, merge_similarity=(0.3, 0.8))
