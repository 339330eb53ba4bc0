from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.errors import UsageError
from kinfolk.evaluation.retrieval import class_embeddings, recall

WORDS = {"dog": 0, "big cat": 1, "car": 2}


def embed(texts: list[str]) -> Tensor:
    """A vector for the class a sentence names, and a little for how it is said."""
    rows = [
        torch.eye(5)[next(place for word, place in WORDS.items() if word in text)] for text in texts
    ]
    extra = [torch.eye(5)[3 + text.startswith("a photo")] for text in texts]
    return F.normalize(torch.stack(rows) + 0.5 * torch.stack(extra), dim=1)


def test_a_class_is_the_mean_of_its_sentences() -> None:
    classes = class_embeddings(embed, ["dog", "big_cat", "car"], ["a photo of a {}.", "{}"])
    expected = F.normalize((embed(["a photo of a big cat."]) + embed(["big cat"])) / 2, dim=1)
    torch.testing.assert_close(classes[1], expected[0])
    labels = torch.tensor([0, 1, 2, 1])
    images = F.normalize(torch.eye(5)[torch.tensor([0, 1, 2, 0])], dim=1)
    found = recall(images, classes, labels, torch.arange(3), (1, 2))
    assert found == pytest.approx({1: 0.75, 2: 0.875})


def test_classes_without_names_are_refused() -> None:
    with pytest.raises(UsageError, match="names of the classes"):
        class_embeddings(embed, [])
