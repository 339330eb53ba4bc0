"""Tables of text pairs."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare
from kinfolk.data.text import NumberedTexts, TextViews, cut, train_tokenizer
from kinfolk.errors import KinfolkError, UsageError
from tests.training.text_table import rows, write_table


def test_reads_all_kinds_of_tables_alike(tmp_path: Path) -> None:
    table = rows(negatives=2)
    paths = [write_table(tmp_path / f"t.{kind}", table) for kind in ("csv", "tsv")]
    paths.append(tmp_path / "t.parquet")
    pq.write_table(pa.Table.from_pylist(table), paths[-1])
    for path in paths:
        data = prepare(open_source(path), image_size=8)
        assert (len(data), data.num_train) == (48, 36)
        assert data.classes is not None
        assert len(data.classes) == 12
        assert data.texts is not None
        first = table[0]
        assert data.texts.of(torch.tensor([0])) == [
            (first["anchor"], first["positive"], first["negative_1"], first["negative_2"])
        ]
        assert data.samples.keys[0] == "row/1"
        again = prepare(open_source(path), image_size=8)
        assert data.samples.first_difference(again.samples) is None


def test_columns_of_pairs_are_found_by_name_or_option(tmp_path: Path) -> None:
    path = write_table(
        tmp_path / "t.csv", [{"q": "a b", "sentence2": "c"}, {"q": "d", "sentence2": "e"}]
    )
    with pytest.raises(
        UsageError, match=r"has no column 'image'.*text pairs has the columns anchor"
    ):
        open_source(path)
    half = write_table(tmp_path / "h.csv", [{"anchor": "a", "answer": "b"}])
    with pytest.raises(
        UsageError, match=r"has no column 'image'.*text pairs has the columns anchor"
    ):
        open_source(half)
    with pytest.raises(UsageError, match=r"or others that --set data.anchor_column=NAME"):
        open_source(half)
    assert open_source(half, positive_column="answer").has_texts
    with pytest.raises(UsageError, match="has no column 'x' for `anchor_column`"):
        open_source(path, anchor_column="x")
    assert open_source(path, anchor_column="q").has_texts
    sts = write_table(tmp_path / "s.csv", [{"sentence1": "a", "sentence2": "b", "score": "4.5"}])
    data = prepare(open_source(sts), image_size=8)
    assert data.texts is not None
    assert data.texts.scores is not None
    assert data.texts.scores.tolist() == [4.5]
    bad = write_table(tmp_path / "b.csv", [{"sentence1": "a", "sentence2": "b", "score": "good"}])
    with pytest.raises(KinfolkError, match="has the score 'good', not a number"):
        open_source(bad)


def test_bad_rows_are_refused_by_name(tmp_path: Path) -> None:
    table = [
        {"anchor": "good", "positive": "well"},
        {"anchor": " ", "positive": "a"},
        {"anchor": "b", "positive": "\u200b"},
        {"anchor": "x" * 100_000, "positive": "long texts are cut by the tokenizer"},
    ]
    source = open_source(write_table(tmp_path / "t.csv", table))
    assert [item.key for item in source.items()] == ["row/1", "row/4"]
    assert source.refused == [
        ("row/2", "the text in the column 'anchor' is empty"),
        ("row/3", "the text in the column 'positive' is empty: it has no visible characters"),
    ]
    with pytest.raises(KinfolkError, match=r"all 2 rows of .* were refused; the first is row/1"):
        prepare(open_source(write_table(tmp_path / "e.csv", table[1:3])), image_size=8)
    (tmp_path / "h.csv").write_text("anchor,positive\n")
    with pytest.raises(KinfolkError, match="has no rows"):
        open_source(tmp_path / "h.csv")


def test_a_list_of_texts_is_refused_and_numbers_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"anchor": [["a", "b"], ["c"]], "positive": ["d", "e"]}), path)
    refused = open_source(path).refused
    assert refused[0] == ("row/1", "the text in the column 'anchor' is a list, not one text")
    pq.write_table(pa.table({"anchor": [1, 2], "positive": ["a", "b"]}), path)
    assert [item.caption for item in open_source(path).items()] == [("1", "a"), ("2", "b")]


def test_labels_that_are_nan_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    columns = {"anchor": ["a", "b", "c"], "positive": ["d", "e", "f"]}
    pq.write_table(pa.table({**columns, "label": [float("nan"), 1.0, 0.0]}), path)
    source = open_source(path)
    assert [source.label(row) for row in range(3)] == [None, 1, 0]


def test_a_changed_text_is_noticed(tmp_path: Path) -> None:
    table = rows()
    path = write_table(tmp_path / "t.csv", table)
    data = prepare(open_source(path), image_size=8)
    table[2]["positive"] = "another"
    write_table(path, table)
    found = data.samples.first_difference(prepare(open_source(path), image_size=8).samples)
    assert re.match(r"the caption of sample 2", found or "")
    table[2]["anchor"] = "also another"
    write_table(path, table)
    found = data.samples.first_difference(prepare(open_source(path), image_size=8).samples)
    assert re.match(r"the caption of sample 2", found or "")


def test_pairs_that_share_a_text_are_one_group(tmp_path: Path) -> None:
    table = [
        {"anchor": "a", "positive": "b", "negative": "z"},
        {"anchor": "c", "positive": "B ", "negative": "d"},
        {"anchor": "e", "positive": "f", "negative": "b"},
    ]
    data = prepare(open_source(write_table(tmp_path / "t.csv", table)), image_size=8)
    assert data.texts is not None
    assert data.texts.groups.tolist() == [0, 0, 2]


def test_explicit_negatives_share_ids_with_equal_texts(tmp_path: Path) -> None:
    table = [
        {"anchor": "a", "positive": "b", "negative": "f", "negative_1": "new"},
        {"anchor": "c", "positive": "d", "negative": "New", "negative_1": "other"},
        {"anchor": "e", "positive": "f", "negative": "a", "negative_1": "other"},
    ]
    data = prepare(open_source(write_table(tmp_path / "t.csv", table)), image_size=8)
    texts = data.texts
    assert texts is not None
    assert texts.negative_ids is not None
    assert texts.negative_ids.tolist() == [[2, 3], [3, 4], [0, 4]]
    assert texts.negatives == ["new", "other"]
    assert data.num_ids == 5
    assert data.of_ids(torch.tensor([7, 8, 9])).tolist() == [7, 8, 9, -1, -1]
    texts.tokenizer = train_tokenizer(["a b new other"], vocab_size=259, context=16)
    numbered = NumberedTexts(texts)
    tokens = numbered.pixels(torch.tensor([4, 0, 3]))
    assert [texts.tokenizer.decode(row) for row in tokens] == ["other", "a", "new"]
    drawn = texts.draw(torch.tensor([1, 0]), torch.zeros(2))
    assert drawn.shape[:2] == (2, 3)
    assert texts.tokenizer.decode(drawn[0, 2]) == "other"
    assert texts.get_groups(torch.tensor([1]))["negative_ids"].tolist() == [[3, 4]]


def test_tokens_are_cut_to_the_longest_text_of_the_batch() -> None:
    tokenizer = train_tokenizer(["a"], vocab_size=259, context=64)
    tokens = tokenizer.encode(["abc", "abcdefghij"])
    short = cut(tokens, tokenizer.end_id)
    assert short.shape == (2, 16)
    assert bool((tokens[:, 16:] == tokenizer.pad_id).all())
    views = TextViews()
    assert torch.equal(views(short, num_views=2)[1], views.evaluate(short))


def test_without_a_tokenizer_texts_are_no_images(tmp_path: Path) -> None:
    data = prepare(open_source(write_table(tmp_path / "t.csv")), image_size=8)
    with pytest.raises(UsageError, match="these are texts, and this encoder takes images"):
        data.pixels(torch.arange(2))
