"""The MNIST recipe: exact on a small stand-in, on a part of MNIST and, when asked for, on all of it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FILES = [f"mnist/{a}-{b}-ubyte.gz" for a in ("train", "t10k") for b in ("images-idx3", "labels-idx1")]


@pytest.fixture
def recipe(load_recipe: Callable[[str], ModuleType]) -> Iterator[ModuleType]:
    threads = torch.get_num_threads()
    pytest.importorskip("matplotlib")
    yield load_recipe("mnist_parity")
    torch.set_num_threads(threads)


def check(result: dict[str, Any]) -> None:
    """Exact, and drawn. Timings are there, but decide nothing."""
    assert result["digest_equal"] is True
    assert result["bit_identical"] is True
    assert result["error_retrained"] <= 1e-9
    assert result["error_dense"] <= 1e-9
    assert abs(result["ungridded"] - result["after"]) < 0.5  # what the grid costs
    assert result["retrain"] > 0
    assert result["update"] > 0
    assert result["picture"].read_bytes().startswith(b"\x89PNG")


def no_download(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("no network\nin a test")


@pytest.mark.parametrize("curve", [False, True])
def test_digits_stand_in(
    recipe: ModuleType, curve: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    datasets = pytest.importorskip("torchvision.datasets")
    monkeypatch.delenv("TORCHLSSVM_DATA", raising=False)
    monkeypatch.setattr(datasets, "MNIST", no_download)
    options = ["--samples", "2000", "--repeats", "1", "--threads", "1", "--out", str(tmp_path / "new" / "out")]
    result = recipe.main(options if curve else [*options, "--no-curve"])
    check(result)
    printed = capsys.readouterr().out
    assert "(no network)" in printed
    assert "8x8 digits in its place" in printed
    assert (result["samples"], result["removed"]) == (1438, 71)
    assert torch.get_num_threads() == 1
    assert result["clean"] > 85
    assert result["accuracy_curve"][0] == (0, result["before"])
    assert result["accuracy_curve"][-1][1] > result["before"] + 20  # all the wrong ones are gone
    if curve:
        assert [size for size, _ in result["curve"]["points"]] == [1, 2, 5, 10, 20, 50, 71]
    else:
        assert result["curve"] is None
        assert "Theorem 1" not in printed


def test_storage_is_smaller_than_the_data(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(recipe, "mnist", no_download)
    sizes = recipe.storage(recipe.Task(None))
    J, n = 64, 1438
    assert sizes["raw data, float32 pixels and int64 labels"] == n * (4 * J + 8)
    assert sizes["w and C, the compact form"] == 8 * J * (J + 2)
    assert sizes["statistics"] < sizes["saved state_dict, with statistics"] < n * (4 * J + 8)


@pytest.mark.data(*FILES)
def test_part_of_mnist(recipe: ModuleType, tmp_path: Path) -> None:
    result = recipe.main(["--samples", "6000", "--no-curve", "--repeats", "1", "--out", str(tmp_path)])
    check(result)
    assert (result["data"], result["samples"], result["removed"]) == ("MNIST", 6000, 300)
    assert result["clean"] > 80


@pytest.mark.slow
@pytest.mark.data(*FILES)
def test_all_of_mnist(recipe: ModuleType, tmp_path: Path) -> None:
    result = recipe.main(["--repeats", "1", "--out", str(tmp_path)])
    check(result)
    assert (result["samples"], result["removed"]) == (60_000, 3_000)
    assert result["after"] > result["before"] + 8  # the paper: 12 points
    assert result["clean"] > 89
    assert dict(result["accuracy_curve"])[10] == result["after"]
