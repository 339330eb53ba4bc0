"""Tables with several labels per image."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinfolk.errors import KinfolkError
from kinfolk.evaluation.probes import read_label_sets


def test_a_row_for_each_label(tmp_path: Path) -> None:
    file = tmp_path / "voc.csv"
    file.write_text(
        "image,label,difficult\na.jpg,dog,0\na.jpg,cat,0\na.jpg,cat,1\nb.jpg,dog,1\nc.jpg,,0\nelsewhere.jpg,bird,0\n"
    )
    sets, names = read_label_sets(file, ["a.jpg", "b.jpg", "c.jpg", "d.jpg"])
    assert names == ["bird", "cat", "dog"]
    assert sets.tolist() == [[0, 1, 1], [0, 0, -1], [0, 0, 0], [-1, -1, -1]]


@pytest.mark.parametrize(
    "text",
    [
        "photo,label\na.jpg,dog\n",
        "image,name\na.jpg,dog\n",
        "image,label\na.jpg,\n",
        "image,label\nx.jpg,dog\n",
    ],
)
def test_bad_tables_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "voc.csv"
    file.write_text(text)
    with pytest.raises(KinfolkError, match=r"must have the columns image and label.*'a\.jpg'"):
        read_label_sets(file, ["a.jpg"])
    with pytest.raises(KinfolkError, match="not a readable table"):
        read_label_sets(tmp_path / "other.csv", ["a.jpg"])
