"""The softmax of a block, and rows that are weighed a few at a time."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from kinfolk import kinship
from kinfolk.detectors import FNC, Detector, GloFND, Ring, thresholds
from kinfolk.kinship import EMPTY, Interval, Roles, exponentials, weigh
from kinfolk.objectives import NTXent, SogCLR
from kinfolk.pairs import LEFT_OUT, Policy

N, D = 48, 16


def similarities(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    sim_RC = torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows), dtype=dtype) * 2 - 1
    sim_RC[torch.arange(rows), torch.arange(rows) % columns] = LEFT_OUT
    return sim_RC


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.005, 0.1, 3.0])
@pytest.mark.parametrize("per_row", [False, True])
def test_the_softmax_by_powers_of_two_is_the_softmax(temperature: float, dtype: torch.dtype, per_row: bool) -> None:
    sim_RC = similarities(7, 33, dtype)
    t = torch.linspace(temperature, 2 * temperature, 7, dtype=dtype).unsqueeze(1) if per_row else temperature
    share_RC, norm_R, lse_R = exponentials(sim_RC.clone(), t)
    assert norm_R is not None
    rtol, atol = (1e-4, 1e-7) if dtype == torch.float32 else (1e-11, 1e-15)
    torch.testing.assert_close(share_RC * norm_R.unsqueeze(1), torch.softmax(sim_RC / t, 1), rtol=rtol, atol=atol)
    torch.testing.assert_close(lse_R, torch.logsumexp(sim_RC / t, 1), rtol=rtol, atol=atol)


def test_a_row_without_negatives_is_empty_and_has_no_shares() -> None:
    sim_RC = torch.stack((torch.full((5,), LEFT_OUT), torch.linspace(-1, 1, 5)))
    share_RC, norm_R, lse_R = exponentials(sim_RC.clone(), 0.01)
    assert norm_R is not None
    assert lse_R[0] < EMPTY < lse_R[1]
    assert not share_RC[0].any()
    assert torch.isfinite(0 * norm_R).all(), "a derivative of 0 times the factor of the row is 0"


ROLES = {
    "kin": Roles(kin=Interval(torch.linspace(-1.5, 1.0, 12))),
    "kin of samples": Roles(kin=Interval(torch.linspace(-0.5, 0.9, 6))),
    "kin and drop": Roles(kin=Interval(torch.linspace(0.2, 1.0, 12)), drop=Interval(upper_R=torch.linspace(-1.0, 1.2, 12))),
    "drop": Roles(drop=Interval(upper_R=torch.linspace(-1.0, 1.2, 12))),
}


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("action", ["eliminate", "reweight"])
@pytest.mark.parametrize("min_negatives", [1, 4])
def test_rows_weighed_a_few_at_a_time_are_the_same(monkeypatch: pytest.MonkeyPatch, roles: str, action: str, min_negatives: int) -> None:
    """Among them are rows in which all candidates are kin, so that some are kept."""
    sim_RC, negatives_R = similarities(12, 20), torch.full((12,), 19.0)
    policy = Policy(action, 0.25, min_negatives, attracted_stay=True)  # type: ignore[arg-type]
    whole = weigh(sim_RC.clone(), negatives_R, ROLES[roles], policy, 0.2)
    monkeypatch.setattr(kinship, "_CACHED", 50)
    split = weigh(sim_RC.clone(), negatives_R, ROLES[roles], policy, 0.2)
    for place, name in ((0, "share_RC"), (0, "norm_R"), (0, "lse_R"), (1, "flagged_R"), (1, "weight_R")):
        one, other = getattr(whole[place], name), getattr(split[place], name)
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(other, one, msg=name)
    if action == "eliminate" and "kin" in roles:
        assert whole[1].weight_R is not None
        assert float(whole[1].weight_R.min()) >= min(min_negatives, 1)
        cut_R, split_R = (torch.full((12,), -math.inf) if each[1].cut_R is None else each[1].cut_R for each in (whole, split))
        torch.testing.assert_close(split_R, cut_R)


DETECTORS: dict[str, Detector] = {
    "glofnd": GloFND(N, alpha=0.1),
    "glofnd, quantile": GloFND(N, alpha=0.1, init="quantile"),
    "fnc": FNC(fraction=0.1),
    "ring": Ring(0.3, 0.8),
}


@pytest.mark.parametrize("detector", DETECTORS)
def test_a_loss_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch, detector: str) -> None:
    for make in (lambda found: NTXent(0.1, detector=found), lambda found: SogCLR(N, 0.1, detector=found)):
        outcomes = []
        for cached in (1 << 19, 100):
            monkeypatch.setattr(kinship, "_CACHED", cached)
            loss_fn = make(copy.deepcopy(DETECTORS[detector]))
            for step in range(3):
                g = torch.Generator().manual_seed(step)
                one, other = torch.randn(2, 16, D, generator=g)
                loss = loss_fn(one.requires_grad_(), other, torch.randperm(N, generator=g)[:16])
            outcomes.append((loss, *torch.autograd.grad(loss, one), *loss_fn.state_dict().values()))
        for whole, split in zip(*outcomes, strict=True):
            torch.testing.assert_close(split, whole, equal_nan=True)  # a schedule that has not begun is NaN


def test_mean_and_spread_are_those_of_all_candidates_where_few_are_read() -> None:
    """Candidates of a bank may stand class by class."""
    g = torch.Generator().manual_seed(0)
    class_C = torch.arange(20_000) // 200
    sim_bM = 0.3 * torch.randn(6, 100, generator=g)[:, class_C] + 0.1 * torch.randn(6, 20_000, generator=g)
    found_2b = thresholds.moments(sim_bM, torch.full((6,), 20_000.0))
    mean_b = sim_bM.mean(1)
    torch.testing.assert_close(found_2b[0], mean_b, atol=0.02, rtol=0)  # runs of 512 are 0.07 off
    torch.testing.assert_close(found_2b[1], (sim_bM - mean_b.unsqueeze(1)).relu().mean(1), atol=0, rtol=0.05)


def test_means_and_counts_in_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sim_bM, n_b, level_b = similarities(9, 40), torch.full((9,), 39.0), torch.linspace(-0.5, 0.5, 9)
    whole = thresholds.moments(sim_bM, n_b), thresholds.above(sim_bM, n_b, level_b)
    monkeypatch.setattr(kinship, "_CACHED", 100)
    for one, other in zip(whole, (thresholds.moments(sim_bM, n_b), thresholds.above(sim_bM, n_b, level_b)), strict=True):
        torch.testing.assert_close(other, one)
