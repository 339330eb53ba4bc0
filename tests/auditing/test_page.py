"""audit.html in a browser: drawn, quiet, filtered, and hostile names stay text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kinfolk as kf
from kinfolk.detectors.known import read_pairs
from tests.report.browser import open_page
from tests.report.synthetic import HOSTILE, features, images


def made(
    folder: Path,
    *,
    names: list[str] | None = None,
    labels: list[str] | None = None,
    with_images: bool = True,
) -> Path:
    data = images(classes=["cat", "dog", "fox"])
    x = features(data)
    x[7] = x[3]
    found = kf.audit(x, 0.1, labels, keys=names, pairs=5)
    return found.save(folder, data if with_images else None) / "audit.html"


@pytest.mark.parametrize("width", [1300, 390])
@pytest.mark.parametrize("hostile", [False, True])
def test_everything_is_drawn_and_nothing_runs(
    browser: Any, tmp_path: Path, width: int, hostile: bool
) -> None:
    words = HOSTILE if hostile else ["cat", "dog", "fox"]
    names = [f"{words[i % len(words)]}{i}" for i in range(80)]
    path = made(tmp_path, names=names, labels=[words[i % len(words)] for i in range(80)])
    opened = open_page(browser, path, viewport={"width": width, "height": 900})
    page = opened.page
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.locator(".panels .plot .main-svg").count() >= 4
    assert page.locator("#cards .card").count() == 8
    assert page.locator("#group-cards .card").count() >= 1
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#cards .card .sample bdi").first.inner_text() in names


def test_the_gallery_can_be_filtered(browser: Any, tmp_path: Path) -> None:
    labels = ["cat", "dog", "fox", "owl"] * 20
    page = open_page(
        browser, made(tmp_path, names=[f"image {i}" for i in range(80)], labels=labels)
    ).page
    cards, count = page.locator("#cards .card"), page.locator("#count")

    def number() -> int:
        return int(count.inner_text().split()[0])

    everything = number()
    assert everything >= 60
    page.check("#wrong")
    assert 0 < number() <= everything
    assert cards.count() == page.locator("#cards .card:has(.wrong)").count()
    page.uncheck("#wrong")
    page.fill("#find", "IMAGE 3")
    assert 0 < number() < everything
    page.fill("#find", "nothing has this name")
    assert cards.count() == 0
    assert "loosen" in count.inner_text()
    page.fill("#find", "")
    page.select_option("#of-label", label="owl")
    assert set(page.locator("#cards .card > .sample b").all_inner_texts()) == {"owl"}
    page.select_option("#of-label", label="all")
    page.fill("#from", "1")
    assert cards.count() < 8  # duplicates alone


def test_without_images_labels_and_names(browser: Any, tmp_path: Path) -> None:
    opened = open_page(browser, made(tmp_path, with_images=False))
    assert opened.complaints == []
    assert opened.page.locator("#wrong").count() == 0
    assert opened.page.locator(".tile").count() == 0
    assert opened.page.locator("#cards .card bdi").first.inner_text().startswith("sample ")


def test_an_audit_that_flags_nothing_still_has_a_page(browser: Any, tmp_path: Path) -> None:
    found = kf.audit(np.eye(4, dtype=np.float32), 0.1)
    assert len(found.pairs) == 0
    opened = open_page(browser, found.save(tmp_path) / "audit.html")
    assert opened.complaints == []
    assert "none" in opened.page.locator("#count").inner_text()


@pytest.mark.parametrize("width", [1300, 390])
def test_texts_are_shown_whole(browser: Any, tmp_path: Path, width: int) -> None:
    data = images(classes=["cat", "dog", "fox"])
    sentence = (
        "A rather long sentence about a fox that is shown to its very last word, <b>without</b>"
        " dots. "
    )
    found = kf.audit(
        features(data), 0.1, texts=[f"{i}: {sentence * 2}" for i in range(80)], pairs=5
    )
    opened = open_page(
        browser, found.save(tmp_path) / "audit.html", viewport={"width": width, "height": 900}
    )
    assert opened.complaints == []
    quote = opened.page.locator("#cards .card .sample q").first
    assert quote.inner_text().endswith("<b>without</b> dots.")
    assert quote.evaluate(
        "e => e.scrollWidth <= e.clientWidth && e.scrollHeight <= e.clientHeight + 1"
    )
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_verdict_is_at_the_top(browser: Any, tmp_path: Path) -> None:
    page = open_page(browser, made(tmp_path, labels=["cat", "dog", "fox", "owl"] * 20)).page
    text = page.locator("#verdict").inner_text()
    assert "false negatives among its 510 negatives" in text
    assert "kinfolk " in page.locator("#verdict code").first.inner_text()


def test_marked_pairs_are_saved_as_a_file_that_known_takes(browser: Any, tmp_path: Path) -> None:
    names = [f"image {i}" for i in range(80)]
    opened = open_page(
        browser, made(tmp_path, names=names, labels=["cat", "dog", "fox", "owl"] * 20)
    )
    page = opened.page
    page.locator("#cards .card").first.locator(".row .mark input").nth(0).check()
    page.locator("#cards .card").first.locator(".row .mark input").nth(1).check()
    assert page.locator(".marks").inner_text().startswith("2 marked, 2 with their anchor")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save marked-pairs.csv").click()
    path = tmp_path / "saved.csv"
    download.value.save_as(path)
    pairs = read_pairs(path, names)
    assert pairs.shape == (2, 2)
    shown = page.locator("#cards .card").first.locator("bdi").all_inner_texts()
    assert [names[int(sample)] for sample in pairs[:, 1]] == shown[1:3]
    assert opened.complaints == []


def test_commands_can_be_copied_and_tables_are_linked(browser: Any, tmp_path: Path) -> None:
    path = made(tmp_path, labels=["cat", "dog", "fox", "owl"] * 20)
    page = open_page(browser, path).page
    page.locator("#verdict .copy").first.click()
    page.locator("#verdict .copy", has_text=re.compile("Copied|Selected")).first.wait_for()
    for link in page.locator("main a[href$='.csv']").all():
        assert (path.parent / str(link.get_attribute("href"))).is_file()


def test_the_label_comes_before_the_suggested_one(browser: Any, tmp_path: Path) -> None:
    data = images(classes=["cat", "dog", "fox"])
    labels = [data.classes[int(label)] for label in data.labels]  # type: ignore[index, union-attr]
    labels[4] = "fox"
    found = kf.audit(features(data), 0.1, labels)
    assert found.mislabels["sample"].tolist() == [4]
    page = open_page(browser, found.save(tmp_path, data) / "audit.html").page
    text = page.locator("#mislabel-cards .sample").inner_text()
    assert text.index("fox") < text.index("rather dog?")
