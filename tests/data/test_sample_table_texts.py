from __future__ import annotations

import pickle

import numpy as np
import pytest

from kinfolk.data.sample_table import TextColumn


@pytest.mark.parametrize(
    "values",
    [
        ["a", "b", "ä"],
        ["train", "train", "test"],
        [None, "x", ""],
        [("one", "two"), None, ()],
        ["00112233aabbccdd", "ffffffffffffffff", "0123456789abcdef"],
        [],
    ],
)
def test_a_column_of_texts_reads_like_the_list(values: list[object]) -> None:
    column = TextColumn.of(values)
    assert list(column) == values
    assert [column[row] for row in range(len(values))] == values
    assert column == values
    assert column == TextColumn.of(values)
    assert column != [*values, "more"]
    assert list(column[1:]) == values[1:]
    assert list(column[::2]) == values[::2]
    assert list(column[np.arange(len(values))[::-1]]) == values[::-1]
    assert pickle.loads(pickle.dumps(column)) == values
    assert [column.count(value) for value in values] == [values.count(value) for value in values]


def test_differs_where_the_list_does() -> None:
    assert TextColumn.of(["a", "b"]) != TextColumn.of(["a", "c"])
    assert TextColumn.of(["train", "test"]) != TextColumn.of(["test", "train"])
    assert TextColumn.of(["a"]) != "a"


def test_numbers_are_equal_where_the_texts_are() -> None:
    for values in (["00112233aabbccdd", "0123456789abcdef", "00112233aabbccdd"], ["x", "y", "x"]):
        column = TextColumn.of(values)
        first, second, third = column.numbers.tolist()
        assert first == third != second


def test_rows_of_finds_all_rows_of_a_text() -> None:
    assert TextColumn.of(["a", None, "a"]).rows_of("a").tolist() == [0, 2]
