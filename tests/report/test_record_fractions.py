"""The figure of accuracies at shares of the labels."""

from __future__ import annotations

from typing import Any

import pytest

from kinfolk.report.record import fraction_panels


def test_a_line_for_each_protocol() -> None:
    rows = [
        {"fraction": 1.0, "accuracy": 0.9, "deviation": None},
        {"fraction": 0.01, "accuracy": 0.5, "deviation": 0.02},
    ]
    (panel,) = fraction_panels(
        [
            {"protocol": "semi", "fractions": rows},
            {"protocol": "finetune", "fractions": rows[:1]},
            {"protocol": "knn"},
        ]
    )
    semi, finetune = panel.figure["data"]
    assert (semi["name"], semi["x"], semi["y"], semi["error_y"]["array"]) == (
        "linear probe",
        [0.01, 1.0],
        [0.5, 0.9],
        [0.02, 0],
    )
    assert (finetune["x"], "error_y" in finetune) == ([1.0], False)
    assert panel.figure["layout"]["xaxis"]["ticktext"] == ["1 %", "100 %"]
    assert "50.0% with 0.01 of the labels" in panel.description


@pytest.mark.parametrize(
    "fractions",
    [
        None,
        3,
        [],
        ["x"],
        [{}],
        [{"fraction": 0, "accuracy": 1}],
        [{"fraction": 0.1, "accuracy": None}],
    ],
)
def test_what_is_not_there_is_not_drawn(fractions: Any) -> None:
    assert fraction_panels([{"protocol": "semi", "fractions": fractions}]) == []
