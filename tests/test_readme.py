"""The README: short, with links that lead somewhere and figures that stand on the benchmark pages."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def tables() -> list[list[list[str]]]:
    """The rows of each table, without its head."""
    blocks = re.findall(r"^\|.*\|\n\|[-|]+\|\n((?:\|.*\|\n)+)", TEXT, re.MULTILINE)
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in block.splitlines()] for block in blocks]


def test_short() -> None:
    assert len(TEXT.splitlines()) <= 150
    assert len(TEXT.split()) <= 1300


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(links) > 8
    assert not [link for link in links if "://" not in link and not (ROOT / link).exists()]


def test_guarantees_have_their_tests() -> None:
    guarantees, _ = tables()
    assert len(guarantees) == 5
    for _, test in guarantees:
        assert (ROOT / test.strip("`")).is_file()


@pytest.mark.parametrize("row", tables()[1])
def test_figures_stand_on_the_benchmark_pages(row: list[str]) -> None:
    _, measured, link = row
    page = (ROOT / re.search(r"\((docs/benchmarks/.*)\)", link).group(1)).read_text(encoding="utf-8")
    numbers = re.findall(r"\d[\d.,]*\d|\d", measured)
    assert numbers
    assert not [number for number in numbers if not re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)", page)]
    assert re.search(r"`[^`]*(python|pytest)\s", page), "the page has no command"


def test_five_figures() -> None:
    assert len(tables()) == 2
    assert len(tables()[1]) == 5
