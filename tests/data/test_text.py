from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from kinfolk.data.images import ImageData
from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare
from kinfolk.data.text import TextData, every_caption, train_tokenizer
from kinfolk.errors import UsageError
from tests.data.images import noise, save


def data_of(root: Path, captions: list[list[str]] | None) -> ImageData:
    count = 3 if captions is None else len(captions)
    names = [save(root / f"{n}.png", noise(8, 8, n)).name for n in range(count)]
    columns = {"image": names} | ({} if captions is None else {"caption": captions})
    pq.write_table(pa.table(columns), root / "t.parquet")
    return prepare(open_source(root / "t.parquet"), image_size=8, workers=0)


def test_one_of_several_captions_by_a_number(tmp_path: Path) -> None:
    captions = [["a one", "a two", "a three"], ["b one"], ["c one", "c two"]]
    samples = data_of(tmp_path, captions).samples
    tokenizer = train_tokenizer(every_caption(samples), vocab_size=280, context=16)
    text = TextData(samples, tokenizer)
    ids = torch.tensor([2, 0, 0, 1, 0, 2])
    drawn = text.draw(ids, torch.tensor([0.5, 0.0, 0.99999997, 0.9, 0.34, 0.49]))
    assert [tokenizer.decode(row) for row in drawn] == [
        "c two",
        "a one",
        "a three",
        "b one",
        "a two",
        "c one",
    ]
    words, owners = text.all_of(torch.tensor([1, 2]))
    assert (words, owners.tolist()) == (["b one", "c one", "c two"], [1, 2, 2])
    assert text.groups.tolist() == [0, 1, 2]


def test_data_without_captions_is_refused(tmp_path: Path) -> None:
    samples = data_of(tmp_path, None).samples
    with pytest.raises(UsageError, match="the data has no captions"):
        TextData(samples, train_tokenizer(["a"], vocab_size=260, context=8))


def test_the_captions_of_one_split(tmp_path: Path) -> None:
    samples = data_of(tmp_path, [["a", "b"], ["c"]]).samples
    assert list(every_caption(samples, "train")) == ["a", "b", "c"]
    assert list(every_caption(samples, "test")) == []
