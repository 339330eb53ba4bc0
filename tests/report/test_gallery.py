"""The gallery of kin, used as a person uses them: mouse, keyboard, a
narrow screen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kinfolk.report import write_report
from tests.report.browser import Opened, open_page
from tests.report.synthetic import all_features, images, make_run, method

CARDS = "#cards .card"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = images(classes=["cat", "dog", "fox"])
    run = make_run(tmp_path_factory.mktemp("gallery") / "run", data=data)
    return write_report(run, data, all_features(data), method(data))


@pytest.fixture(scope="module")
def once(browser: Any, path: Path) -> Opened:
    return open_page(browser, path, reduced_motion="reduce")


@pytest.fixture
def opened(once: Opened) -> Iterator[Opened]:
    """The page as it is after opening; opened once, for that takes longer than all that is done
    with it."""
    page = once.page
    if page.locator("#chosen .close").count():
        page.locator("#chosen .close").click()
    page.uncheck("#wrong")
    for control, value in (("#from", "-1"), ("#find", "")):
        page.fill(control, value)
    page.select_option("#of-label", "")
    yield once
    assert once.complaints == []


def anchors(page: Any) -> list[str]:
    found: list[str] = page.locator("#cards .card > .sample bdi").all_inner_texts()
    return found


def test_cards_come_a_part_at_a_time(opened: Opened) -> None:
    page = opened.page
    page.fill("#find", "animals")
    assert page.locator(CARDS).count() == 8
    assert page.locator("#count").inner_text() == "60 of 60"
    for number in (32, 56, 60):
        page.get_by_role("button", name="Show more").click()
        assert page.locator(CARDS).count() == number
    assert len(set(anchors(page))) == page.locator(CARDS).count() == 60
    assert page.locator("#more").is_hidden()


def test_right_and_wrong_are_marked(opened: Opened) -> None:
    page = opened.page
    first = page.locator(CARDS).first
    label = first.locator("> .sample b").inner_text()
    assert (
        first.locator(".row .right b").all_inner_texts()
        == [f"✓ {label}"] * first.locator(".row .right").count()
    )
    assert all(
        text.startswith("✗ ") and label not in text
        for text in first.locator(".row .wrong b").all_inner_texts()
    )
    assert page.locator(".row .right").count() > 0 < page.locator(".row .wrong").count()
    note = first.locator("> .sample .num").inner_text()
    assert note.startswith("above\u00a00.900\n")
    assert note.endswith("\u00a0right")


def test_a_click_switches_the_anchor(opened: Opened) -> None:
    page = opened.page
    kin = page.locator(CARDS).first.locator(".row .sample").first
    name = kin.locator("bdi").inner_text()
    kin.locator("button").click()
    assert page.locator("#chosen .card > .sample bdi").inner_text() == name
    other = page.locator("#chosen .row .sample").last
    name = other.locator("bdi").inner_text()
    other.locator("button").click()
    assert page.locator("#chosen .card > .sample bdi").inner_text() == name
    page.get_by_role("button", name="Close").click()
    assert page.locator("#chosen .card").count() == 0


def test_filters_choose_the_cards_of_a_label_and_wrong_ones(opened: Opened) -> None:
    page = opened.page
    page.select_option("#of-label", label="dog")
    assert page.locator("#count").inner_text() == "20 of 60"
    assert set(page.locator("#cards .card > .sample b").all_inner_texts()) == {"dog"}
    page.select_option("#of-label", label="all")
    page.check("#wrong")
    page.evaluate("document.querySelectorAll('#more')[0].click()")
    assert page.locator("#cards .card:not(:has(.wrong))").count() == 0 < page.locator(CARDS).count()
    page.uncheck("#wrong")
    page.fill("#from", "0.97")
    shown = [float(text) for text in page.locator("#cards .row .num").all_inner_texts()]
    assert min(shown) >= 0.97
    page.fill("#from", "")
    page.fill("#find", "ANIMALS/0004")
    assert 0 < page.locator(CARDS).count() < 60
    assert page.locator("#cards .card:not(:has-text('animals/0004.png'))").count() == 0
    page.fill("#find", "no such name")
    assert page.locator(CARDS).count() == 0
    assert "loosen" in page.locator("#count").inner_text()


def test_the_keyboard_walks_the_gallery(opened: Opened) -> None:
    page = opened.page
    first = page.locator("#cards button.tile").nth(0)
    second = page.locator("#cards button.tile").nth(1)
    page.locator("#wrong").focus()
    page.keyboard.press("Tab")
    assert first.evaluate("element => element === document.activeElement")
    page.keyboard.press("ArrowRight")
    assert second.evaluate("element => element === document.activeElement")
    focused = (
        "[...document.querySelectorAll('.card')].indexOf(document.activeElement.closest('.card'))"
    )
    before = page.evaluate(focused)
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) > before  # cards without kin are passed over
    name = page.evaluate(
        "document.activeElement.closest('.sample').querySelector('bdi').textContent"
    )
    page.keyboard.press("Enter")
    assert page.locator("#chosen .card > .sample bdi").inner_text() == name
    assert page.evaluate("document.activeElement.closest('#chosen') !== null")


def test_a_point_of_the_map_becomes_the_anchor(opened: Opened) -> None:
    page = opened.page
    page.locator("#plot-map").focus()
    page.keyboard.press("ArrowRight")
    name = page.locator("#map .tip .key").inner_text()
    page.keyboard.press("Enter")
    assert page.locator("#chosen .card > .sample bdi").inner_text() == name


def test_a_method_without_a_detector_shows_neighbours(browser: Any, tmp_path: Path) -> None:
    data = images(classes=["cat", "dog"], num=24)
    run = make_run(tmp_path / "run", data=data)
    found = open_page(
        browser, write_report(run, data, all_features(data), method(data, detector=False))
    )
    assert found.page.locator("#gallery h2").inner_text() == "Nearest neighbours"
    assert found.page.locator("#cards .card").first.locator(".row .sample").count() == 10
    assert found.page.locator("#plot-levels").count() == 0
    assert found.complaints == []


def test_without_a_checkpoint_the_page_says_so(browser: Any, tmp_path: Path) -> None:
    data, missing = images(num=20), list[str]()
    page = open_page(
        browser,
        write_report(
            make_run(tmp_path / "run", data=data),
            data,
            all_features(data),
            on_missing=missing.append,
        ),
    ).page
    assert "checkpoint" in page.locator("#gallery").inner_text()
    assert "no gallery" in missing[0]
