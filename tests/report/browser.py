"""A headless Chromium for the tests that look at the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
]

SLOWEST = 240_000
"""Milliseconds: a machine with ten other things to do still opens the page."""


def chromium() -> str:
    """The path of a Chromium, or a skip."""
    found = next(
        (
            path
            for name in ("chromium", "chromium-browser", "google-chrome")
            if (path := shutil.which(name))
        ),
        None,
    )
    if found is None:
        pytest.skip("no Chromium is installed: the page is not opened")
    return found


@contextmanager
def launched() -> Iterator[Any]:
    """A browser, ended afterwards."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: the page is not opened"
    )
    path = chromium()
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Opened:
    """A page that has drawn, with all it complained of and asked for."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def open_page(browser: Any, path: Path, **context: Any) -> Opened:
    """Opens a report from disk and waits until its script has run to the end."""
    opened = Opened(browser.new_page(**{"viewport": {"width": 1200, "height": 900}, **context}))
    opened.page.on(
        "console", lambda message: opened.complaints.append(f"{message.type}: {message.text}")
    )
    failures: list[str] = []
    opened.page.on("pageerror", lambda error: failures.append(str(error)))
    opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    opened.page.on("dialog", lambda dialog: opened.complaints.append(f"dialog: {dialog.message}"))
    opened.page.on("request", lambda request: opened.requests.append(request.url))
    opened.page.set_default_timeout(SLOWEST)
    opened.page.goto(path.resolve().as_uri())
    while opened.page.evaluate("document.documentElement.dataset.ready") is None:
        assert not failures, failures
        opened.page.wait_for_timeout(50)
    return opened


def resize(opened: Opened, width: int) -> None:
    """Makes the window so wide and waits until the page is drawn anew."""
    opened.page.set_viewport_size({"width": width, "height": 900})
    opened.page.evaluate(
        "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )
