"""Kernel machines on the paper's data sets: exact after a thousand operations, and the recipe's tables."""

import importlib.util
import random
from pathlib import Path

import pytest
import torch

from tests.support.kernel_dense import code, lssvm, lsvm, rbf
from torchlssvm import KernelLSSVM, LagrangianSVM
from torchlssvm.kernels import RBF

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "duan_tables.py"
FILES = {
    "thyroid": "thyroid/new_thyroid.csv.gz",
    "ringnorm": "ringnorm/ringnorm.csv.gz",
    "german": "german/german.csv.gz",
    "splice": "splice/splice.csv.gz",
    "image1": "segment/segment.csv.gz",
}


def recipe():
    spec = importlib.util.spec_from_file_location("recipe_duan_tables", RECIPE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("C", [1.0, pytest.param(100.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.data(f)) for n, f in FILES.items()])
def test_a_thousand_random_adds_and_removes(name, C):
    """Single ones and batches, around the paper's size, RBF with sigma = 2: against a dense solve of equation (6)."""
    x, y = recipe().load(name, everything=True)
    rng, n = random.Random(0), min(recipe().SETS[name].size, len(x) * 2 // 3)
    n = min(n, 700)
    machine = KernelLSSVM(RBF(sigma=2.0), C=C)
    free = list(range(len(x)))
    rng.shuffle(free)
    held = dict(zip(machine.add(x[free[:n]], y[free[:n]]).tolist(), free[:n], strict=True))
    free = free[n:]
    for _ in range(1000):
        k = rng.choice([1, 1, 1, 1, 1, 1, 1, 1, 3, 10])
        if (rng.random() < 0.5 or len(held) < n // 2) and len(free) >= k:
            rows, free = free[:k], free[k:]
            held |= dict(zip(machine.add(x[rows], y[rows]).tolist(), rows, strict=True))
        else:
            ids = rng.sample(sorted(held), k)
            machine.remove(ids)
            free += [held.pop(i) for i in ids]
    rows = [held[i] for i in machine.ids.tolist()]
    alpha, b = lssvm(rbf(x[rows], x[rows]), code(y[rows], 2), C)
    worst = max(
        float((machine.alpha - alpha).abs().max() / alpha.abs().max()),
        float((machine.b - b).abs().max() / b.abs().max()),
    )
    print(f"{name}, C = {C:g}, {len(rows)} samples at the end: largest relative error {worst:.1e}")
    assert worst < 1e-9


@pytest.mark.data(FILES["thyroid"], FILES["german"])
@pytest.mark.parametrize("name", ["thyroid", "german"])
@pytest.mark.parametrize("bias", ["added", "augmented"])
def test_lagrangian_equals_a_quadratic_program(name, bias):
    pytest.importorskip("scipy")
    x, y = recipe().load(name)
    x, y = x[:300], y[:300]
    for C in (1 / len(x), 10.0):
        machine = LagrangianSVM(RBF(sigma=2.0), C=C, bias=bias)
        ids = machine.add(x, y)
        _ = machine.alpha
        machine.remove(ids[:20])
        K = rbf(x[20:], x[20:]) + (1.0 if bias == "added" else 0.0)
        truth = lsvm(K, (2 * y[20:] - 1).double(), C)
        assert float((machine.alpha - truth).abs().max() / truth.abs().max()) < 1e-9
        assert machine.kkt_violation() < 1e-9


def test_the_recipe_runs_without_data(monkeypatch, capsys):
    monkeypatch.delenv("TORCHLSSVM_DATA", raising=False)
    pytest.importorskip("sklearn")
    results = recipe().main(["--only", "thyroid", "--repeats", "1"])
    assert all(r["error"] < 1e-9 for r in results.values())
    assert {k for _, k in results} == {1, 20, 50}
    assert "stands in" in capsys.readouterr().out


@pytest.mark.data(*FILES.values())
def test_the_recipe_on_a_set_of_the_paper():
    results = recipe().main(["--only", "ringnorm", "--repeats", "1"])
    assert all(r["error"] < 1e-9 and r["lssvm"] > 0 for r in results.values())
    assert torch.isfinite(recipe().load("splice")[0]).all()
