"""Recipes and benchmarks as modules."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture
def load_recipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a recipe or a benchmark by its name, as if it ran in its folder."""
    monkeypatch.setattr(sys, "path", [str(RECIPES), str(RECIPES / "benchmarks"), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(RECIPES.parent))
    return importlib.import_module
