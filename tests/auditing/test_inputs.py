"""Features from files: the same numbers from every kind, mapped where it is possible, nothing run,
faults in one sentence."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file

import kinfolk as kf
from kinfolk.auditing.inputs import read_column, read_input
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.features import Features, open_features

X = np.random.default_rng(0).normal(size=(9000, 5)).astype(np.float32)


def mapped(array: Any) -> bool:
    while array is not None and not isinstance(array, mmap.mmap):
        array = array.base if isinstance(array, np.ndarray) else getattr(array, "obj", None)
    return array is not None


def write(kind: str, folder: Path, dtype: type) -> Path:
    x: np.ndarray[Any, Any] = X.astype(dtype)
    path = folder / f"x.{kind.rpartition('-')[2]}"
    if kind == "npy":
        np.save(path, x)
    elif kind == "fortran-npy":
        np.save(path, np.asfortranarray(x))
    elif kind == "npz":
        np.savez(path, other=np.zeros(3), features=x)
    elif kind == "fortran-npz":
        np.savez(path, np.asfortranarray(x))
    elif kind == "packed-npz":
        np.savez_compressed(path, np.asfortranarray(x))
    elif kind == "list-parquet":
        pq.write_table(pa.table({"id": range(len(x)), "embedding": pa.array(list(x))}), path)
    elif kind == "fixed-parquet":
        pq.write_table(
            pa.table({"v": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), x.shape[1])}),
            path,
        )
    else:
        save_file({"embeddings": x, "other": np.zeros(2, np.float32)}, path)
    return path


@pytest.mark.parametrize(
    "kind",
    [
        "npy",
        "fortran-npy",
        "npz",
        "fortran-npz",
        "packed-npz",
        "list-parquet",
        "fixed-parquet",
        "safetensors",
    ],
)
def test_every_kind_gives_the_same_numbers(tmp_path: Path, kind: str) -> None:
    for dtype in [np.float16, np.float32, np.float64]:
        array = open_features(write(kind, tmp_path, dtype))
        assert array.dtype == dtype
        assert np.array_equal(array, X.astype(dtype))
        assert mapped(array) or not kind.endswith("npy")


def test_a_path_is_audited_like_its_array(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X[:50])
    assert np.array_equal(
        kf.audit(tmp_path / "x.npy", 0.1).thresholds, kf.audit(X[:50], 0.1).thresholds
    )


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("ran", "w")


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_nothing_in_a_file_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    objects = np.array([Trap(), Trap()], dtype=object)
    (np.save if suffix == "npy" else np.savez)(tmp_path / f"x.{suffix}", objects, allow_pickle=True)
    with pytest.raises(KinfolkError, match="Python objects"):
        open_features(tmp_path / f"x.{suffix}")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("suffix", ["npy", "npz", "parquet", "safetensors"])
@pytest.mark.parametrize("content", [b"", b"not what the name says, and long enough to be read"])
def test_a_broken_file_is_named(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(content)
    with pytest.raises(KinfolkError, match=rf"x\.{suffix}` is (empty|not a readable)"):
        open_features(path)


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
def test_a_file_cut_short_is_named(tmp_path: Path, suffix: str) -> None:
    path = write(suffix, tmp_path, np.float32)
    path.write_bytes(path.read_bytes()[:-20_000])
    with pytest.raises(KinfolkError, match=rf"x\.{suffix}`"):
        open_features(path)


def test_what_else_may_be_wrong(tmp_path: Path) -> None:
    np.savez(tmp_path / "two.npz", a=X, b=X)
    save_file({"x": np.zeros((4, 2), np.int64)}, tmp_path / "int.safetensors")
    pq.write_table(pa.table({"name": ["a"]}), tmp_path / "names.parquet")
    pq.write_table(pa.table({"x": [[1.0, 2.0], [1.0]]}), tmp_path / "ragged.parquet")
    pq.write_table(pa.table({"x": [[1.0, 2.0], None]}), tmp_path / "missing.parquet")
    pq.write_table(pa.table({"x": pa.array([], pa.list_(pa.float32()))}), tmp_path / "none.parquet")
    (tmp_path / "x.txt").write_text("1")
    for name, key, words in (
        ("two.npz", None, "contains a, b; call the features"),
        ("two.npz", "c", "contains a, b; call the features"),
        ("int.safetensors", None, "int64. must be float16, float32 or float64"),
        ("names.parquet", None, "no column of lists of floats"),
        ("ragged.parquet", None, "unequal lengths: 2 in row 0 and 1 in row 1; write it again"),
        ("missing.parquet", None, r"rows without features: 1 of 2 \(the first is row 1\); remove"),
        ("none.parquet", None, "has no rows"),
        ("x.txt", None, "must be a run folder or a file that ends in"),
        ("gone.npy", None, "there is no file or folder"),
        ("", None, "has no config.yaml"),
    ):
        with pytest.raises(KinfolkError, match=words):
            Features(open_features(tmp_path / name, key))
    assert np.array_equal(open_features(tmp_path / "two.npz", "b"), X)


def test_only_the_features_of_a_table_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"image": [b"bytes"] * len(X), "x": X.astype(np.float32).tolist()})
    pq.write_table(table, tmp_path / "x.parquet")
    read, columns = pq.read_table, []

    def note(path: Path, **how: Any) -> Any:
        columns.append(how["columns"])
        return read(path, **how)

    monkeypatch.setattr(pq, "read_table", note)
    assert np.allclose(open_features(tmp_path / "x.parquet"), X)
    assert columns == [["x"]]


def test_labels_from_every_kind_of_file(tmp_path: Path) -> None:
    names = ["cat", "dog", "", "cat"]
    np.save(tmp_path / "y.npy", np.asarray(names))
    pq.write_table(pa.table({"id": range(4), "label": names}), tmp_path / "y.parquet")
    (tmp_path / "y.csv").write_text(
        "id,label\n" + "".join(f"{i},{name}\n" for i, name in enumerate(names))
    )
    (tmp_path / "y.tsv").write_text(
        "label\tid\n" + "".join(f"{name}\t{i}\n" for i, name in enumerate(names))
    )
    (tmp_path / "y.txt").write_text("\n".join(names))
    for suffix in ("npy", "parquet", "csv", "tsv", "txt"):
        assert [str(label) for label in read_column(tmp_path / f"y.{suffix}").values] == names, (
            suffix
        )
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="no column 'label'; its columns are a, b"):
        read_column(tmp_path / "bad.csv")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(KinfolkError, match="is empty; its first line must name the columns"):
        read_column(tmp_path / "empty.csv")
    with pytest.raises(UsageError, match="there is no file"):
        read_column(tmp_path / "gone.csv")
    with pytest.raises(UsageError, match="must end in"):
        read_column(_text(tmp_path / "y.xls"))


def _text(path: Path) -> Path:
    path.write_text("x")
    return path


def test_features_are_read_from_torch_files_without_running_code(tmp_path: Path) -> None:
    torch.save(torch.from_numpy(X), tmp_path / "x.pt")
    torch.save(
        {"embeddings": torch.from_numpy(X).bfloat16(), "other": torch.zeros(2)}, tmp_path / "two.pt"
    )
    assert np.array_equal(open_features(tmp_path / "x.pt"), X)
    np.testing.assert_allclose(open_features(tmp_path / "two.pt"), X, rtol=0.01)
    torch.save([Trap()], tmp_path / "trap.pt")
    with pytest.raises(KinfolkError, match="Python objects"):
        open_features(tmp_path / "trap.pt")


def test_keys_and_labels_next_to_the_features_are_found(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X[:6])
    pq.write_table(
        pa.table({"id": range(6), "key": [f"{i}.png" for i in range(6)], "label": list("ababab")}),
        tmp_path / "x.parquet",
    )
    found = read_input(tmp_path / "x.npy")
    assert list(found.keys or ()) == [f"{i}.png" for i in range(6)]
    assert found.labels == list("ababab")
    (tmp_path / "y.csv").write_text(
        "key,label\n" + "".join(f"{i}.png,{i}\n" for i in reversed(range(6)))
    )
    found = read_input(tmp_path / "x.npy", labels=tmp_path / "y.csv")
    assert found.labels == list("012345")


def test_features_of_sentences_get_the_commands_of_text_pairs(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X[:20])
    (tmp_path / "t.txt").write_text("".join(f"question {i}\n" for i in range(20)))
    found = read_input(tmp_path / "x.npy", texts=tmp_path / "t.txt")
    assert (found.origin.framework, found.origin.captions, found.views) == ("pairs", True, 1)
    found = read_input(tmp_path / "x.npy")
    assert (found.origin.framework, found.origin.captions, found.views) == ("simclr", False, 2)
