"""The shape of the project: which part may import which, what the files are called, and that what
the documents show runs."""

from __future__ import annotations

import ast
import doctest
import functools
import graphlib
import importlib
import importlib.util
import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kinfolk.detectors import DETECTORS
from kinfolk.frameworks import FRAMEWORKS
from kinfolk.training.settings import recipe_names
from tests.training.small import few_digits

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kinfolk"

# Which parts each part may import (itself, `errors`, `files` and `seeding` always).
# `detectors.base` is what a detector is; only it, never a concrete detector, is known to the
# objectives, and the engine knows no detector at all.
ENGINE = {"pairs", "stats", "stores", "distributed"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "seeding": set(),
    "distributed": set(),
    "optimizers": set(),
    "pairs": set(),
    "stats": {"pairs"},
    "stores": {"distributed"},
    "detectors.base": {"pairs", "stores"},
    "features": set(),
    "detectors": {"detectors.base", "clustering", "features", *ENGINE},
    "contrast": {"pairs", "stats"},
    "objectives": {"contrast", "detectors.base", *ENGINE},
    "clustering": {"distributed", "stores"},
    "data": set(),
    "models": set(),
    "frameworks": {
        "objectives",
        "detectors",
        "detectors.base",
        "contrast",
        "clustering",
        "models",
        *ENGINE,
    },
    "embedding": {"data", "models", "distributed"},
    "evaluation": {
        "embedding",
        "frameworks",
        "detectors",
        "detectors.base",
        "pairs",
        "data",
        "models",
        "stats",
        "clustering",
        "distributed",
        "optimizers",
    },
    "training": {
        "plugins",
        "optimizers",
        "embedding",
        "evaluation",
        "frameworks",
        "objectives",
        "detectors",
        "detectors.base",
        "clustering",
        "data",
        "models",
        *ENGINE,
    },
    "report": {
        "embedding",
        "training",
        "evaluation",
        "frameworks",
        "detectors",
        "detectors.base",
        "data",
        "models",
        "optimizers",
    },
    "auditing": {"embedding", "features", "report", "training", "data", "models"},
    "comparing": {"report", "training"},
    "exporting": {"models"},
    "integrations": {"data", "objectives", "detectors.base", "distributed", "stats"},
    "sweeping": {"api", "auditing", "comparing", "data", "evaluation", "training"},
    "plugins": {"detectors", "detectors.base", "frameworks"},
    "api": {"training", "report", "evaluation", "embedding", "data", "detectors.base"},
    "cli": {
        "api",
        "plugins",
        "sweeping",
        "embedding",
        "auditing",
        "comparing",
        "exporting",
        "report",
        "training",
        "evaluation",
        "frameworks",
        "detectors",
        "data",
        "models",
    },
}
NOT_OF_THE_PACKAGE = {
    "gpu",
    "pretended",
    "reference",
    "examples",
    "benchmarks",
    "faults",
}  # test folders that mirror no part


def python_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def part_of(module: str) -> str:
    """The part a module belongs to: its first name below `kinfolk`, with `detectors.base` standing
    for itself."""
    names = module.split(".")[1:]
    return "detectors.base" if names[:2] == ["detectors", "base"] else names[0] if names else ""


parsed = functools.cache(ast.parse)


