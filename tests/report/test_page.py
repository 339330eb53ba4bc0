"""The page in a browser: everything is drawn, nothing complains, nothing is fetched, hostile names
stay text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kinfolk as kf
from kinfolk.data.images import ImageData
from kinfolk.data.source import as_utf8
from kinfolk.report import write_report
from kinfolk.report.html import mark_code, script_json
from kinfolk.training.load_run import OpenedRun, open_run
from kinfolk.training.train import train
from tests.report.browser import Opened, open_page
from tests.report.synthetic import (
    CONFIG,
    HOSTILE,
    all_features,
    images,
    make_run,
    method,
)
from tests.training.small import SMALL

CURVES = (
    "loss",
    "knn",
    "flagged",
    "detection",
    "anchor_detection",
    "clusters",
    "similarity",
    "lr",
    "cost",
)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = images(classes=["cat", "dog", "fox"])
    run = make_run(tmp_path_factory.mktemp("full") / "run", data=data)
    rows = [
        {"fraction": 0.01, "accuracy": 0.5, "deviation": 0.02},
        {"fraction": 1.0, "accuracy": 0.9, "deviation": None},
    ]
    (run / "eval" / "semi.json").write_text(
        json.dumps({"protocol": "semi", "accuracy": 0.7, "fractions": rows}), encoding="utf-8"
    )
    return write_report(run, data, all_features(data), method(data))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = images(classes=HOSTILE, keys=[as_utf8(name) for name in HOSTILE])
    config = {
        **CONFIG,
        "method": HOSTILE[0],
        "data": {"source": HOSTILE[2], "image_column": HOSTILE[1]},
    }
    run = make_run(
        tmp_path_factory.mktemp("hostile") / "<img src=x onerror=window.hacked=5>",
        data=data,
        config=config,
    )
    (run / "eval" / "<b onclick=alert(1)>.json").write_text(
        '{"accuracy": 2, "<i>": "</script><script>window.hacked=6</script>"}'
    )
    return write_report(run, data, all_features(data), method(data))


def assert_quiet(opened: Opened) -> None:
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith(("file:", "data:", "blob:"))] == []


@pytest.fixture(scope="module")
def wide(browser: Any, full: Path) -> Opened:
    """The full page in a wide window, opened once: that takes longer than all that the tests do
    with it. The first of them sees it as it is after opening."""
    opened = open_page(browser, full, viewport={"width": 1400, "height": 900}, color_scheme="light")
    assert_all_is_drawn(opened, 1400, "light")
    return opened


@pytest.fixture(scope="module")
def narrow(browser: Any, full: Path) -> Opened:
    """The same on a telephone, dark."""
    window = {"width": 390, "height": 900}
    opened = open_page(
        browser, full, viewport=window, color_scheme="dark", has_touch=True, is_mobile=True
    )
    assert_all_is_drawn(opened, 390, "dark")
    return opened


def assert_all_is_drawn(opened: Opened, width: int, scheme: str) -> None:
    page = opened.page
    assert page.locator("#curves .panels figure").count() == len(CURVES) + 1  # and the thresholds
    for panel in (*CURVES, "levels"):
        assert page.locator(f"#plot-{panel} path.js-line").count() >= 1, panel
        assert page.locator(f"#plot-{panel}").get_attribute("aria-label"), panel
    assert page.locator("#plot-map .point").count() == 80
    assert page.locator(".strips img").count() == 6
    assert page.evaluate(
        "[...document.images].every(image => image.complete && image.naturalWidth > 0)"
    )
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#results tbody tr").count() == 5
    assert page.locator("#cards .card").count() == 8
    assert_quiet(opened)


def test_every_panel_and_image_is_drawn(wide: Opened, narrow: Opened) -> None:
    """As soon as the page is open, and still when it has been used."""
    for opened in (wide, narrow):
        assert opened.page.locator("#plot-map .point").count() == 80
        assert_quiet(opened)


def hover(page: Any, sample: int) -> None:
    page.evaluate("document.getElementById('map').scrollIntoView({behavior: 'instant'})")
    box = page.locator("#plot-map .point").nth(sample).bounding_box()
    page.mouse.move(0, 0)
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=4)
    page.wait_for_selector("#map .tip:not([hidden])")


def test_hovering_shows_image_label_and_name(wide: Opened) -> None:
    opened = wide
    hover(opened.page, 5)
    tip = opened.page.locator("#map .tip")
    key = tip.locator(".key").inner_text()
    number = int(key.removeprefix("animals/").removesuffix(".png"))
    assert tip.locator("b").inner_text() == ["cat", "dog", "fox"][number % 3]
    position, source = opened.page.evaluate("""() => {
            const style = getComputedStyle(document.querySelector("#map .tip .tile"));
            return [style.backgroundPosition, style.backgroundImage];
        }""")
    left, top = (float(part.removesuffix("%")) / 100 * 8 for part in position.split())
    assert source.startswith('url("data:image/webp')
    # 80 images: a sheet of 9 columns and rows
    assert (round(left, 2), round(top, 2)) == (number % 9, number // 9)
    assert_quiet(opened)


def test_a_finger_taps_once_to_see_and_again_to_choose(narrow: Opened) -> None:
    page = narrow.page
    page.evaluate("document.getElementById('map').scrollIntoView({behavior: 'instant'})")
    left, top = page.evaluate("""() => {
            const boxes = [...document.querySelectorAll("#plot-map .point")].map((point) => point.getBoundingClientRect());
            const gap = (a, b) => Math.hypot(a.left - b.left, a.top - b.top);
            const lone = (k) => Math.min(...boxes.filter((_, other) => other !== k).map((box) => gap(box, boxes[k])));
            const anchors = boxes.map((_, k) => k).filter((k) => page.isAnchor(k)).sort((a, b) => lone(b) - lone(a));
            const box = boxes[anchors[0]];
            return [box.left + box.width / 2, box.top + box.height / 2];
        }""")  # noqa: E501
    page.touchscreen.tap(left, top)
    page.wait_for_timeout(500)  # two taps, not a double one
    assert "tap again" in page.locator("#map .tip").inner_text()
    assert page.locator("#chosen .card").count() == 0
    page.touchscreen.tap(left, top)
    page.wait_for_selector("#chosen .card")
    assert_quiet(narrow)


def test_a_class_can_be_highlighted_and_the_keyboard_walks_it(wide: Opened) -> None:
    page = wide.page
    page.locator("#legend").get_by_role("button", name="dog").click()
    assert (
        page.locator("#legend").get_by_role("button", name="dog").get_attribute("aria-pressed")
        == "true"
    )
    faint = page.evaluate(
        "[...document.querySelectorAll('#plot-map .point')].filter(p => Number(p.style.opacity) <"
        " 0.2).length"
    )
    assert faint == 80 - 27
    page.locator("#plot-map").focus()
    walked = []
    for _ in range(2):
        page.keyboard.press("ArrowRight")
        key = page.locator("#map .tip .key").inner_text()
        walked.append(int(key.removeprefix("animals/").removesuffix(".png")))
    assert walked[0] % 3 == 1, "a dog"
    assert walked[1] == walked[0] + 3, "the next one"
    page.keyboard.press("Escape")
    assert not page.locator("#map .tip").is_visible()
    assert_quiet(wide)


def test_the_theme_can_be_switched_and_nothing_offers_to_upload(wide: Opened) -> None:
    opened = wide
    before = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    opened.page.locator("#theme").click()
    assert opened.page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    titles = opened.page.evaluate(
        "[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)"
    )
    assert titles
    assert not [title for title in titles if "hare" in title or "loud" in title]
    assert_quiet(opened)


def test_the_page_is_printed_and_keeps_its_theme(narrow: Opened, tmp_path: Path) -> None:
    opened = narrow
    opened.page.pdf(path=tmp_path / "report.pdf", format="A4")
    assert (tmp_path / "report.pdf").stat().st_size > 20_000
    assert opened.page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert_quiet(opened)


def test_hostile_names_stay_text(browser: Any, hostile: Path) -> None:
    opened = open_page(browser, hostile)
    page = opened.page
    for sample in range(len(HOSTILE)):
        page.locator("#plot-map").focus()
        page.keyboard.press("ArrowRight")
        shown = page.locator("#map .tip .key").evaluate("element => element.textContent")
        assert (
            shown == HOSTILE[sample].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            or "\udce9" in HOSTILE[sample]
        )
    for button in page.locator("#legend button").all():
        button.click()
    page.locator("#of-label").select_option(index=3)
    page.locator("#cards button.tile").first.click()
    assert page.locator("#chosen .card").count() == 1
    assert page.evaluate("window.hacked") is None
    assert page.locator("h1").inner_text() == "<img src=x onerror=window.hacked=5>"
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200
    assert page.locator("main script, main [onerror], main [onclick]").count() == 0
    assert_quiet(opened)


def test_no_other_script_may_run(browser: Any, full: Path, tmp_path: Path) -> None:
    text = full.read_text(encoding="utf-8").replace(
        "</main>", "<script>window.hacked=1</script><img src=x onerror='window.hacked=2'></main>"
    )
    (tmp_path / "tampered.html").write_text(text, encoding="utf-8")
    opened = open_page(browser, tmp_path / "tampered.html")
    assert opened.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in complaint for complaint in opened.complaints)


def test_a_run_with_nothing_but_its_configuration(browser: Any, tmp_path: Path) -> None:
    config = {**CONFIG, "data": {**CONFIG["data"], "source": "nowhere-at-all"}}
    opened = open_page(browser, write_report(make_run(tmp_path / "run", bare=True, config=config)))
    assert opened.page.locator(".panels, #results, #gallery, #plot-map, #views").count() == 0
    assert "no map" in opened.page.locator("#map").inner_text()
    assert "resnet10" in opened.page.locator("#config").inner_text()
    assert_quiet(opened)


def test_without_labels_points_have_one_colour(browser: Any, tmp_path: Path) -> None:
    data = images(num=20)
    run = make_run(tmp_path / "run", data=data)
    opened = open_page(browser, write_report(run, data, all_features(data), method(data)))
    page = opened.page
    assert page.locator("#legend").is_hidden()
    points = "[...document.querySelectorAll('#plot-map .point')].map(p => p.style.fill)"
    assert len(set(page.evaluate(points))) == 1
    assert "PCA" in page.locator("#map .intro").inner_text()
    assert page.locator("#wrong, #of-label, .right, .wrong").count() == 0
    assert page.locator("#count").inner_text() == "15 of 15"
    assert_quiet(opened)


def test_code_is_marked_and_the_rest_is_text() -> None:
    assert mark_code("`a <b>` & `c`") == "<code>a &lt;b&gt;</code> &amp; <code>c</code>"


def test_json_cannot_leave_its_element() -> None:
    text = script_json(["</script>", "<!--", "&amp;", "\u2028", "\udce9"])
    assert not set("<>&\u2028") & set(text)
    assert text.isascii()


def test_the_report_of_a_training_reads_no_image_again(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (48, 16, 16, 3), dtype=np.uint8)
    settings = {**SMALL}
    run = kf.train(
        pixels, tmp_path / "run", epochs=1, batch_size=16, settings=settings, progress=False
    )
    assert run.images is None, "the caller does not hold the pixels"
    text = (run.path / "report.html").read_text(encoding="utf-8")
    assert 'id="plot-map"' in text, (
        "an array cannot be read again, so the images came from the training"
    )
    assert "There is no map in this report" not in text
    assert "There is no gallery of kin in this report" not in text


def test_the_report_embeds_only_what_the_training_has_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """48 labelled images are measured by the nearest neighbours; the 12 without a label are not."""
    random, embedded = np.random.default_rng(0), list[list[int]]()
    pixels, labels = random.integers(0, 255, (60, 16, 16, 3), dtype=np.uint8), np.arange(60) % 3
    labels[48:] = -1
    np.savez(tmp_path / "images.npz", x_train=pixels, y_train=labels)
    original = OpenedRun.features

    def noted(self: OpenedRun, data: ImageData, ids: Any = None, **more: Any) -> Any:
        embedded.append(ids.tolist())
        return original(self, data, ids, **more)

    monkeypatch.setattr(OpenedRun, "features", noted)
    settings = {**SMALL, "trainer.loggers": [], "trainer.precision": "32"}
    run = kf.train(
        tmp_path / "images.npz",
        tmp_path / "run",
        epochs=2,
        batch_size=20,
        settings=settings,
        progress=False,
    )
    assert embedded == [list(range(48, 60))]
    assert run.features is None, "the caller does not hold the features"
    again = train(
        tmp_path / "images.npz",
        tmp_path / "again",
        epochs=1,
        batch_size=20,
        settings=settings,
        progress=False,
    )
    assert again.features is not None
    assert again.images is not None
    ids, left = again.features
    np.testing.assert_allclose(
        left, original(open_run(again.path), again.images, ids), rtol=1e-4, atol=1e-5
    )
