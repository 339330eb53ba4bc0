from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kinfolk.errors import KinfolkError
from kinfolk.evaluation.retrieval import recall


def slow(
    images: torch.Tensor, texts: torch.Tensor, owners: list[int], k: int
) -> tuple[float, float]:
    """By sorting, one query after the other."""
    found = 0
    for i, image in enumerate(images):
        order = sorted(range(len(texts)), key=lambda m: -float(image @ texts[m]))
        found += any(owners[m] == i for m in order[:k])
    back = 0
    for m, text in enumerate(texts):
        order = sorted(range(len(images)), key=lambda i: -float(images[i] @ text))
        back += owners[m] in order[:k]
    return found / len(images), back / len(texts)


def both(
    images: torch.Tensor,
    texts: torch.Tensor,
    owners: torch.Tensor,
    ks: tuple[int, ...] = (1, 5, 10),
) -> list[dict[int, float]]:
    rows = torch.arange(len(images))
    return [recall(images, texts, rows, owners, ks), recall(texts, images, owners, rows, ks)]


@pytest.mark.parametrize("entries", [1 << 22, 50])
def test_recall_in_blocks_equals_sorting(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kinfolk.evaluation.retrieval._ENTRIES", entries)
    random = torch.Generator().manual_seed(0)
    owners = torch.cat((torch.arange(12), torch.randint(0, 12, (20,), generator=random)))
    images = F.normalize(torch.randn(12, 6, generator=random), dim=1)
    texts = F.normalize(images[owners] + 1.2 * torch.randn(32, 6, generator=random), dim=1)
    found = both(images, texts, owners)
    for k in (1, 5, 10):
        expected = slow(images, texts, owners.tolist(), k)
        assert [each[k] for each in found] == pytest.approx(expected)
    assert 0 < found[0][1] < found[0][10] <= 1


def test_any_caption_of_an_image_counts_and_each_is_a_query() -> None:
    images = torch.eye(2)
    texts = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    found = both(images, texts, torch.tensor([0, 0, 1]), (1,))
    # the second image's nearest are two alike, one of them its own
    assert found == [{1: pytest.approx(0.75)}, {1: pytest.approx(2 / 3)}]


def test_embeddings_that_are_all_alike_come_to_chance() -> None:
    alike = F.normalize(torch.ones(20, 4), dim=1)
    for found in both(alike, alike, torch.arange(20)):
        assert found == pytest.approx({1: 0.05, 5: 0.25, 10: 0.5})


def test_embeddings_that_are_not_finite_find_nothing() -> None:
    with pytest.raises(KinfolkError, match="not finite"):
        both(torch.full((2, 2), torch.nan), torch.eye(2), torch.arange(2))
