"""The random features recipe: on digits always, on MNIST and CIFAR-10 when asked for."""

import pytest

MNIST = [f"mnist/{a}-{b}-ubyte.gz" for a in ("train", "t10k") for b in ("images-idx3", "labels-idx1")]


@pytest.fixture
def recipe(load_recipe):
    return load_recipe("random_features")


def test_digits_stand_in(recipe, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    monkeypatch.delenv("TORCHLSSVM_DATA", raising=False)
    results = recipe.main(["--widths", "100", "400"])
    assert list(results) == ["mnist"]
    assert results["mnist"]["same digest"] is True
    assert results["mnist"]["400"] > results["mnist"]["0"]  # the lift helps
    assert "8x8 digits" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.data(*MNIST)
def test_mnist_in_one_pass(recipe):
    results = recipe.main(["--only", "mnist", "--widths", "500", "2000"])["mnist"]
    assert results["2000"] >= 95.5
    assert 85.5 < results["0"] < 86.5
    assert results["0"] < results["500"] < results["2000"]
    assert results["same digest"] is True


@pytest.mark.slow
@pytest.mark.data("cifar10/cifar10_12k.npz", "weights/mobilenet_v2_imagenet.pt")
def test_cifar_with_and_without_the_lift(recipe):
    pytest.importorskip("torchvision")
    results = recipe.main(["--only", "cifar", "--size", "64", "--samples", "1000", "--lift", "2000"])["cifar"]
    assert results["features, same digest"] is True
    assert results["with a lift to 2000, same digest"] is True
    assert results["features"] > 50
    assert results["with a lift to 2000"] > 50