def imported(source: str, package: str) -> Iterator[str]:
    """The kinfolk modules a file imports, wherever in it; `package` resolves relative imports."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "kinfolk")
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join(package.split(".")[: package.count(".") + 2 - node.level])
                if node.level
                else ""
            )
            module = ".".join(filter(None, (base, node.module)))
            if module.split(".")[0] == "kinfolk":
                yield from (
                    (f"{module}.{alias.name}" for alias in node.names)
                    if module in ("kinfolk", "kinfolk.detectors")
                    else (module,)
                )


def forbidden(source: str, module: str, package: str) -> list[str]:
    """What the file imports and its part may not."""
    part = part_of(module)
    allowed = {part, "errors", "files", "seeding", ""} | MAY_IMPORT[part]
    return [name for name in imported(source, package) if part_of(name) not in allowed]


def module_of(path: Path) -> tuple[str, str]:
    """The module's name and its package's."""
    names = path.relative_to(SOURCE.parent).with_suffix("").parts
    package = ".".join(names[:-1])
    return (package if names[-1] == "__init__" else ".".join(names)), package


def test_imports_point_one_way() -> None:
    wrong: dict[str, list[str]] = {}
    for path in python_files():
        if path.parent == SOURCE and path.name in ("__init__.py", "__main__.py"):
            continue  # the entry points of the package import all of it
        module, package = module_of(path)
        assert part_of(module) in MAY_IMPORT, f"{module} belongs to no part that MAY_IMPORT knows"
        if found := forbidden(path.read_text(encoding="utf-8"), module, package):
            wrong[module] = found
    assert not wrong, "these modules import what their part may not"


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from kinfolk.objectives.ntxent import NTXent", "kinfolk.detectors.new"),
        ("from ..objectives import NTXent", "kinfolk.detectors.new"),
        ("def f():\n    import kinfolk.detectors.glofnd", "kinfolk.objectives.new"),
        ("from kinfolk import detectors", "kinfolk.objectives.new"),
        ("from kinfolk.detectors import GloFND", "kinfolk.contrast"),
        ("from kinfolk.training import train", "kinfolk.frameworks.new"),
        ("from kinfolk.pairs import Pairs", "kinfolk.models.new"),
    ],
)
def test_a_wrong_import_is_seen(source: str, module: str) -> None:
    assert forbidden(source, module, module.rpartition(".")[0])


def test_right_imports_pass() -> None:
    source = (
        "from kinfolk.detectors.base import Found\nfrom kinfolk.errors import KinfolkError\nfrom"
        " .base import Objective\nimport torch"
    )
    assert not forbidden(source, "kinfolk.objectives.new", "kinfolk.objectives")


def dependencies(sources: dict[str, str]) -> dict[str, set[str]]:
    """The modules that each module imports when it is imported or run; imports for type checking do
    not count."""
    found: dict[str, set[str]] = {}
    for module, source in sources.items():
        tree = parsed(source)
        checking = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ]
        ignored = {id(node) for block in checking for node in ast.walk(block)}
        found[module] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and id(node) not in ignored:
                names = (f"{node.module}.{alias.name}" for alias in node.names)
                found[module] |= {name if name in sources else node.module for name in names} & set(
                    sources
                )
    return found


def test_no_cycle_of_imports() -> None:
    sources = {module_of(path)[0]: path.read_text(encoding="utf-8") for path in python_files()}
    # raises CycleError with the modules of a cycle
    graphlib.TopologicalSorter(dependencies(sources)).prepare()


def test_a_cycle_is_seen() -> None:
    sources = {
        "kinfolk.a": "from kinfolk.b import f",
        "kinfolk.b": "def f():\n    from kinfolk import a",
    }
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(dependencies(sources)).prepare()


def test_no_file_is_named_utils_or_the_like() -> None:
    assert not [
        path
        for path in python_files()
        if path.stem in ("utils", "util", "helpers", "misc", "common")
    ]


def test_tests_mirror_the_package() -> None:
    folders = (
        {
            path.parent.relative_to(ROOT / "tests").as_posix()
            for path in (ROOT / "tests").rglob("test_*.py")
        }
        - {"."}
        - NOT_OF_THE_PACKAGE
    )
    parts = {path.parent.relative_to(SOURCE).as_posix() for path in python_files()} - {"."}
    assert folders <= parts
    assert {part for part in parts if "/" not in part} <= folders


def tracked() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode != 0:
        pytest.skip("not a git clone: which files are tracked is not known")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_path_of_one_machine() -> None:
    pattern = re.compile(
        rb"(?<![\w.$~}])/(?:work|root|home|Users|opt/(?:wheels|pypi))/|[A-Z]:\\Users"
    )
    found = {
        path.relative_to(ROOT).as_posix(): match[0]
        for path in tracked()
        if (match := pattern.search(path.read_bytes()))
    }
    found.pop("tests/test_structure.py", None)
    assert not found


def fenced(path: Path) -> str:
    """The Python blocks of a Markdown file as one program whose line numbers are the file's."""
    lines, inside, program = path.read_text(encoding="utf-8").splitlines(), False, []
    for line in lines:
        if line.startswith("```"):
            inside = line == "```python"
            line = ""
        program.append(line if inside else "")
    return "\n".join(program)


def with_python() -> list[str]:
    """The documents that show Python."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in paths if fenced(path).strip()]


@pytest.mark.parametrize("name", with_python())
def test_code_in_the_documents_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And an example that prints what its detector flagged has flagged something."""
    program = fenced(ROOT / name)
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    # t-SNE takes seconds, and its tests are elsewhere; a third of the digits will do
    monkeypatch.setattr("kinfolk.report.maps.MIN_POINTS_TSNE", math.inf)
    few_digits(monkeypatch)
    exec(compile(program, name, "exec"), {"__name__": "__main__"})
    shares = re.findall(r"([\d.]+)% of [\d,]+ negatives flagged", capsys.readouterr().out)
    assert all(float(share) > 0 for share in shares)
    assert len(shares) == program.count("print(loss_fn.stats)")


def test_every_method_is_in_the_tables() -> None:
    """Name, paper, equation, class, recipe and page; and a line of the README."""
    for name in [*FRAMEWORKS, *(f"+{name}" for name in DETECTORS)]:
        lines = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8").splitlines()
        (row,) = [line for line in lines if line.startswith(f"| `{name}` |")]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 6
        assert all(cells)
        recipes = re.findall(r"`([^`]+)`", cells[4])
        assert set(recipes) <= set(recipe_names())
        assert recipes or cells[4] == "—"
        (page,) = re.findall(r"\]\(([^)]+)\)", cells[5])
        assert (ROOT / "docs" / page).is_file()
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        assert f"| [`{name.lstrip('+')}`](docs/methods/" in readme


def importable(path: Path) -> bool:
    """False for an integration of a library that is not installed."""
    return (
        path.parent.name != "integrations"
        or path.stem == "__init__"
        or importlib.util.find_spec(path.stem) is not None
    )


def with_examples() -> list[str]:
    """The modules whose text holds an example that is not skipped."""
    example = re.compile(r">>> (?!.*\+SKIP)")
    paths = [path for path in python_files() if importable(path)]
    return [
        module_of(path)[0] for path in paths if example.search(path.read_text(encoding="utf-8"))
    ]


def test_docstring_examples_run() -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for name in with_examples():
        result = doctest.testmod(importlib.import_module(name), optionflags=flags)
        assert result.attempted > 0, f"doctest does not find the example of {name}"
        assert result.failed == 0, name


def test_every_module_can_be_imported() -> None:
    for path in python_files():
        if path.stem != "__main__" and importable(path):
            importlib.import_module(module_of(path)[0])
