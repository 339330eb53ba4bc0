"""Takes the screenshots of the guide from a run and an audit made by its commands.

    .venv/bin/python docs/guide_images.py runs/glofnd audit

Needs Chromium and playwright.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image

IMAGES = Path(__file__).parent / "images"
WIDTH, COLOURS = 1000, 96
SHOTS = {  # name: (page, first and last element)
    "guide-audit": ("audit/audit.html", "#audit", "section .panels figure:nth-of-type(2)"),
    "guide-kin": ("audit/audit.html", "#gallery", "#cards .card:nth-of-type(3)"),
    "guide-batches": ("audit/audit.html", "#batches", "#batches table"),
    "guide-report": ("run/report.html", "main section:nth-of-type(1)", "main .panels figure:nth-of-type(4)"),
}


def screenshot(browser: Any, page: Path, first: str, last: str, width: int = WIDTH, scheme: str = "light") -> bytes:
    """A PNG from the top of one element to the bottom of another."""
    opened = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce")
    opened.set_default_timeout(300_000)  # milliseconds, enough for a busy machine
    opened.goto(page.resolve().as_uri())
    opened.wait_for_selector("html[data-ready]", state="attached")
    opened.add_style_tag(content="nav.bar { position: static !important; }")
    one, other = (opened.locator(selector).first.bounding_box() for selector in (first, last))
    clip = {"x": 0, "y": one["y"], "width": width, "height": other["y"] + other["height"] - one["y"] + 12}
    image: bytes = opened.screenshot(full_page=True, clip=clip)
    opened.close()
    return image


def main(run: Path, audit: Path) -> None:
    from playwright.sync_api import sync_playwright

    chromium = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, (page, first, last) in SHOTS.items():
            folder, _, file = page.partition("/")
            image = Image.open(io.BytesIO(screenshot(browser, {"run": run, "audit": audit}[folder] / file, first, last)))
            image.convert("RGB").quantize(COLOURS).save(IMAGES / f"{name}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
