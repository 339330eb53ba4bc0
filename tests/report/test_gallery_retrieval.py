"""The retrieval section: nearest first, the own and the flagged marked as the thresholds say,
captions escaped."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from kinfolk.detectors import FNC, GloFND, Oracle, StartAt
from kinfolk.report import write_report
from kinfolk.report.gallery import draw_retrieval
from kinfolk.report.html import render_template
from kinfolk.training.checkpoint import read_checkpoint
from kinfolk.training.load_run import flagged_candidates, load_framework, open_run
from kinfolk.training.run_folder import Run
from kinfolk.training.train import train
from tests.training.pairs_of import SMALL, write_pairs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("retrieval")
    data = write_pairs(root / "d", 32)
    text = data.read_text().replace(
        "the green wall", "<b>the</b> </script><script>window.hacked=1</script> wall"
    )
    data.write_text(text, encoding="utf-8")
    settings: dict[str, Any] = {
        **SMALL,
        "detector.alpha": 0.2,
        "detector.init": "quantile",
        "detector.start_epoch": 1,
    }
    return train(
        data,
        root / "run",
        method="clip+glofnd",
        epochs=3,
        batch_size=12,
        settings=settings,
        progress=False,
    )


def test_the_section_shows_what_was_found(run: Run) -> None:
    opened = open_run(run.path)
    section = draw_retrieval(opened, opened.data())
    assert section.count("<figure>") == 12
    assert 'class="mark positive"' in section
    assert 'class="mark kin"' in section
    assert "<script>" not in section
    assert "&lt;b&gt;the&lt;/b&gt;" in section
    numbers = [float(each) for each in re.findall(r'class="num">(-?[\d.]+)', section)]
    assert len(numbers) == 12 * 6
    for start in range(0, len(numbers), 6):
        assert numbers[start : start + 6] == sorted(numbers[start : start + 6], reverse=True)


def test_kin_are_those_above_the_learned_thresholds(run: Run) -> None:
    opened = open_run(run.path)
    data = opened.data()
    framework = load_framework(opened.config, run, data, opened.towers().tokenizer)
    stored = read_checkpoint(run.checkpoint)["state_dict"]
    for direction, detector in zip(("image", "text"), framework.detectors, strict=True):
        assert isinstance(detector, StartAt)
        names = [
            name for name in stored if f".{direction}." in name and name.endswith("store.threshold")
        ]
        (threshold_N,) = (stored[name] for name in names)
        ids = torch.arange(6)
        sim_QC = torch.linspace(-1, 1, 60).view(6, 10)
        own_QC = torch.zeros(6, 10, dtype=torch.bool)
        own_QC[:, 9] = True
        kin_QC = flagged_candidates(detector, sim_QC, ids, torch.arange(10), own_QC)
        assert torch.equal(kin_QC, (sim_QC > threshold_N[:6, None]) & ~own_QC)


@pytest.mark.parametrize(
    ("detector", "expected"),
    [
        (FNC(top_k=1), [[False, True, False]]),
        (Oracle(torch.tensor([0, 1, 0, 0])), [[False, False, True]]),
        (GloFND(num_samples=4, alpha=0.5), [[False] * 3]),
    ],
)
def test_candidates_that_a_detector_treats_as_kin_are_flagged(
    detector: Any, expected: list[list[bool]]
) -> None:
    own_QC = torch.tensor([[True, False, False]])
    kin_QC = flagged_candidates(
        detector.eval(),
        torch.tensor([[0.9, 0.5, 0.2]]),
        torch.tensor([0]),
        torch.tensor([0, 1, 2]),
        own_QC,
    )
    assert kin_QC.tolist() == expected


def test_without_a_detector_nothing_is_said_of_kin() -> None:
    wall = {"shown": {"text": "a wall", "uri": ""}, "similarity": 0.5, "mark": "positive"}
    query = {"shown": {"text": "a.png", "uri": "data:,"}, "flagged": 0, "results": [wall]}
    words = {"by_image": [query], "by_text": [query], "titles": ("Captions", "Images")}
    section = render_template("report/retrieval.html", detector="", **words)
    assert "kin" not in section
    assert "a wall" in section


def test_the_report_has_the_section_on_retrieval(run: Run) -> None:
    page = write_report(run.path).read_text(encoding="utf-8")
    assert '<section id="retrieval"' in page
    assert '<a href="#retrieval">' in page
    assert "<script>window" not in page
