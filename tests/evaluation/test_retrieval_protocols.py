from __future__ import annotations

import csv
from pathlib import Path

import torch
from torch import Tensor, nn

from kinfolk.data.images import ImageData
from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare
from kinfolk.data.text import every_caption, train_tokenizer
from kinfolk.data.views import Views
from kinfolk.evaluation.retrieval import Towers, evaluated_ids, run_retrieval, run_zero_shot
from kinfolk.models.weights import Pair
from tests.data.images import noise, save

NAMES = ("dog", "cat", "cow")


def data_of(root: Path, splits: bool) -> ImageData:
    """Three images, red, green and blue, with two captions each in rows of their own; a second test
    image for the first class."""
    rows = []
    for number, name in enumerate((*NAMES, "dog")):
        pixels = noise(8, 8, number) // 16
        pixels[..., NAMES.index(name)] += 200 - 20 * (number > 2)
        path = save(root / f"{number}.png", pixels).name
        rows += [
            (path, f"a {name} {number}", name, "test"),
            (path, f"my {name} {number}", name, "test"),
        ]
    rows += [("0.png", "no matter", "dog", "train")]
    with open(root / "t.csv", "w", newline="") as file:
        columns = ("image", "caption", "label", "split")
        csv.writer(file).writerows(
            [columns[: 4 if splits else 3], *(row[: 4 if splits else 3] for row in rows)]
        )
    return prepare(open_source(root / "t.csv"), image_size=8, workers=0)


class Colours(nn.Module):
    """(B, 3, H, W) → (B, 4): how red, green and blue an image is, and how dark."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((2, 3))
        return torch.cat((mean, -mean.amax(1, keepdim=True)), 1)


class Words(nn.Module):
    """(B, T) → (B, 4): which name a text has, and whether it is the fourth image's."""

    def __init__(self, tokenizer: object) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def forward(self, tokens: Tensor) -> Tensor:
        texts = [self.tokenizer.decode(row) for row in tokens]  # type: ignore[attr-defined]
        rows = [[float(name in text) for name in (*sorted(NAMES), "3")] for text in texts]
        return torch.tensor(rows)[:, [2, 0, 1, 3]].float()


def towers_of(data: ImageData) -> Towers:
    tokenizer = train_tokenizer(every_caption(data.samples), vocab_size=290, context=12)
    return Towers(
        Pair(Colours(), nn.Identity(), Words(tokenizer), nn.Identity()),
        Views("plain", 8, mean=(0.0,) * 3, std=(1.0,) * 3),
        tokenizer,
    )


def test_an_image_in_several_rows_counts_once(tmp_path: Path) -> None:
    data = data_of(tmp_path, splits=True)
    result = run_retrieval(towers_of(data), data)
    assert (result["images"], result["captions"], result["measured_on"]) == (4, 8, "test split")
    assert result["chance"] == 0.25
    assert result["image_to_text"]["R@10"] == result["text_to_image"]["R@5"] == 1.0
    assert 0.5 <= result["image_to_text"]["R@1"] <= 1.0


def test_copies_of_an_image_count_once(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "other.png"):
        save(tmp_path / name, noise(8, 8, name == "other.png"))
    rows = [
        ("image", "caption"),
        ("a.png", "a dog"),
        ("b.png", "my dog"),
        ("./a.png", "the dog"),
        ("other.png", "a cat"),
    ]
    with open(tmp_path / "t.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    data = prepare(open_source(tmp_path / "t.csv"), image_size=8, workers=0)
    result = run_retrieval(towers_of(data), data)
    assert (result["images"], result["captions"], result["chance"]) == (2, 4, 0.5)
    assert data.once(torch.tensor([2, 0, 3, 1])).tolist() == [2, 3]


def test_all_samples_where_there_is_no_test_split(tmp_path: Path) -> None:
    data = data_of(tmp_path, splits=False)
    result = run_retrieval(towers_of(data), data)
    assert (result["images"], result["captions"], result["measured_on"]) == (4, 9, "all samples")
    assert evaluated_ids(data)[0].tolist() == list(range(9))


def test_zero_shot_by_names(tmp_path: Path) -> None:
    data = data_of(tmp_path, splits=True)
    towers = towers_of(data)
    result = run_zero_shot(towers, data)
    assert (result["accuracy"], result["classes"], result["test"]) == (1.0, 3, 8)


def test_an_evaluation_leaves_every_module_in_its_mode(tmp_path: Path) -> None:
    data = data_of(tmp_path, splits=True)
    towers = towers_of(data)
    towers.pair.train()
    run_retrieval(towers, data)
    assert all(part.training for part in towers.pair.modules())
