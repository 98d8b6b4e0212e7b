"""The recipe of label errors, and the benchmark's own comparison with retraining, on small parts of MNIST."""

import pytest

FILES = ("mnist/train-images-idx3-ubyte.gz", "mnist/train-labels-idx1-ubyte.gz")


@pytest.mark.data(*FILES)
def test_label_errors_are_found(load_recipe) -> None:
    recipe = load_recipe("label_errors")
    x, truth = recipe.mnist(2000)
    truth = truth.numpy()
    found = recipe.find(x, recipe.flipped(truth), truth, logistic=False)
    assert found["leave-one-out margin"][0] > 0.5  # 0.1 by chance


@pytest.mark.slow
@pytest.mark.data(*FILES)
def test_and_better_than_by_logistic_regression(load_recipe) -> None:
    recipe = load_recipe("label_errors")
    x, truth = recipe.mnist(4000)
    truth = truth.numpy()
    found = recipe.find(x, recipe.flipped(truth), truth, logistic=True, multiclass=["ovr", "ovo"])
    rest, pairs = (found.pop(f"leave-one-out margin{name}")[0] for name in ("", ", one against one"))
    assert all(pairs > rest >= precision for precision, _ in found.values())


def test_calibration_error_falls_to_half(load_recipe) -> None:
    recipe = load_recipe("label_errors")
    for load in (recipe.load_digits, recipe.load_breast_cancer, recipe.load_wine):
        softmax, clipped, calibrated = recipe.calibration(load)
        assert calibrated <= softmax / 2
        assert calibrated <= clipped / 2


@pytest.mark.data(*FILES)
def test_leaving_out_is_retraining(load_recipe) -> None:
    benchmark = load_recipe("judging")
    x, y = benchmark.mnist(1000)
    x = x[:, ::4]  # a solve for each of 220 removals takes the time
    head = benchmark.LSSVMHead(196, 10, grid=benchmark.GRID).add(x, y)
    digest = head.digest()
    assert max(benchmark.against_retraining(head, x, y)) < 1e-8
    assert head.digest() == digest
