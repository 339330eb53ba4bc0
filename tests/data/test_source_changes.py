from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kinfolk.data import prepare as prepare_module
from kinfolk.data.images import ImageData
from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare
from tests.data.images import noise, save


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("cats/a.png", "cats/b.png", "dogs/c.png"):
        save(tmp_path / name, noise(8, 8, seed=len(name)))
    (tmp_path / "dogs" / "bad.png").write_bytes(b"x")
    return tmp_path


def prepared(root: object, **options: Any) -> ImageData:
    return prepare(open_source(root, **options), image_size=8)


def refuses(data: ImageData, spec: object, match: str, **options: Any) -> None:
    difference = data.samples.first_difference(prepared(spec, **options).samples)
    assert difference is not None
    assert re.fullmatch(match, difference)


def test_unchanged_reads_no_file(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    data = prepare(open_source(root), image_size=8, cache_dir=cache, shared=True)

    def never(*_: object) -> str:
        raise AssertionError("a file was read")

    monkeypatch.setattr(prepare_module, "digest", never)
    monkeypatch.setattr(prepare_module, "_read_all", never)
    again = prepare(open_source(root), image_size=8, cache_dir=cache, shared=True)
    assert data.samples.first_difference(again.samples) is None


def test_touched_is_read_and_found_equal(root: Path) -> None:
    data = prepared(root)
    os.utime(root / "cats" / "b.png", ns=(1, 1))
    assert data.samples.first_difference(prepared(root).samples) is None


def test_changes_are_named(root: Path) -> None:
    data = prepared(root)
    path = root / "cats" / "b.png"
    content = path.read_bytes()
    path.write_bytes(content + b"more")
    refuses(
        data,
        root,
        rf"the size in bytes of sample 1 \(cats/b.png\) was {len(content)}, is now"
        rf" {len(content) + 4}",
    )
    path.write_bytes(content[:-1] + b"!")
    refuses(data, root, r"the digest of sample 1 \(cats/b.png\) was .*")
    path.unlink()
    refuses(data, root, r"sample 1 \(of \d\) was cats/b.png, is now .*")
    path.write_bytes(content)
    assert data.samples.first_difference(prepared(root).samples) is None
    save(root / "cats" / "aa.png", noise(8, 8))
    refuses(data, root, r"sample 1 \(of \d\) was .*, is now cats/aa.png.*")
    (root / "cats" / "aa.png").unlink()
    (root / "dogs" / "c.png").rename(root / "a.png")
    refuses(data, root, r"sample 0 \(of \d\) was cats/a.png, .*")


def test_changed_labels_are_named(root: Path) -> None:
    data = prepared(root, labels_from_folders=True)
    assert data.samples.first_difference(prepared(root, labels_from_folders=True).samples) is None
    refuses(data, root, r"the classes were \['cats', 'dogs'\], are now none")
    x = np.zeros((3, 8, 8), np.uint8)
    refuses(
        prepared(x, labels=[0, 1, 2]),
        x,
        r"the label of sample 2 \(train/2\) was 2, is now 0",
        labels=[0, 1, 0],
    )


def test_a_reordered_table_is_refused(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        save(tmp_path / name, noise(8, 8))
    table = tmp_path / "t.csv"
    table.write_text("image,caption\na.png,x\nb.png,y\n")
    data = prepared(table)
    table.write_text("image,caption\nb.png,y\na.png,x\n")
    refuses(data, table, r"sample 0 \(of \d\) was a.png, is now b.png.*")
    table.write_text("image,caption\na.png,x\nb.png,z\n")
    refuses(data, table, r"the caption of sample 1 \(b.png\) was 'y', is now 'z'")


def test_changed_rows_of_an_array_are_named(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
    data = prepared(x)
    assert data.samples.first_difference(prepared(x).samples) is None
    y = x.copy()
    y[3, 0, 0, 0] ^= 1
    refuses(data, y, r"the digest of sample 3 \(train/3\) was .*")
    refuses(data, x[:4], r"sample 4 \(of 5\) was train/4, is now missing.*")
    refuses(data, x[:, :6], r"the size in bytes of sample 0 \(train/0\) was 192, is now 144")
    np.savez(tmp_path / "a.npz", images=x)
    stored = prepared(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", images=y)
    refuses(
        stored,
        tmp_path / "a.npz",
        r"the digest of sample 3 \(train/3\) was .*",
    )


def test_a_dataset_that_gives_another_image_each_time() -> None:
    class Random:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return np.random.randint(0, 256, (8, 8, 3), dtype=np.uint8)

    data = prepared(Random())
    refuses(data, Random(), r"the digest of sample 0 \(train/0\) was .*")
