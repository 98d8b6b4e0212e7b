"""The comparison of ways to learn from a stream: what is called exact is exact, and what cannot remove is off after removals."""

import importlib.util
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "recipes" / "state_of_the_art.py"


def test_state_of_the_art():
    spec = importlib.util.spec_from_file_location("recipe_state_of_the_art", FILE)
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    stream = recipe.streams()["breast cancer"]
    for name, method in recipe.METHODS.items():
        row = recipe.run(stream, method)
        assert row.accuracy > 0.9, name
        assert (row.removed < 1e-11) == row.removes, (name, row)
        if row.removes:
            assert row.added < 1e-11, (name, row)
