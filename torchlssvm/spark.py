"""The statistics of a head as a map-reduce job on Spark, with the digest that torch.distributed gives.

The workers need numpy, and neither torch nor this package: what they run is sent to them by value. Needs pyspark
(``pip install torchlssvm[spark]``) and Java, here.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch

from torchlssvm.errors import GridError
from torchlssvm.functional import gram, numpy_sums
from torchlssvm.functional.byte_tensors import bytes_to_tensor
from torchlssvm.functional.grid import GridOption, as_grid
from torchlssvm.statistics import FixedPoint, Statistics

__all__ = ["statistics_from"]


def statistics_from(
    data: Any, in_features: int, num_classes: int, *, grid: GridOption, per_class: bool = False,
    columns: tuple[str, str] = ("features", "label"), depth: int = 2, normalize: str | None = None, scale: str | None = None,
) -> Statistics:  # fmt: skip
    """Sum all samples of a Spark data set: ``map`` sums each partition, ``reduce`` adds the sums.

    The result is, bit for bit, that of ``Statistics.add`` on the same samples; ``merge(head, Delta(result))`` puts it in a
    head.

    Args:
        data: an RDD of samples (x (J,), label) or of blocks (x (B, J), labels (B,)), or a DataFrame with the two ``columns``.
        in_features: J.
        num_classes: K.
        grid: that of the head: a :class:`~torchlssvm.FixedPoint` or a number, its limit; ``"auto"`` takes a pass of its own.
        per_class: as in the head (True with class weights).
        columns: of a DataFrame: the features (an array or a vector) and the label.
        depth: of the tree in which partial sums are added.
        normalize: as in the head.
        scale: as in the head.
    """
    grid = as_grid(grid)
    if grid is None:
        raise ValueError("sums of several machines need a grid: a number, a FixedPoint or 'auto'; got None")
    samples = data.select(*columns).rdd.map(tuple) if hasattr(data, "select") else data
    from pyspark import cloudpickle  # installed wherever there is data in Spark

    cloudpickle.register_pickle_by_value(numpy_sums)
    try:
        if not isinstance(grid, FixedPoint):
            find = partial(numpy_sums.largest, normalize=normalize)
            grid = FixedPoint.auto(samples.mapPartitions(lambda rows: [find(rows)]).max())
        stats = Statistics(  # checks the arguments
            in_features, num_classes, grid=grid, per_class=per_class, normalize=normalize, scale=scale
        )
        job = partial(
            numpy_sums.sum_samples, J=in_features, K=num_classes, resolution=grid.resolution, limit=grid.max_value,
            per_class=bool(per_class), normalize=normalize,
        )  # fmt: skip
        mapped = samples.mapPartitions(lambda rows: [job(rows)])
        total = mapped.treeReduce(numpy_sums.add, depth)
    finally:
        cloudpickle.unregister_pickle_by_value(numpy_sums)
    if total["problem"] is not None:
        kind, text = total["problem"]
        raise (GridError if kind == "grid" else ValueError)(text)
    counts = torch.from_numpy(total["counts"])
    groups = sorted(total["groups"])
    if groups:
        sums = [gram.pack(*(torch.from_numpy(part) for part in total["groups"][g])) for g in groups]
        about = {"kind": "labels", "exact": True, "gross": total["gross"], "n": float(counts.sum()), "groups": groups}
        meta = json.dumps(stats.header() | about).encode()
        stats.load({"sums": torch.stack(sums), "counts": counts[None], "meta": bytes_to_tensor(meta)})
    return stats
