"""Repeat Tables II and III and Figures 2 and 3 of Zhu et al. as ratios, on CoverType (581,012 x 54, two classes, wLPSVM).

    python recipes/benchmarks/distributed.py                # everything, about three minutes; needs TORCHLSSVM_DATA
    python recipes/benchmarks/distributed.py --only ranks   # or bare, increment

- ``bare``: the time of one single-threaded rank to learn all samples with balanced weights and solve for w. It is compared
  with the bare float64 products that this needs, and with scikit-learn's RidgeClassifier(class_weight="balanced") on the same
  array and one thread.
- ``ranks``: the time to learn, sync and solve with 1 to 4 single-threaded ranks and 25 to 100 % of the samples (Table II), the
  speed-up (Figure 2), and the fit of a straight line to time against number of samples (Figure 3).
- ``increment``: 30,000 samples, then 15,000, 7,500 and 3,750 more. Each increment is compared with learning everything again
  (Table III). So is an increment of 3,750 samples at the end of the whole set.

The two sides of a comparison take turns in one run, and the figures are medians. The samples are in memory, as float64, before
the clock starts. If other work keeps the cores busy, the processor time of the busier rank is the better measure of the
speed-up.
"""

from __future__ import annotations

import os

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import wlpsvm_data

from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.distributed import sync

SHARES = (0.25, 0.5, 0.75, 1.0)


