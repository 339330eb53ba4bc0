"""Takes the screenshots of the report page from a run's report.html.

    .venv/bin/kinfolk train --data digits --out runs/ifnd --method simclr+ifnd --epochs 12 --model resnet10 --image-size 16 \
        --set model.width=8 --set 'detector.num_clusters=[20]' --set views.preset=mild --set snapshots.samples=600
    .venv/bin/python docs/report_images.py runs/ifnd

Needs Chromium and playwright.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from guide_images import COLOURS, IMAGES, screenshot
from PIL import Image

SHOTS = {  # name: (first and last element, width, scheme)
    "report-training": ("#curves", "#curves .panels figure:nth-of-type(6)", 1000, "light"),
    "report-gallery": ("#gallery", "#cards .card:nth-of-type(4)", 1000, "light"),
    "report-stages": ("#stages", "#stages .stages", 1000, "dark"),
    "report-phone": ("#gallery", "#cards .card:nth-of-type(1)", 390, "dark"),
}


def main(run: Path) -> None:
    from playwright.sync_api import sync_playwright

    IMAGES.mkdir(exist_ok=True)
    chromium = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, (first, last, width, scheme) in SHOTS.items():
            image = Image.open(io.BytesIO(screenshot(browser, run / "report.html", first, last, width, scheme)))
            image.convert("RGB").quantize(COLOURS).save(IMAGES / f"{name}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
