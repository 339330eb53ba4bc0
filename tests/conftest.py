"""Settings of all tests, and the fixture that several parts share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.report.browser import launched

# two pytest processes share the cores, and equal bits are promised only for one number of threads
torch.set_num_threads(1)
settings.register_profile("kinfolk", deadline=None)  # a busy machine is no failure
settings.load_profile("kinfolk")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A headless Chromium, started once; the test is skipped where there is none."""
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def browser(chromium: Any) -> Iterator[Any]:
    """The same, without the pages of other modules."""
    yield chromium
    for context in chromium.contexts:
        context.close()
