"""Results on disk: there and back, whole or not at all, names that can't leave the folder."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kinfolk.errors import KinfolkError
from kinfolk.evaluation.protocols import read_results, write_result


def test_written_results_are_read_again(tmp_path: Path) -> None:
    assert read_results(tmp_path) == {}
    write_result(tmp_path, "knn", {"accuracy": 0.5, "k": 20})
    path = write_result(
        tmp_path, "linear", {"accuracy": 0.75, "held_out": {0.1: 0.7}, "top5": math.nan}
    )
    assert path == tmp_path / "eval" / "linear.json"
    assert read_results(tmp_path) == {
        "knn": {"protocol": "knn", "accuracy": 0.5, "k": 20},
        "linear": {"protocol": "linear", "accuracy": 0.75, "held_out": {"0.1": 0.7}, "top5": None},
    }  # fmt: skip
    write_result(tmp_path, "knn", {"accuracy": 0.25})
    assert read_results(tmp_path)["knn"] == {"protocol": "knn", "accuracy": 0.25}


def test_numbers_of_other_libraries_and_what_is_not_finite(tmp_path: Path) -> None:
    values = {
        "a": np.float32(0.5),
        "b": torch.tensor(2),
        "c": np.arange(2),
        "d": math.nan,
        "e": [math.inf],
        "f": None,
        "g": "é",
    }
    path = write_result(tmp_path, "knn", values)
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "protocol": "knn", "a": 0.5, "b": 2, "c": [0, 1], "d": None, "e": [None], "f": None, "g": "é",  # noqa: E501
    }  # fmt: skip


def test_a_failed_write_keeps_the_old_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_result(tmp_path, "knn", {"accuracy": 0.5})

    def crash(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr("kinfolk.files.os.replace", crash)
        with pytest.raises(KinfolkError, match="disk full"):
            write_result(tmp_path, "knn", {"accuracy": 0.9})
    assert read_results(tmp_path) == {"knn": {"protocol": "knn", "accuracy": 0.5}}


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_damaged_result_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "knn.json").write_text(text)
    with pytest.raises(KinfolkError, match=r"knn\.json .*evaluate again"):
        read_results(tmp_path)
