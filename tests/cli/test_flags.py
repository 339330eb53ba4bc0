"""Every option that a message or a page names exists, and belongs to the command that it is named
with."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import typer

from kinfolk.cli import app

ROOT = Path(__file__).parents[2]
COMMANDS = {
    name: {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    | {"--help", "-h"}
    for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
FOREIGN = {"--version", "--nproc-per-node", "--help", "--debug"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def texts(path: Path) -> list[str]:
    """All string literals of a module; the values in an f-string are written as X."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append(
                "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "X"
                    for part in node.values
                )
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inside
        ):
            found.append(node.value)
    return found


def wrong_in_commands(text: str) -> list[str]:
    """Options of `kinfolk COMMAND …`, up to the end of the line or the closing backtick, that this
    command does not have."""
    joined = text.replace("\\\n", " ")
    calls = re.findall(r"\bkinfolk (" + "|".join(COMMANDS) + r")\b([^`\n#]*)", joined)
    return [
        f"kinfolk {name} {flag}"
        for name, rest in calls
        for flag in FLAG.findall(rest)
        if flag not in COMMANDS[name]
    ]


def test_options_in_messages_exist() -> None:
    known = set().union(*COMMANDS.values()) | FOREIGN
    for path in (ROOT / "src").rglob("*.py"):
        for text in texts(path):
            assert [flag for flag in FLAG.findall(text) if flag not in known] == [], (
                f"{path}: {text}"
            )
            assert wrong_in_commands(text) == [], f"{path}: {text}"


def test_options_on_pages_exist() -> None:
    for path in PAGES:
        assert wrong_in_commands(path.read_text(encoding="utf-8")) == [], path


def test_a_wrong_option_is_found() -> None:
    assert wrong_in_commands(
        "see `kinfolk report --images photos/` and `kinfolk audit --images photos/`"
    ) == ["kinfolk report --images"]
