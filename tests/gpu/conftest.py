"""Prints the worst figures of the GPU checks after the tests."""

from __future__ import annotations

import pytest

WORST = "worst "
"""First word of the properties with a figure and the name of its case."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = dict[str, list[tuple[float, str]]]()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for what, figure in getattr(report, "user_properties", ()):
                if what.startswith(WORST):
                    found.setdefault(what, []).append(tuple(figure))
    if found:
        terminalreporter.section("GPU checks")
    for what, figures in sorted(found.items()):
        figure, name = max(figures)
        terminalreporter.line(f"{what}: {figure:.3g} ({name}, out of {len(figures)})")
