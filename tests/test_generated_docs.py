"""What the documents say of the program itself is current."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from kinfolk.detectors import DETECTORS

ROOT = Path(__file__).parents[1]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_of_the_documents_are_current() -> None:
    generated = generator().generated()
    expected = {"README.md", "docs/methods.md", "docs/api.md", "docs/settings.md", "mkdocs.yml"}
    assert expected <= generated.keys()
    for path, text in generated.items():
        assert text == (ROOT / path).read_text(encoding="utf-8"), f"{path}: run make format"


def test_every_detector_has_a_page_and_a_row_in_each_list() -> None:
    lists = generator().lists()
    for name, kind in DETECTORS.items():
        if not kind.__module__.startswith("kinfolk."):
            continue
        assert (ROOT / "docs" / "methods" / f"{name}.md").is_file(), name
        for path, lines in lists.items():
            assert any(kind.__name__ in line or f"methods/{name}.md" in line for line in lines), (
                f"{name} in {path}"
            )
