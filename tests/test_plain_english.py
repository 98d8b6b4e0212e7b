"""The text that people read keeps clear of constructions that sound translated."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BANNED = {
    "anew": "again",
    "is none": "there is no ..., or name the thing",
    "so many": "that many, or the number",
    "all the same": "nevertheless",
    "in the place of": "instead of",
    "for ever": "forever, or indefinitely",
    "for want of": "without",
    "any more": "no longer",
    "lead else": "otherwise ... dominate",
    "is told": "raises, prints or returns",
    "hangs on": "depends on",
    "for lack of": "without",
    "It is no ": "This is not",
    "samples held": "current samples, or samples of the head",
    "Times are processor": "The table shows processor times",
}
PATTERN = re.compile("|".join(rf"\b{re.escape(phrase)}(?!\w)" for phrase in BANNED))


def pages() -> list[Path]:
    listed = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").rglob("*.yaml")]
    return [path for path in listed if "_build" not in path.parts]


def spoken(path: Path) -> str:
    """What a reader sees of a module: its strings and comments, each on its line."""
    source = path.read_text(encoding="utf-8")
    lines = [""] * (source.count("\n") + 2)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for i, text in enumerate(node.value.split("\n")):
                lines[min(node.lineno + i, len(lines) - 1)] += " " + text
    for number, line in enumerate(source.split("\n"), 1):
        lines[number] += line[line.find("#") :] if "#" in line else ""
    return "\n".join(lines[1:])


def found(text: str) -> list[str]:
    return [f"line {n}: {m[0]!r}" for n, line in enumerate(text.split("\n"), 1) for m in PATTERN.finditer(line)]


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_pages(path: Path) -> None:
    assert found(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "folder", [*sorted(p.name for p in (ROOT / "torchlssvm").iterdir() if p.is_dir() and p.name != "__pycache__"), "."]
)
def test_modules(folder: str) -> None:
    root = ROOT / "torchlssvm" / folder
    modules = root.glob("*.py") if folder == "." else root.rglob("*.py")
    assert {str(path.relative_to(ROOT)): hits for path in sorted(modules) if (hits := found(spoken(path)))} == {}


def test_the_check_finds_what_it_looks_for(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text('"""Solve anew."""\nx = f"{1} samples any more"  # in the place of y\n')
    assert len(found(spoken(file))) == 3