def seconds(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def compare(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each job. The jobs take turns."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds + 1):
        for name, job in jobs.items():
            times[name].append(seconds(job))
    return {name: median(t[1:]) for name, t in times.items()}


def learn(x: Tensor, y: Tensor, grid: FixedPoint, weight: str = "balanced") -> LSSVMHead:
    head = LSSVMHead(x.shape[1], 2, class_weight=weight, grid=grid, rho=1.0).add(x, y)
    _ = head.w
    return head


def bare(x: Tensor, y: Tensor, grid: FixedPoint, rounds: int) -> None:
    from sklearn.linear_model import RidgeClassifier

    q = grid.quantize(x)
    with_one = torch.cat([q, torch.ones(len(q), 1, dtype=torch.float64)], 1)
    features, full = ([a[y == k].contiguous() for k in range(2)] for a in (q, with_one))
    array, labels = x.numpy(), y.numpy()
    t = compare(
        {
            "q.T @ q": lambda: [a.mT @ a for a in features],
            "[q 1].T @ [q 1]": lambda: [a.mT @ a for a in full],
            "ours": lambda: learn(x, y, grid),
            "ridge": lambda: RidgeClassifier(class_weight="balanced").fit(array, labels),
        },
        rounds,
    )
    ours, needed, alone = t["ours"], t["[q 1].T @ [q 1]"], t["q.T @ q"]
    print("\nOne thread, all of CoverType, balanced weights, w solved; each class apart")
    print(f"  bare products q.T @ q {alone:.3f} s, with the constant column {needed:.3f} s, ours {ours:.3f} s")
    print(f"  ours / bare products with the constant column, which it needs   {ours / needed:.2f}   (target: <= 1.1)")
    print(f"  ours / bare products of the features alone                      {ours / alone:.2f}")
    print(
        f"  ours / RidgeClassifier, {t['ridge']:.3f} s                                {ours / t['ridge']:.2f}   (target: < 1)"
    )


def rank_main(rank: int, world: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    saved = torch.load(f"{folder}/data.pt", weights_only=True, mmap=True)
    grid = FixedPoint(saved["limit"])
    times: dict[float, list[tuple[float, float]]] = {}
    for turn in range(rounds + 1):
        for share in SHARES:
            n = int(len(saved["x"]) * share)
            mine = slice(rank * n // world, (rank + 1) * n // world)
            x, y = saved["x"][mine].clone(), saved["y"][mine].clone()
            head = LSSVMHead(x.shape[1], 2, class_weight="complement", intercept="penalized", grid=grid, rho=1.0)
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            _ = sync(head.add(x, y)).w
            spent = torch.tensor(time.process_time() - busy)
            dist.barrier()
            wall = time.perf_counter() - start
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            if turn:
                times.setdefault(share, []).append((wall, float(spent)))
    if rank == 0:
        torch.save({str(share): t for share, t in times.items()}, f"{folder}/times.pt")
    dist.barrier()
    dist.destroy_process_group()


def measure_ranks(folder: str, sizes: Iterable[int], rounds: int) -> dict[str, list[float]]:
    """Medians of wall and processor time, by size and share. The sizes take turns, each in its own processes."""
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(3):
        for size in sizes:
            Path(folder, "store").unlink(missing_ok=True)
            mp.spawn(rank_main, (size, folder, max(1, rounds // 3)), nprocs=size)
            for share, t in torch.load(f"{folder}/times.pt", weights_only=True).items():
                found.setdefault(f"{size} {share}", []).extend(t)
    return {name: [median(v) for v in zip(*t, strict=True)] for name, t in found.items()}


def ranks(x: Tensor, y: Tensor, grid: FixedPoint, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"x": x, "y": y, "limit": grid.limit}, f"{folder}/data.pt")
        sizes = range(1, 5)
        t = measure_ranks(folder, sizes, rounds)
    print(
        f"\nTable II: seconds to learn, sync and solve; {os.cpu_count()} core(s) here, so more ranks than that gain nothing"
    )
    print(
        f"  {'samples':>9}"
        + "".join(f"{f'{s} rank(s)':>12}" for s in sizes)
        + "   speed-up of 2   by processor time of the busier rank"
    )
    for share in SHARES[::-1]:
        row, busy = ([t[f"{s} {share}"][i] for s in sizes] for i in (0, 1))
        target = "   (target: >= 1.6)" if share == 1 else ""
        print(
            f"  {share:9.0%}"
            + "".join(f"{v:12.3f}" for v in row)
            + f"{row[0] / row[1]:16.2f}{busy[0] / busy[1]:12.2f}{target}"
        )
    print("Figure 3: time against size, the share of its variance that a straight line explains (1: straight)")
    for s in sizes:
        n, v = np.array(SHARES), np.array([t[f"{s} {share}"][0] for share in SHARES])
        line = np.polyval(np.polyfit(n, v, 1), n)
        straight = 1 - ((v - line) ** 2).sum() / ((v - v.mean()) ** 2).sum()
        print(f"  {s} rank(s)   R^2 {straight:.4f}   time of all / of a quarter {v[-1] / v[0]:.2f}")


def increment(x: Tensor, y: Tensor, grid: FixedPoint, rounds: int) -> None:
    steps = (30_000, 15_000, 7_500, 3_750)
    print(
        "\nTable III: an increment (add, solve) against learning everything again; percent of the samples, and of the time"
    )
    print(
        f"  {'held before':>12}{'new':>8}{'again, ms':>12}{'increment, ms':>15}{'samples, %':>12}{'time, %':>9}{'paper, %':>10}"
    )
    everything = [(sum(steps[:i]), steps[i]) for i in range(4)] + [(len(x) - 3_750, 3_750)]
    paper = [100.0, 100 * 2.20 / 6.54, 100 * 1.09 / 7.62, 100 * 0.56 / 8.13, None]
    for (before, new), printed in zip(everything, paper, strict=True):
        total = before + new
        head = learn(x[:before], y[:before], grid, "complement") if before else None
        part = x[before:total].clone(), y[before:total].clone()

        def grow(head: LSSVMHead | None = head, part: tuple[Tensor, Tensor] = part) -> None:
            if head is None:
                learn(*part, grid, "complement")
            else:
                _ = head.add(*part).w

        def undo(head: LSSVMHead | None = head, part: tuple[Tensor, Tensor] = part) -> None:
            if head is not None:
                _ = head.remove(*part).w

        jobs: dict[str, Callable[[], Any]] = {
            "again": lambda total=total: learn(x[:total], y[:total], grid, "complement"),
            "grow": grow,
            "undo": undo,
        }
        t = compare(jobs, rounds)
        print(
            f"  {before:12d}{new:8d}{t['again'] * 1e3:12.2f}{t['grow'] * 1e3:15.2f}{100 * new / total:12.2f}"
            f"{100 * t['grow'] / t['again']:9.2f}" + (f"{printed:10.2f}" if printed is not None else "")
        )
    print("  (target for the last increment: at most 5 % of learning everything again)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = {"bare": bare, "ranks": ranks, "increment": increment}
    parser.add_argument("--only", choices=tables)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread a rank, {options.rounds} rounds")
    x, y, grid = wlpsvm_data.load("CoverType")
    for name, table in tables.items():
        if options.only in (None, name):
            table(x, y, grid, options.rounds)


if __name__ == "__main__":
    main()
