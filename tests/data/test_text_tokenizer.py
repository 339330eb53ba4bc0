from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kinfolk.data import text
from kinfolk.data.text import Tokenizer, read_tokenizer, train_tokenizer
from kinfolk.errors import KinfolkError, UsageError
from tests.ranks import spawn

CAPTIONS = [
    f"a {colour} {thing} on the {place}"
    for colour in ("red", "blue")
    for thing in ("dog", "ball")
    for place in ("grass", "beach")
]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer(CAPTIONS, vocab_size=300, context=12)


def test_tokens_are_start_text_end_and_padding(trained: Tokenizer) -> None:
    tokens = trained.encode(["a red dog", "A  red\tDOG "])
    assert tokens.shape == (2, 12)
    assert tokens.dtype == torch.int32
    assert torch.equal(tokens[0], tokens[1])
    end = int((tokens[0] == trained.end_id).nonzero()[0])
    assert int(tokens[0, 0]) == 1
    assert (tokens[0, end + 1 :] == trained.pad_id).all()
    assert trained.decode(tokens[0]) == "a red dog"
    assert int(tokens.max()) < trained.vocab_size <= 300


def test_a_long_text_is_cut_and_keeps_its_end(trained: Tokenizer) -> None:
    (tokens,) = trained.encode(["dog " * 100])
    assert int(tokens[-1]) == trained.end_id
    assert (tokens == trained.end_id).sum() == 1


def test_any_text_has_tokens(trained: Tokenizer) -> None:
    tokens = trained.encode(["日本", "é", "🐕‍🦺", ""])
    assert trained.decode(tokens[0]) == "日本"
    assert int(tokens[3, 1]) == trained.end_id


def test_names_of_special_tokens_are_letters_in_a_caption(trained: Tokenizer) -> None:
    (named,) = trained.encode(["a <end> dog"])
    assert int((named == trained.end_id).sum()) == 1
    assert trained.decode(named) == "a <end> dog"


def test_composed_and_decomposed_are_the_same(trained: Tokenizer) -> None:
    a, b = trained.encode(["caf\u00e9", "cafe\u0301"])
    assert torch.equal(a, b)


def train_and_save(_: int, path: str) -> None:
    train_tokenizer(CAPTIONS, vocab_size=300, context=12).save(Path(path))


def test_the_same_captions_give_the_same_file(trained: Tokenizer, tmp_path: Path) -> None:
    """Also in another process, where strings have other hashes, whatever the order of threads."""
    trained.save(tmp_path / "one.json")
    spawn(train_and_save, (str(tmp_path / "two.json"),))
    assert (tmp_path / "one.json").read_text() == (tmp_path / "two.json").read_text()


def test_saved_and_read_again(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path / "tokenizer.json")
    again = read_tokenizer(tmp_path / "tokenizer.json", 12)
    assert torch.equal(again.encode(CAPTIONS), trained.encode(CAPTIONS))
    shorter = read_tokenizer(tmp_path / "tokenizer.json", 5).encode(CAPTIONS)
    assert shorter.shape[1] == 5
    assert ((shorter == trained.end_id).sum(1) == 1).all()


def test_a_given_tokenizer_that_adds_no_end(tmp_path: Path) -> None:
    import tokenizers

    inner: Any = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "dog": 1, "[UNK]": 2, "</s>": 3}, unk_token="[UNK]")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "t.json"))
    given = read_tokenizer(tmp_path / "t.json", 4)
    assert given.encode(["a dog", "a a a a a a", ""]).tolist() == [
        [0, 1, 3, 3],
        [0, 0, 0, 3],
        [3] * 4,
    ]
    assert given.pad_id == given.end_id == 3


def test_texts_and_files_that_are_no_tokenizer_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="there is no tokenizer at"):
        read_tokenizer(tmp_path / "gone.json", 8)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(KinfolkError, match="not a readable tokenizer"):
        read_tokenizer(tmp_path / "bad.json", 8)
    with pytest.raises(UsageError, match="at least 259"):
        train_tokenizer(CAPTIONS, vocab_size=258, context=8)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"pip install '\.\[text\]'"):
        text._library()
