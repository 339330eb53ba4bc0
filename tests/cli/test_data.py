"""Captions through the command: what is bad is named, and no caption ever moves to another
image."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kinfolk.cli import main
from kinfolk.data.decode import digest
from kinfolk.data.prepare import read_quarantine
from tests.data.images import noise, save


def test_rows_with_bad_captions_are_quarantined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for n in range(7):
        save(tmp_path / f"{n}.png", noise(8, 8, n))
    (tmp_path / "copy.png").write_bytes((tmp_path / "6.png").read_bytes())
    rows = [
        "0.png,zero,",
        "0.png,also zero,",
        "1.png,,",
        f"2.png,{'x' * 10_000},",
        "gone.png,lost,",
        "3.png,same words,",
        "4.png,four,mine",
    ]
    rows += ["5.png,same  words,mine", "6.png,six,", "copy.png,a copy of six,", ",no image,"]
    (tmp_path / "t.csv").write_bytes(
        "\n".join(["image,caption,group", *rows, ""]).encode() + b"1.png,caf\xe9,\n"
    )
    with pytest.raises(SystemExit, match="0"):
        main(["data", str(tmp_path / "t.csv"), "--out", str(tmp_path / "scan"), "--workers", "0"])
    shown = capsys.readouterr().out
    assert "7 captions, 3 groups" in shown
    assert "there is no such file" in shown
    assert read_quarantine(tmp_path / "scan" / "quarantine.csv") == [
        ("1.png", "the caption is empty"),
        ("2.png", "the caption has 10,000 characters; it must have fewer than 10,000"),
        ("gone.png", "there is no such file"),
        ("(row 11)", "the image column is empty"),
        ("1.png#2", "the caption is not valid UTF-8"),
    ]
    table = pq.read_table(tmp_path / "scan" / "samples.parquet").to_pylist()
    pairs = {row["caption"]: row["key"].partition("#")[0] for row in table}
    expected = {
        "zero": "0.png",
        "also zero": "0.png",
        "same words": "3.png",
        "four": "4.png",
        "same  words": "5.png",
        "six": "6.png",
    }
    assert pairs == {**expected, "a copy of six": "copy.png"}
    for row in table:
        assert row["digest"] == digest((tmp_path / row["key"].partition("#")[0]).read_bytes())
    assert [row["group_id"] for row in table] == [0, 0, 2, 2, 2, 5, 5], (
        "one image; words and the user's group; a copy"
    )
