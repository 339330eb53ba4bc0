"""What the documents say of the program itself is current."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from kinfolk.detectors import DETECTORS

ROOT = Path(__file__).parents[1]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "path", ["README.md", "docs/methods.md", "docs/api.md", "docs/settings.md", "mkdocs.yml"]
)
def test_generated_parts_of_the_documents_are_current(path: str) -> None:
    assert generator().generated()[path] == (ROOT / path).read_text(encoding="utf-8"), (
        "run make format"
    )


@pytest.mark.parametrize(
    "name", [name for name, kind in DETECTORS.items() if kind.__module__.startswith("kinfolk.")]
)
def test_every_detector_has_a_page_and_a_row_in_each_list(name: str) -> None:
    assert (ROOT / "docs" / "methods" / f"{name}.md").is_file()
    for path, lines in generator().lists().items():
        assert any(
            DETECTORS[name].__name__ in line or f"methods/{name}.md" in line for line in lines
        ), path
