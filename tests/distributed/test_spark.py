"""Spark: the same integers as everywhere else."""

import functools
import os
import shutil
import sys

import numpy as np
import pytest
import torch

from tests.support import ranks
from torchlssvm import FixedPoint, GridError, LSSVMHead, Statistics
from torchlssvm.distributed import Delta, merge, sync

J, K = 5, 3
GRID = FixedPoint(16.0)
X = torch.randn(2500, J, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(2500) % K


@pytest.fixture(scope="module")
def context():
    pyspark = pytest.importorskip("pyspark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # workers have this package too
    conf = pyspark.SparkConf().setMaster("local[1]").setAppName("torchlssvm").set("spark.ui.enabled", "false")
    conf = conf.set("spark.driver.host", "127.0.0.1").set("spark.driver.bindAddress", "127.0.0.1")
    with pyspark.SparkContext(conf=conf) as sc:
        sc.setLogLevel("ERROR")
        yield sc


def ranked(rank, world):
    """The same samples by torch.distributed."""
    head = LSSVMHead(J, K, grid=GRID, class_weight="balanced", rho=1.0)
    return sync(head.add(X[rank::world], Y[rank::world])).digest()


ROWS = [(x, int(y)) for x, y in zip(X.numpy(), Y, strict=True)]


def test_spark_gives_the_same_digest(context):
    from torchlssvm.spark import statistics_from

    stats = statistics_from(context.parallelize(ROWS, 3), J, K, grid=GRID, per_class=True)
    head = merge(LSSVMHead(J, K, grid=GRID, class_weight="balanced", rho=1.0), Delta(stats))
    assert head.digest() == LSSVMHead(J, K, grid=GRID, class_weight="balanced", rho=1.0).add(X, Y).digest()
    ready = {"normalize": "l2", "scale": "std"}
    stats = statistics_from(context.parallelize(ROWS, 3), J, K, grid=GRID, **ready)
    assert stats.digest() == LSSVMHead(J, K, grid=GRID, **({"rho": 1.0} | ready)).add(X, Y).digest()


BAD = {
    "a null": (None, 0),
    "features of shape": ([1.0] * (J - 1), 0),
    "got \\[1.0, None": ([1.0, None, 1.0, 1.0, 1.0], 0),
    "label of a sample must be numbers, got a null": ([1.0] * J, None),
}


@pytest.mark.parametrize("said", BAD)
@pytest.mark.parametrize("grid", [GRID, "auto"])
def test_a_null_or_a_short_row_is_a_named_error(said, grid):
    """On a list that has the three methods of an RDD: what runs on the workers is the same."""
    from torchlssvm.spark import statistics_from

    class Partitions(list):
        def mapPartitions(self, work):
            return Partitions([one for half in (self[::2], self[1::2]) for one in work(half)])

        def collect(self):
            return list(self)

        def treeReduce(self, add, depth):
            return functools.reduce(add, self)

    rows = Partitions(ROWS[:10])
    assert statistics_from(rows, J, K, grid=grid).n == 10
    with pytest.raises(ValueError, match=said):
        statistics_from(Partitions([*rows, BAD[said]]), J, K, grid=grid)


@pytest.mark.slow
def test_spark_and_torch_distributed(context):
    from torchlssvm.spark import statistics_from

    stats = statistics_from(context.parallelize(ROWS, 7), J, K, grid=GRID, per_class=True)
    head = merge(LSSVMHead(J, K, grid=GRID, class_weight="balanced", rho=1.0), Delta(stats))
    assert ranks.run(2, [ranked])["ranked"] == [head.digest()] * 2
    blocks = [(X[a : a + 300].numpy().astype(np.float32), Y[a : a + 300].numpy()) for a in range(0, 2500, 300)]
    total = statistics_from(context.parallelize(blocks, 3), J, K, grid=GRID)
    assert total.digest() == Statistics(J, K, grid=GRID).add(X.float(), Y).digest()
    from pyspark.sql import SparkSession

    frame = SparkSession(context).createDataFrame([(x.tolist(), float(y)) for x, y in ROWS[:600]], ["pixels", "digit"])
    part = statistics_from(frame, J, K, grid=GRID, per_class=True, columns=("pixels", "digit"), depth=1)
    assert part.digest() == Statistics(J, K, grid=GRID, per_class=True).add(X[:600], Y[:600]).digest()
    assert statistics_from(context.parallelize([], 2), J, K, grid=GRID).empty
    with pytest.raises(GridError, match="beyond the grid's limit"):
        statistics_from(context.parallelize([(X[0].numpy() * 100, 0)], 1), J, K, grid=GRID)
    for label in (7, 0.5):
        with pytest.raises(ValueError, match=str(label)):
            statistics_from(context.parallelize([(X[0].numpy(), label)], 1), J, K, grid=GRID)
    with pytest.raises(ValueError, match="NaN"):
        statistics_from(context.parallelize([(X[0].numpy() * np.nan, 0)], 1), J, K, grid=GRID)
    with pytest.raises(ValueError, match="need a grid"):
        statistics_from(context.parallelize(ROWS, 2), J, K, grid=None)
    assert (
        statistics_from(context.parallelize(ROWS, 2), J, K, grid=GRID.limit).digest()
        == Statistics(J, K, grid=GRID).add(X, Y).digest()
    )
    chosen = statistics_from(context.parallelize(ROWS, 2), J, K, grid="auto")
    assert chosen.digest() == Statistics(J, K, grid="auto").add(X, Y).digest()
