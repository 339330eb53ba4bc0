"""Takes the screenshots in docs/images from runs, an audit and a comparison in one folder.

    cd FOLDER                               # with photos/, runs/glofnd and audit/ of the guide,
                                            and:
    kinfolk train --data digits --out runs/ifnd --method simclr+ifnd --epochs 12 --image-size 16 --set model.width=8 \
        --set 'detector.num_clusters=[20]' --set views.preset=mild
    kinfolk sweep --data digits --out sweep --method simclr,simclr+glofnd,simclr+oracle:attract --set model.width=8 --seeds 0,1,2 --epochs 2
    kinfolk compare sweep --out compare.html
    python docs/screenshots.py FOLDER

Needs Chromium and playwright.
"""  # noqa: E501

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image

IMAGES = Path(__file__).parent / "images"
COLOURS = 96
SHOTS = {  # name: (page, first and last element, width, colour scheme)
    "audit-verdict": ("audit/audit.html", "#audit", "#verdict", 1000, "light"),
    "guide-audit": (
        "audit/audit.html",
        "#audit .lead",
        "section .panels figure:last-of-type",
        1000,
        "light",
    ),
    "guide-kin": ("audit/audit.html", "#gallery", "#cards .card:nth-of-type(3)", 1000, "light"),
    "guide-batches": ("audit/audit.html", "#batches", "#batches table", 1000, "light"),
    "guide-report": (
        "runs/glofnd/report.html",
        "main section:nth-of-type(1)",
        "main .panels figure:nth-of-type(4)",
        1000,
        "light",
    ),
    "compare": ("compare.html", "#comparison", ".panels figure:nth-of-type(1)", 1000, "light"),
    "report-training": (
        "runs/ifnd/report.html",
        "#curves",
        "#curves .panels figure:nth-of-type(6)",
        1000,
        "light",
    ),
    "report-gallery": (
        "runs/ifnd/report.html",
        "#gallery",
        "#cards .card:nth-of-type(4)",
        1000,
        "light",
    ),
    "report-phone": (
        "runs/ifnd/report.html",
        "#gallery",
        "#cards .card:nth-of-type(1)",
        390,
        "dark",
    ),
}


def screenshot(browser: Any, page: Path, first: str, last: str, width: int, scheme: str) -> bytes:
    """A PNG from the top of one element to the bottom of another."""
    opened = browser.new_page(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    opened.set_default_timeout(300_000)  # milliseconds, enough for a busy machine
    opened.goto(page.resolve().as_uri())
    opened.wait_for_selector("html[data-ready]", state="attached")
    opened.add_style_tag(content="nav.bar { position: static !important; }")
    one, other = (opened.locator(selector).first.bounding_box() for selector in (first, last))
    clip = {
        "x": 0,
        "y": one["y"],
        "width": width,
        "height": other["y"] + other["height"] - one["y"] + 12,
    }
    image: bytes = opened.screenshot(full_page=True, clip=clip)
    opened.close()
    return image


def main(folder: Path, names: list[str]) -> None:
    from playwright.sync_api import sync_playwright

    chromium = next(
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        for name in names or SHOTS:
            page, first, last, width, scheme = SHOTS[name]
            image = Image.open(
                io.BytesIO(screenshot(browser, folder / page, first, last, width, scheme))
            )
            image.convert("RGB").quantize(COLOURS).save(IMAGES / f"{name}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
