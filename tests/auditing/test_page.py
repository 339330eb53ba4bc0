"""audit.html in a browser: drawn, quiet, filtered, and hostile names stay text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kinfolk as kf
from kinfolk.data.source import read_excluded
from kinfolk.detectors.known import read_known
from tests.report.browser import Opened, open_page, resize
from tests.report.synthetic import HOSTILE, features, images

LABELS = ["cat", "dog", "fox", "owl"] * 20


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


@pytest.fixture(scope="module")
def usual(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Opened]:
    """A page with images, labels and names, opened once: that takes longer than all that the tests
    do with it. The first of them sees it as it is after opening."""
    names = [f"image {i}" for i in range(80)]
    path = made(tmp_path_factory.mktemp("usual"), names=names, labels=LABELS)
    opened = open_page(browser, path, viewport={"width": 1300, "height": 900})
    assert_all_is_drawn(opened, names, 1300)
    return path, opened


@pytest.fixture(scope="module")
def nameless(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """A page without images, labels and names."""
    return open_page(browser, made(tmp_path_factory.mktemp("nameless"), with_images=False))


def assert_all_is_drawn(opened: Opened, names: list[str], width: int) -> None:
    page = opened.page
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.locator(".panels .plot .main-svg").count() >= 4
    assert page.locator("#cards .card").count() == 8
    assert page.locator("#group-cards .card").count() >= 1
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#cards .card .sample bdi").first.inner_text() in names


def test_everything_is_drawn_and_nothing_runs(browser: Any, tmp_path: Path) -> None:
    """On a telephone, with names and labels that want to be more than text, and then in a wider
    window."""
    names = [f"{HOSTILE[i % len(HOSTILE)]}{i}" for i in range(80)]
    path = made(tmp_path, names=names, labels=[HOSTILE[i % len(HOSTILE)] for i in range(80)])
    opened = open_page(browser, path, viewport={"width": 390, "height": 900})
    for width in (390, 1300):
        resize(opened, width)
        assert_all_is_drawn(opened, names, width)


def test_the_gallery_can_be_filtered(usual: tuple[Path, Opened]) -> None:
    page = usual[1].page
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
    page.fill("#from", "-1")
    assert number() == everything


def test_without_images_labels_and_names(nameless: Opened) -> None:
    assert nameless.complaints == []
    assert nameless.page.locator("#wrong").count() == 0
    assert nameless.page.locator(".tile").count() == 0
    assert nameless.page.locator("#cards .card bdi").first.inner_text().startswith("sample ")


def test_an_audit_that_flags_nothing_still_has_a_page(browser: Any, tmp_path: Path) -> None:
    found = kf.audit(np.eye(4, dtype=np.float32), 0.1)
    assert len(found.pairs) == 0
    opened = open_page(browser, found.save(tmp_path) / "audit.html")
    assert opened.complaints == []
    assert "none" in opened.page.locator("#count").inner_text()


def test_texts_are_shown_whole(browser: Any, tmp_path: Path) -> None:
    data = images(classes=["cat", "dog", "fox"])
    sentence = (
        "A rather long sentence about a fox that is shown to its very last word, <b>without</b>"
        " dots. "
    )
    found = kf.audit(
        features(data), 0.1, texts=[f"{i}: {sentence * 2}" for i in range(80)], pairs=5
    )
    opened = open_page(
        browser, found.save(tmp_path) / "audit.html", viewport={"width": 390, "height": 900}
    )
    quote = opened.page.locator("#cards .card .sample q").first
    for width in (390, 1300):
        resize(opened, width)
        assert opened.complaints == []
        assert quote.inner_text().endswith("<b>without</b> dots.")
        assert quote.evaluate(
            "e => e.scrollWidth <= e.clientWidth && e.scrollHeight <= e.clientHeight + 1"
        )
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_verdict_is_at_the_top(usual: tuple[Path, Opened]) -> None:
    page = usual[1].page
    text = page.locator("#verdict").inner_text()
    assert "false negatives among its 510 negatives" in text
    assert "kinfolk " in page.locator("#verdict code").first.inner_text()


ODD = ["=1+1", "-1.png", "back\\slash", 'a "quoted", name', "tab\tand\nline", "\u200bno width"]


def test_marked_samples_are_saved_as_files_that_a_training_takes(
    browser: Any, tmp_path: Path
) -> None:
    names = [f"{ODD[i % len(ODD)]} {i}" for i in range(80)]
    opened = open_page(browser, made(tmp_path, names=names, labels=LABELS))
    page = opened.page
    page.locator("#more").click()
    boxes = page.locator("#cards .card .row .mark input")
    number = min(40, boxes.count())
    for at in range(number):
        boxes.nth(at).check()
    assert f", {number} with their anchor" in page.locator(".marks").inner_text()
    saved = {}
    for name in ("marked.csv", "marked-pairs.csv"):
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Save {name}").click()
        saved[name] = tmp_path / name
        download.value.save_as(saved[name])
    pairs = read_known(saved["marked-pairs.csv"], names)
    assert pairs.shape == (number, 2)
    assert torch.equal(pairs, read_known(saved["marked-pairs.csv"]))
    excluded = read_excluded(saved["marked.csv"])
    assert set(excluded) == {names[int(sample)] for sample in pairs[:, 1]}
    assert opened.complaints == []


def test_the_tables_of_an_audit_are_taken_too(tmp_path: Path) -> None:
    names = [f"{ODD[i % len(ODD)]} {i}" for i in range(80)]
    x = features(images(classes=["cat", "dog", "fox"]))
    x[7] = x[3]
    found = kf.audit(x, 0.1, keys=names)
    found.save(tmp_path)
    listed = torch.tensor(np.stack([found.pairs["anchor"], found.pairs["kin"]], 1))
    for kind in ("csv", "parquet"):
        assert torch.equal(read_known(tmp_path / f"pairs.{kind}", names), listed)
    assert read_excluded(tmp_path / "groups.csv") == [names[3], names[7]]


def test_samples_without_names_are_saved_without_keys(nameless: Opened, tmp_path: Path) -> None:
    page = nameless.page
    page.locator("#cards .card .row .mark input").first.check()
    with page.expect_download() as download:
        page.get_by_role("button", name="Save marked.csv").click()
    download.value.save_as(tmp_path / "marked.csv")
    assert (tmp_path / "marked.csv").read_text().startswith("id\n")


def test_an_image_can_be_enlarged(usual: tuple[Path, Opened]) -> None:
    opened = usual[1]
    page = opened.page
    small = page.locator("#cards .card .row .tile").first.bounding_box()
    page.locator("#cards .card .row .link").first.click()
    dialog = page.locator("dialog.zoom")
    large = dialog.locator(".tile").bounding_box()
    assert large["width"] > 3 * small["width"]
    assert dialog.inner_text().startswith("image ")
    dialog.get_by_role("button", name="Close").click()
    assert not dialog.is_visible()
    assert opened.complaints == []


def test_commands_can_be_copied_and_tables_are_linked(usual: tuple[Path, Opened]) -> None:
    path, page = usual[0], usual[1].page
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
