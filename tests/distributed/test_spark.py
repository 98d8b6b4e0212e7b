"""Spark: the same integers as everywhere else; the workers have no torch."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import ranks
from torchlssvm import FixedPoint, GridError, LSSVMHead, Statistics
from torchlssvm.distributed import Delta, merge, sync
from torchlssvm.functional import numpy_sums

J, K = 5, 3
GRID = FixedPoint(16.0)
X = torch.randn(2500, J, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(2500) % K


@pytest.mark.parametrize("per_class", [True, False])
@pytest.mark.parametrize("grid", [GRID, FixedPoint(5.3), FixedPoint(8.0, bits=26)])
def test_numpy_sums_are_the_same_integers(per_class, grid):
    """The functions that are sent to workers, without Spark."""
    rows = zip(X.numpy(), Y.tolist(), strict=True)
    total = numpy_sums.sum_samples(rows, J, K, grid.resolution, grid.max_value, per_class)
    stats = Statistics(J, K, grid=grid, per_class=per_class).add(X, Y)
    assert total["problem"] is None
    for group in range(K) if per_class else [0]:
        M, V = total["groups"][group]
        full = stats.M[group] if per_class else stats.M
        assert np.array_equal(M, full[:J, :J].numpy())
        sides = full[None, J, :J] if per_class else stats.class_sums()[0]
        assert np.array_equal(V, sides.numpy())
    assert np.array_equal(total["counts"], stats.counts.numpy())
    parts = [
        numpy_sums.sum_block(
            X[a : a + 700].numpy(), Y[a : a + 700].numpy(), K, grid.resolution, grid.max_value, per_class
        )
        for a in range(0, 2500, 700)
    ]
    again = numpy_sums.zero(K)
    for part in parts[::-1]:
        again = numpy_sums.add(again, part)
    assert all(
        np.array_equal(a, b)
        for g in total["groups"]
        for a, b in zip(total["groups"][g], again["groups"][g], strict=True)
    )


def test_numpy_sums_import_numpy_only():
    text = Path(numpy_sums.__file__).read_text(encoding="utf-8")
    imports = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert {line.split()[1].split(".")[0] for line in imports} == {"__future__", "collections", "typing", "numpy"}


@pytest.mark.parametrize(
    ("x", "y", "text"),
    [
        (np.ones((2, J)), np.array([0, 3]), "integers in 0..2"),
        (np.ones((2, J)), np.array([0, 0.5]), "integers in 0..2"),
        (np.full((2, J), np.nan), np.array([0, 1]), "10 NaN or inf"),
        (np.full((2, J), 99.0), np.array([0, 1]), "beyond the grid's limit"),
        (np.ones((2, J)), np.array([0]), "shapes"),
        (np.ones((2, J + 1)), np.array([0, 1]), "6 features, not 5"),
    ],
)
def test_bad_samples_are_told(x, y, text):
    total = numpy_sums.sum_samples([(X[:4].numpy(), Y[:4].numpy()), (x, y)], J, K, GRID.resolution, 16.0, True)
    assert text in total["problem"][1]
    assert text in numpy_sums.add(numpy_sums.zero(K), total)["problem"][1]


# -- with Spark ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def context():
    pyspark = pytest.importorskip("pyspark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    conf = pyspark.SparkConf().setMaster("local[2]").setAppName("torchlssvm").set("spark.ui.enabled", "false")
    conf = conf.set("spark.driver.host", "127.0.0.1").set("spark.driver.bindAddress", "127.0.0.1")
    with pyspark.SparkContext(conf=conf) as sc:
        sc.setLogLevel("ERROR")
        yield sc


def ranked(rank, world):
    """The same samples by torch.distributed."""
    head = LSSVMHead(J, K, grid=GRID, class_weight="balanced")
    return sync(head.add(X[rank::world], Y[rank::world])).digest()


ROWS = [(x, int(y)) for x, y in zip(X.numpy(), Y, strict=True)]


def test_spark_gives_the_same_digest_and_needs_no_torch(context):
    from torchlssvm.spark import statistics_from

    stats = statistics_from(context.parallelize(ROWS, 3), J, K, grid=GRID, per_class=True)
    loaded = (
        context.range(4, numSlices=2).map(lambda _: {"torch", "torchlssvm"} & set(__import__("sys").modules)).collect()
    )
    assert loaded == [set()] * 4  # the workers that summed have imported neither
    head = merge(LSSVMHead(J, K, grid=GRID, class_weight="balanced"), Delta(stats))
    assert head.digest() == LSSVMHead(J, K, grid=GRID, class_weight="balanced").add(X, Y).digest()
    ready = {"normalize": "l2", "scale": "std"}
    stats = statistics_from(context.parallelize(ROWS, 3), J, K, grid=GRID, **ready)
    assert stats.digest() == LSSVMHead(J, K, grid=GRID, **ready).add(X, Y).digest()


@pytest.mark.slow
def test_spark_and_torch_distributed(context):
    from torchlssvm.spark import statistics_from

    stats = statistics_from(context.parallelize(ROWS, 7), J, K, grid=GRID, per_class=True)
    head = merge(LSSVMHead(J, K, grid=GRID, class_weight="balanced"), Delta(stats))
    assert ranks.run(2, [ranked])["ranked"] == [head.digest()] * 2
    blocks = [(X[a : a + 300].numpy().astype(np.float32), Y[a : a + 300].numpy()) for a in range(0, 2500, 300)]
    total = statistics_from(context.parallelize(blocks, 3), J, K, grid=GRID)
    assert total.digest() == Statistics(J, K, grid=GRID).add(X.float(), Y).digest()
    from pyspark.sql import SparkSession

    frame = SparkSession(context).createDataFrame([(x.tolist(), y) for x, y in ROWS[:600]], ["pixels", "digit"])
    part = statistics_from(frame, J, K, grid=GRID, per_class=True, columns=("pixels", "digit"), depth=1)
    assert part.digest() == Statistics(J, K, grid=GRID, per_class=True).add(X[:600], Y[:600]).digest()
    assert statistics_from(context.parallelize([], 2), J, K, grid=GRID).empty
    with pytest.raises(GridError, match="beyond the grid's limit"):
        statistics_from(context.parallelize([(X[0].numpy() * 100, 0)], 1), J, K, grid=GRID)
    with pytest.raises(ValueError, match=r"integers in 0\.\.2"):
        statistics_from(context.parallelize([(X[0].numpy(), 7)], 1), J, K, grid=GRID)
    with pytest.raises(ValueError, match="need a grid"):
        statistics_from(context.parallelize(ROWS, 2), J, K, grid=None)
    assert (
        statistics_from(context.parallelize(ROWS, 2), J, K, grid=GRID.limit).digest()
        == Statistics(J, K, grid=GRID).add(X, Y).digest()
    )
    chosen = statistics_from(context.parallelize(ROWS, 2), J, K, grid="auto")
    assert chosen.digest() == Statistics(J, K, grid="auto").add(X, Y).digest()
