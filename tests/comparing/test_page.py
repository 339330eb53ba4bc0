"""compare.html: every seed, links to the runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kinfolk as kf
from kinfolk.comparing.page import interval_panels
from kinfolk.evaluation.protocols import write_result
from tests.comparing.runs import make_run

ACCURACIES = {"simclr": (0.50, 0.52, 0.54), "simclr+glofnd": (0.55, 0.56, 0.60)}


@pytest.fixture
def study(tmp_path: Path) -> Path:
    for method, values in ACCURACIES.items():
        for seed, value in enumerate(values):
            epoch = {"loss": 3.0 + seed} if method == "simclr" else {"loss": 2.0, "flagged": 0.01}
            make_run(tmp_path / "my runs" / f"{method}-{seed}", method, seed, value, epoch=epoch)
    return tmp_path


def test_every_seed_is_a_dot(study: Path) -> None:
    table = kf.compare(study)
    gain, value = interval_panels(table)
    _, dots = value.figure["data"]
    assert dots["x"] == pytest.approx([50, 52, 54, 55, 56, 60])
    assert [seed for (seed,) in dots["customdata"]] == [0, 1, 2, 0, 1, 2]
    _, gains = gain.figure["data"]
    assert gains["x"] == pytest.approx([5, 4, 6])


def test_one_seed_has_no_dot_next_to_its_mean(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "simclr", 0, 0.5)
    (panel,) = interval_panels(kf.compare(tmp_path))
    _, dots = panel.figure["data"]
    assert dots["x"] == []


def test_titles_keep_the_spelling_of_knn(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", "simclr")
    write_result(folder, "knn", {"accuracy": 0.5, "measured_on": "test split", "data": "photos"})
    assert interval_panels(kf.compare(tmp_path))[0].title == "kNN accuracy"


def test_links_lead_from_the_page_to_the_runs(study: Path) -> None:
    (study / "my runs" / "simclr-0" / "report.html").write_text("")
    page = study / "pages" / "compare.html"
    kf.compare(study).save(page)
    links = re.findall(r'<td><a href="([^"]+)">', page.read_text())
    assert len(links) == 6
    assert links[0] == "../my%20runs/simclr-0/report.html"
    assert links[1] == "../my%20runs/simclr-1"
    assert (page.parent / links[0].replace("%20", " ")).is_file()


def test_a_method_wraps_before_its_detector(study: Path) -> None:
    page = study / "compare.html"
    kf.compare(study).save(page)
    names = re.findall(r'<th scope="row">(.*?)</th>', page.read_text(encoding="utf-8"))
    expected = ["<bdi>simclr</bdi>", "<bdi>simclr<wbr>+glofnd</bdi>"]
    assert names == [*expected, *(expected[0],) * 3, *(expected[1],) * 3], "the table, the runs"
