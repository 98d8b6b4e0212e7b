"""The recipes for several ranks and for rare classes, run as a user runs them."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from torchlssvm import FixedPoint, LSSVMHead

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
TABLE_DATA = ["heart/heart_cleveland.csv.gz", "wdbc/wdbc.csv.gz"]
ALL_DATA = [*TABLE_DATA, "msweb/msweb_csr.npz", "covtype/covtype.data.gz"]


def run(*command, **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def shards(tmp_path):
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(500, 7)), generator.integers(3, size=500)
    for i, part in enumerate(np.array_split(np.arange(500), 5)):
        np.savez(tmp_path / f"{i}.npz", x=x[part], y=y[part])
    torch.save({"x": torch.from_numpy(x[:9]), "y": torch.from_numpy(y[:9])}, tmp_path / "5.pt")
    return tmp_path, torch.from_numpy(np.vstack([x, x[:9]])), torch.from_numpy(np.append(y, y[:9]))


@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_one_head_from_shards(shards, ranks):
    folder, x, y = shards
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks else []
    files = sorted(p for p in folder.iterdir())
    out = folder / "head.pt"
    options = ["--classes", 3, "--limit", 8, "--class-weight", "balanced", "--out", out]
    said = run(*launch, RECIPES / "merge_shards.py", *files, *options)
    truth = LSSVMHead(7, 3, grid=FixedPoint(8.0), class_weight="balanced", rho=1.0).add(x, y)
    assert f"digest {truth.digest()}" in said
    assert f"509 samples of 7 features in 6 shards, {max(1, ranks)} rank(s)" in said
    assert re.search(r"rank 0 \[#{30}\] \d/\d shards", said)
    head = LSSVMHead(7, 3, grid=FixedPoint(8.0), class_weight="balanced", rho=1.0)
    head.load_state_dict(torch.load(out, weights_only=True))
    assert head.digest() == truth.digest()
    assert torch.allclose(head.w, truth.w, rtol=1e-12, atol=1e-14)


def table(*names, ranks=4):
    said = run(RECIPES / "wlpsvm_tables.py", "--ranks", ranks, "--sets", *names)
    rows = [line.split() for line in said.splitlines()]
    return [row for row in rows if row and row[0] in names and row[1].isdigit()]


@pytest.mark.data(*TABLE_DATA)
def test_table_1_small():
    rows = table("Heart", ranks=2)
    assert len(rows) == 2
    assert {value for row in rows for value in row[2:]} == {"0"}


@pytest.mark.slow
@pytest.mark.data(*ALL_DATA)
def test_table_1():
    rows = table("Heart", "BreastWisconsin", "AnonymousWeb", "CoverType")
    assert [len(row) for row in rows] == [6, 5, 5, 5] * 4
    assert {value for row in rows for value in row[2:]} == {"0"}


def imbalance(tmp_path, *options):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("recipe_imbalance", RECIPES / "imbalance_stream.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = module.main(["--out", str(tmp_path), *options])
    assert (tmp_path / "imbalance_stream.png").read_bytes().startswith(b"\x89PNG")
    hundred, stream = result["hundred"], result["stream"]
    assert hundred["balanced"] == hundred["RidgeClassifier, balanced"]
    assert hundred["scores"] < 1e-8
    assert hundred["balanced"][0] > hundred["no weights"][0] + 5
    assert hundred["complement"][0] > hundred["no weights"][0] + 5
    assert stream["exact"] is True
    rare = {
        name: min(r[0] for r in stream[name][len(stream[name]) // 5 :])
        for name in ("weights of the moment", "no weights")
    }
    assert rare["weights of the moment"] > rare["no weights"]
    assert min(stream["share"]) < 0.05 < 0.4 < max(stream["share"])


def test_rare_classes_on_digits(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHLSSVM_DATA", str(tmp_path / "none"))
    imbalance(tmp_path, "--steps", "40", "--batch", "60", "--window", "480")


@pytest.mark.slow
@pytest.mark.data("covtype/covtype.data.gz")
def test_rare_classes(tmp_path):
    imbalance(tmp_path)
