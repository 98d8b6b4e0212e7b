"""The comparison of ways to learn from a stream: what is called exact is exact, and what cannot remove is off after removals."""


def test_state_of_the_art(load_recipe):
    recipe = load_recipe("state_of_the_art")
    stream = recipe.streams()["breast cancer"]
    for name, method in recipe.METHODS.items():
        row = recipe.run(stream, method)
        assert row.accuracy > 0.9, name
        assert (row.removed < 1e-11) == row.removes, (name, row)
        if row.removes:
            assert row.added < 1e-11, (name, row)
