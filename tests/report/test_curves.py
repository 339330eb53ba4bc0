"""The curves: which are drawn, in which form, and what is said of them in words."""

from __future__ import annotations

import math

import plotly.graph_objects as go
import pytest

from kinfolk.report.html import curve_panels
from tests.report.synthetic import metrics


def test_every_metric_has_its_panel() -> None:
    panels = {panel.id: panel for panel in curve_panels(metrics())}
    assert list(panels) == [
        "loss",
        "knn",
        "flagged",
        "detection",
        "anchor_detection",
        "clusters",
        "similarity",
        "lr",
        "cost",
    ]
    assert [trace["name"] for trace in panels["detection"].figure["data"]] == [
        "Precision",
        "Recall",
        "F1",
    ]
    assert [trace["y"][-1] for trace in panels["anchor_detection"].figure["data"]] == [
        0.75,
        0.3,
        0.43,
    ]
    assert [trace["name"] for trace in panels["clusters"].figure["data"]] == ["MTPR", "MTNR", "NMI"]
    assert [trace["name"] for trace in panels["similarity"].figure["data"]] == [
        "True positives",
        "False negatives",
    ]
    assert [trace["name"] for trace in panels["cost"].figure["data"]] == ["Steps", "Refresh"]
    assert panels["knn"].figure["data"][0]["x"] == [2, 4, 6, 8, 10, 12]


def test_the_levels_of_a_hierarchy_have_a_panel() -> None:
    rows = [{"epoch": 1.0, "conforming": 0.9, "clustered": 0.5, "largest_cluster": 0.1}]
    (panel,) = curve_panels(rows)
    assert (
        panel.description
        == "Conforming: 90.0% in epoch 1; Clustered: 50.0% in epoch 1; Largest: 10.0% in epoch 1"
    )


@pytest.mark.parametrize(("last", "step"), [(1, 1), (3, 1), (7, 1), (12, 2), (100, 17)])
def test_the_axis_of_epochs_has_whole_numbers(last: int, step: int) -> None:
    (panel,) = curve_panels([{"epoch": epoch, "loss": 1.0} for epoch in range(1, last + 1)])
    axis = panel.figure["layout"]["xaxis"]
    assert (axis["tickmode"], axis["tick0"], axis["dtick"]) == ("linear", 1, step)


def test_what_the_run_has_not_is_left_out() -> None:
    rows = [
        {"epoch": 1, "loss": 2.0, "knn": math.nan},
        {"epoch": 2, "loss": math.inf},
        {"epoch": 3, "loss": 1.0},
    ]
    (panel,) = curve_panels(rows)
    assert panel.figure["data"][0]["x"] == [1, 3]
    assert panel.description == "Loss: 2 in epoch 1, 1 in epoch 3"
    assert curve_panels([]) == []


@pytest.mark.parametrize("panel", curve_panels(metrics()), ids=lambda panel: panel.id)
def test_plotly_knows_every_attribute(panel: object) -> None:
    figure = getattr(panel, "figure")  # noqa: B009
    # palette names are the page's
    data = [{**trace, "line": {"width": 2}, "marker": {"size": 5}} for trace in figure["data"]]
    go.Figure(data=data, layout=figure["layout"])


def test_a_line_is_named_also_where_it_is_alone() -> None:
    (panel,) = curve_panels([{"epoch": 1, "tp_similarity": 0.5}])
    assert panel.figure["layout"]["showlegend"]
    assert [trace["name"] for trace in panel.figure["data"]] == ["True positives"]
