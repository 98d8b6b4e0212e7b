"""What choosing and judging a model costs, on MNIST pixels (60,000 x 784, ten classes): ratios measured in one run.

    python recipes/benchmarks/judging.py [--threads 2] [--samples 60000] [--repeats 3]

Reads MNIST from the folder that TORCHLSSVM_DATA names. Things that are compared take turns; medians are printed.
"""

from __future__ import annotations

import argparse
import gzip
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchlssvm import FixedPoint, LSSVMHead

GRID = FixedPoint(1.0, bits=20)


def mnist(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels (n, 784) from 0 to 1, and labels (n,)."""
    folder = os.environ.get("TORCHLSSVM_DATA")
    if not folder:
        sys.exit("TORCHLSSVM_DATA is not set: it names the folder with the data sets")
    raw = [
        gzip.decompress((Path(folder) / "mnist" / f"train-{n}-ubyte.gz").read_bytes())
        for n in ("images-idx3", "labels-idx1")
    ]
    x = np.frombuffer(raw[0], np.uint8, offset=16).reshape(-1, 784)[:count] / np.float32(255)
    return torch.from_numpy(x), torch.from_numpy(np.frombuffer(raw[1], np.uint8, offset=8)[:count].astype(np.int64))


def taking_turns(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each call; one after the other, several times."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def row(what: str, measured: str, bound: str) -> None:
    """A line of the table."""
    print(f"| {what} | {measured} | {bound} |", flush=True)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--samples", type=int, default=60000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--without-sklearn", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    x, y = mnist(options.samples)
    head = LSSVMHead(784, 10, grid=GRID).add(x, y)
    fit = lambda: LSSVMHead(784, 10, grid=GRID).add(x, y).weight  # noqa: E731
    alphas = np.logspace(-3, 4, 100)

    print(f"MNIST pixels, {len(x):,} x 784, {options.threads} threads, medians of {options.repeats}\n")
    print("| | measured | bound |\n|---|---|---|")
    t = taking_turns({"fit": fit, "loo": lambda: head.leave_one_out(x, y)}, options.repeats)
    row("all leave-one-out scores, against two fits", f"{t['loo'] / (2 * t['fit']):.2f} ({t['loo']:.2f} s)", "1")
    users = torch.arange(len(x)) // 20
    t = taking_turns({"fit": fit, "users": lambda: head.leave_one_out(x, y, groups=users)}, options.repeats)
    row("leave-user-out, users of 20 samples, against two fits", f"{t['users'] / (2 * t['fit']):.2f}", "")
    errors = against_retraining(head, x, y)
    row("leave-one-out and leave-user-out, 200 samples and 20 users, against retraining", f"{errors[0]:.0e}", "1e-8")
    row("influence on scores, 100 samples and 20 users, against retraining", f"{errors[1]:.0e}", "1e-8")

    from torchlssvm.heads.choosing import check_all, leave_one_out_errors
    from torchlssvm.heads.problems import problems

    parts, samples, one, hundred = (
        problems(head),
        check_all(head, x, y, None),
        *(torch.as_tensor(alphas[a:]) for a in (99, 0)),
    )
    start = time.perf_counter()
    main = parts[0].spectrum(None)
    row("the eigendecomposition and its sums, against a fit", f"{(time.perf_counter() - start) / t['fit']:.2f}", "")
    for method, call in (
        ("gcv", lambda rhos: main.gcv(rhos)),
        ("loo", lambda rhos: leave_one_out_errors(parts, samples, rhos, main, "squared")),
    ):
        many = 200 if method == "gcv" else options.repeats
        s = taking_turns({"one": lambda c=call: c(one), "hundred": lambda c=call: c(hundred)}, many)
        ratio = f"{s['hundred'] / s['one']:.2f} ({1e3 * s['hundred']:.3g} ms)"
        row(f"100 values of rho by {method} against one, after the eigendecomposition", ratio, "2")

    if not options.without_sklearn:
        from sklearn.linear_model import RidgeClassifierCV

        array, labels = x.double().numpy(), y.numpy()
        for values in (np.array([0.1, 1.0, 10.0]), alphas[::11]):
            calls = {
                "gcv": lambda v=values: LSSVMHead(784, 10, grid=GRID).add(x, y).select_rho(v),
                "loo": lambda v=values: LSSVMHead(784, 10, grid=GRID).add(x, y).select_rho(v, "loo", x, y),
                "theirs": lambda v=values: RidgeClassifierCV(alphas=v).fit(array, labels),
            }
            t = taking_turns(calls, 1)
            what = f"learning and choosing among {len(values)} values, against RidgeClassifierCV with the same"
            row(what, f"by loo {t['theirs'] / t['loo']:.1f}x, by gcv {t['theirs'] / t['gcv']:.1f}x faster", "5x")
    points, truth = x[:10000], y[:10000]
    t = taking_turns({"fit": fit, "loss": lambda: head.influence(x, y, points, truth)}, options.repeats)
    row("influence of all samples on the loss at 10,000 points, against a fit", f"{t['loss'] / t['fit']:.2f}", "")


def against_retraining(head: LSSVMHead, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Largest differences from heads without 200 single samples, and without 20 users of 20 samples each.

    Of leave-one-out (and leave-user-out) scores; and of the influence of 100 of the samples, and of the users, on scores.
    """
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(x), generator=generator)
    some, users, points = order[:200], order[-400:], x[:50]
    names = torch.arange(20).repeat_interleave(20)
    before = head(points)
    left = [*head.leave_one_out(x[some], y[some]).split(1)]
    left += [*head.leave_one_out(x[users], y[users], groups=names).split(20)]
    moved = [*head.influence(x[some[:100]], y[some[:100]], points, on="scores"), *([None] * 100)]
    moved += [*head.influence(x[users], y[users], points, on="scores", groups=names)]
    worst = [0.0, 0.0]
    for rows, scores, change in zip([*some.split(1), *users.split(20)], left, moved, strict=True):
        head.remove(x[rows], y[rows]).refresh()  # bit for bit the head that was trained without them
        worst[0] = max(worst[0], float((head(GRID.snap(x[rows])) - scores).abs().max()))
        if change is not None:
            worst[1] = max(worst[1], float((head(points) - before - change).abs().max()))
        head.add(x[rows], y[rows])
    head.refresh()
    return worst[0], worst[1]


if __name__ == "__main__":
    main()
