"""MTPR, MTNR and NMI in a training's log: what they are measured on, and when they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from kinfolk.clustering import PseudoLabels
from kinfolk.evaluation.detection import label_nmi, mtpr_mtnr
from kinfolk.frameworks import PCL, SimCLR
from kinfolk.report.html import curve_panels
from kinfolk.training.epoch_end import ClusterQuality, pseudo_labels
from kinfolk.training.train import train
from tests.report.synthetic import images
from tests.training.small import SMALL

SETTINGS: dict[str, Any] = {
    **SMALL,
    "framework.queue_size": 0,
    "framework.warmup_epochs": 1,
    "framework.num_clusters": [10, 30],
    "knn.every": 0,
}


class Module:
    """What the measurement sees of a training."""

    def __init__(self, framework: nn.Module) -> None:
        self.framework = framework


def test_cluster_quality_equals_mtpr_mtnr_and_nmi() -> None:
    data = images(40, ["a", "b", "c"])
    assert data.labels is not None
    truth = data.labels[:30]
    framework = PCL(nn.Flatten(), nn.Linear(12, 4), 30, (3, 5), 0, queue_size=0, schedule="linear")
    measure, module = ClusterQuality(data), Module(framework)
    assert measure(module, 1) == {}, "before the first clustering"  # type: ignore[arg-type]
    framework.refresh(nn.functional.normalize(torch.randn(30, 4), dim=1), 0.5)
    found = measure(module, 1)  # type: ignore[arg-type]
    rates = mtpr_mtnr(framework.prototypes.clusters.distinct[0], truth)
    clusters = framework.prototypes.clusters.labels[0]
    assert found == {"mtpr": rates.mtpr, "mtnr": rates.mtnr, "nmi": label_nmi(clusters, truth)}
    assert found["mtpr"] < mtpr_mtnr(clusters, truth).mtpr, "who is not accepted is alone"
    geometric = ClusterQuality(data, "geometric")(module, 1)  # type: ignore[arg-type]
    assert geometric == {**found, "nmi": label_nmi(clusters, truth, "geometric")}
    assert ClusterQuality(images(40))(module, 1) == {}, "without labels"  # type: ignore[arg-type]
    plain = SimCLR(nn.Flatten(), nn.Linear(12, 4))
    assert measure(Module(plain), 1) == {}, "without clusters"  # type: ignore[arg-type]
    plain.others = PseudoLabels(30, (3,), seed=0)
    plain.others.refresh(torch.randn(30, 4))
    assert pseudo_labels(plain) is not None


def test_a_training_logs_its_clusters(tmp_path: Path) -> None:
    """The log has the figures of PCL from the first clustering on, and a resumption ends in the
    same."""
    arguments: dict[str, Any] = {"method": "pcl", "batch_size": 256, "settings": SETTINGS}
    run = train("digits", tmp_path / "run", epochs=3, progress=False, **arguments)
    rows = run.epochs()
    assert "mtpr" not in rows[0]
    assert all(0 <= row[name] <= 1 for row in rows[1:] for name in ("mtpr", "mtnr", "nmi"))
    assert sum("nmi" in row for row in rows) == 2
    assert train(out=run.path, resume=True, progress=False).epochs() == rows


def test_the_features_of_any_method_are_clustered_if_set(tmp_path: Path) -> None:
    settings = {
        name: value for name, value in SETTINGS.items() if not name.startswith("framework.")
    }
    run = train(
        "digits",
        tmp_path / "run",
        epochs=1,
        batch_size=256,
        settings={**settings, "knn.every": 1, "knn.nmi_seeds": 3},
        progress=False,
    )
    (row,) = run.epochs()
    assert 0 < row["features_nmi"] < 1
    assert 0 < row["features_nmi_deviation"] < 1
    assert "features_nmi" in [panel.id for panel in curve_panels([row])]
