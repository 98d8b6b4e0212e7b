"""The accuracy recipe: on digits always, on CIFAR-10 when asked for."""

import json

import pytest


@pytest.fixture
def recipe(load_recipe):
    pytest.importorskip("sklearn")
    return load_recipe("accuracy")


def test_digits(recipe, monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("TORCHLSSVM_DATA", raising=False)
    found = recipe.main(
        ["--quick", "--samples", "400", "--methods", "ridge", "Ridge", "--out", str(tmp_path / "out.jsonl")]
    )["digits"]
    heads = [name for name in found if name.startswith("ridge")]
    assert len(heads) == 5
    assert all(found[name]["same"] for name in heads)  # after the removals: the head that never saw them
    assert all(85 < row["accuracy"] < 97 for row in found.values())
    assert found["ridge, std"]["accuracy"] == pytest.approx(found["RidgeClassifierCV"]["accuracy"], abs=3)
    text = capsys.readouterr().out
    assert text.count("\n| ridge") == 5
    assert "| RidgeClassifierCV |" in text
    assert len([json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]) == len(found)


def test_margin_heads_on_digits(recipe, monkeypatch):
    monkeypatch.delenv("TORCHLSSVM_DATA", raising=False)
    found = recipe.main(["--quick", "--samples", "300", "--methods", "margin, l2"])["digits"]
    assert list(found) == ["margin, l2"]
    assert all(row["same"] and row["accuracy"] > 85 for row in found.values())


@pytest.mark.slow
@pytest.mark.data("cifar10/cifar10_12k.npz", "weights/mobilenet_v2_imagenet.pt")
def test_options_add_a_point_on_cifar(recipe):
    pytest.importorskip("torchvision")
    found = recipe.main(["--only", "cifar", "--methods", "ridge"])["cifar"]
    assert found["ridge"]["accuracy"] > 77.5
    assert max(row["accuracy"] for row in found.values()) > found["ridge"]["accuracy"] + 0.3
