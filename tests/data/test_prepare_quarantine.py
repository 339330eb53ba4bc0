from __future__ import annotations

from pathlib import Path

import pytest

from kinfolk.data.prepare import describe_refused, read_quarantine, write_quarantine
from kinfolk.errors import KinfolkError


def test_every_name_and_reason_is_read_as_written(tmp_path: Path) -> None:
    refused = [
        ("a,b.png", 'a "reason"'),
        ("new\nline.png", "日本語"),
        ("=1+1", ""),
        ("<script>", "x" * 500),
    ]
    write_quarantine(refused, tmp_path / "quarantine.csv")
    assert read_quarantine(tmp_path / "quarantine.csv") == refused
    assert [path.name for path in tmp_path.iterdir()] == ["quarantine.csv"]


def test_nothing_refused_is_a_header(tmp_path: Path) -> None:
    write_quarantine([], tmp_path / "quarantine.csv")
    assert (tmp_path / "quarantine.csv").read_text() == "path,reason\n"
    assert read_quarantine(tmp_path / "quarantine.csv") == []


def test_a_file_with_other_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    with pytest.raises(KinfolkError, match="with the columns path and reason"):
        read_quarantine(tmp_path / "a.csv")


def test_the_summary_counts_refused_images() -> None:
    assert describe_refused([], 5) is None
    assert (
        describe_refused([("a", "b")], 1200, "run/quarantine.csv")
        == "1 of 1,200 images was refused; see run/quarantine.csv"
    )
    assert describe_refused([("a", "b")] * 2, 3) == "2 of 3 images were refused; see quarantine.csv"
