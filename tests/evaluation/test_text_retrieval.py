"""Retrieval of texts, and agreement with scores by people."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, ndcg_score

from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare
from kinfolk.errors import KinfolkError
from kinfolk.evaluation import retrieval
from kinfolk.evaluation.retrieval import Towers, rank, run_pair_retrieval
from kinfolk.report.results import figures_of_result
from tests.training.text_table import write_table


def drawn(number: int, seed: int) -> torch.Tensor:
    return F.normalize(torch.randn(number, 4, generator=torch.Generator().manual_seed(seed)), dim=1)


def test_equals_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, candidates = drawn(7, 0), drawn(12, 1)
    keys, others = torch.arange(7) % 4, torch.arange(12) % 4
    monkeypatch.setattr(retrieval, "_ENTRIES", 30)  # several blocks
    found = rank(queries, candidates, keys, others)
    sim, relevant = (queries @ candidates.T).numpy(), (keys[:, None] == others).numpy()
    average = np.mean([average_precision_score(*row) for row in zip(relevant, sim, strict=True)])
    assert found.map == pytest.approx(average)
    assert found.ndcg == pytest.approx(ndcg_score(relevant, sim, k=10))
    first = np.take_along_axis(relevant, (-sim).argsort(1), 1)
    assert found.recall == pytest.approx({k: first[:, :k].any(1).mean() for k in (1, 5, 10)})


def test_a_query_is_no_candidate_of_itself_and_needs_a_relevant_one() -> None:
    z, keys = drawn(5, 2), torch.tensor([0, 0, 1, 1, 2])
    found = rank(z, z, keys, keys, leave_one_out=True)
    assert found.queries == 4
    expected = rank(z[:1], z[1:], keys[:1], keys[1:])
    assert rank(z, z, torch.tensor([0, 0, 7, 8, 9]), keys, leave_one_out=True).queries == 2
    others = [
        rank(z[[i]], z[torch.arange(5) != i], keys[[i]], keys[torch.arange(5) != i])
        for i in range(4)
    ]
    assert found.map == pytest.approx(sum(each.map for each in others) / 4)
    assert others[0].map == expected.map


def test_anchors_search_anchors_of_their_label(tmp_path: Path) -> None:
    rows = [{"anchor": f"a{n}", "positive": f"p{n}", "label": "xyz"[n % 3]} for n in range(9)]
    data = prepare(open_source(write_table(tmp_path / "pairs.csv", rows)), image_size=1)
    z = {f"a{n}": vector for n, vector in enumerate(drawn(9, 3))}
    z |= {f"p{n}": vector for n, vector in enumerate(drawn(9, 4))}
    towers = SimpleNamespace(texts=lambda texts: torch.stack([z[text] for text in texts]))
    result = run_pair_retrieval(cast(Towers, towers), data)
    anchors = torch.stack([z[f"a{n}"] for n in range(9)])
    labels = torch.arange(9) % 3
    expected = rank(anchors, anchors, labels, labels, leave_one_out=True)
    assert result["label_map"] == pytest.approx(expected.map)
    assert result["label_ndcg"] == pytest.approx(expected.ndcg)
    figures = figures_of_result("retrieval", result)
    assert figures["retrieval mAP by label"] == pytest.approx(100 * expected.map)


def test_equal_embeddings_score_low() -> None:
    found = rank(torch.ones(3, 1), torch.ones(30, 1), torch.arange(3), torch.arange(30))
    assert found.recall == {1: 0, 5: 0, 10: 0}
    assert found.map == pytest.approx(1 / 30)
    assert found.ndcg == 0
    none = rank(torch.ones(2, 1), torch.ones(2, 1), torch.arange(2), torch.arange(2) + 5)
    assert none.queries == 0
    assert math.isnan(none.map)
    with pytest.raises(KinfolkError, match="not finite"):
        rank(torch.full((1, 1), torch.nan), torch.ones(1, 1), torch.arange(1), torch.arange(1))
