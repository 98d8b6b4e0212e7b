"""Measure the cost of choosing and judging a model on MNIST pixels (60,000 x 784, ten classes), as ratios from one run.

    python recipes/benchmarks/judging.py [--threads 2] [--samples 60000] [--repeats 3] [--values 3 10]

The recipe reads MNIST from the folder that TORCHLSSVM_DATA names. The two sides of a comparison take turns, and the figures
are medians.

For r values of rho, scikit-learn's RidgeClassifierCV (1.9) computes X^T X, its eigenvectors, and one product X A for each
value. This takes (1 + 2 r) n J^2 floating-point operations. Here GCV needs only X^T X, which takes 9/8 n J^2 operations.
Leave-one-out needs one more product X Q for all values, which takes 2 n J^2 operations.

Compared with RidgeClassifierCV, the number of operations alone would make GCV 6 times as fast with 3 values. It would make
leave-one-out 2 times as fast with 3 values, 7 times with 10 and 64 times with 100.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mnist_pixels import mnist

from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.functional.spectrum import rotated
from torchlssvm.linear.diagnostics.rho_selection import best_of, check_all, leave_one_out_errors
from torchlssvm.linear.diagnostics.whitened_problems import problems

GRID = FixedPoint(1.0, bits=20)


def taking_turns(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each call. The calls take turns, several times."""
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
    parser.add_argument("--values", type=int, nargs="*", default=[3, 10], help="numbers of rho values to choose among")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    x, y = mnist(options.samples)
    head = LSSVMHead(784, 10, grid=GRID, rho=1.0).add(x, y)
    fit = lambda: LSSVMHead(784, 10, grid=GRID, rho=1.0).add(x, y).weight  # noqa: E731

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

    against_one_value(head, x, y, options.repeats, t["fit"])
    if options.values:
        against_sklearn(x.double(), y, options.values, options.repeats)
    points, truth = x[:10000], y[:10000]
    t = taking_turns({"fit": fit, "loss": lambda: head.influence(x, y, points, truth)}, options.repeats)
    row("influence of all samples on the loss at 10,000 points, against a fit", f"{t['loss'] / t['fit']:.2f}", "")


def against_one_value(head: LSSVMHead, x: torch.Tensor, y: torch.Tensor, repeats: int, fit: float) -> None:
    """Compare 100 values of rho with one, after the eigendecomposition."""
    part, samples, main = (
        problems(head._view())[0],
        check_all(head._view(), x, y, None),
        problems(head._view())[0].spectrum(None),
    )
    start = time.perf_counter()
    part.spectrum(None)
    row("the eigendecomposition and its sums, against a fit", f"{(time.perf_counter() - start) / fit:.2f}", "")
    rest = (main.Q @ main.R, main.T, main.mu, main.beta, main.weight, main.n)
    hundred = torch.logspace(-3, 4, 100, dtype=torch.float64)

    def choose(rhos: torch.Tensor) -> Any:
        own = rotated(main.s, main.Q, *rest)
        return own.weights(best_of(rhos, own.gcv(rhos)[0]))

    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "GCV: all errors, the choice, w and b": choose,
        "GCV: all errors and degrees of freedom": main.gcv,
        "leave-one-out: all errors": lambda rhos: leave_one_out_errors([part], samples, rhos, main, "squared"),
    }
    for name, call in calls.items():
        many = repeats if name.startswith("leave") else 200
        s = taking_turns({"one": lambda c=call: c(hundred[50:51]), "hundred": lambda c=call: c(hundred)}, many)
        ratio = f"{s['hundred'] / s['one']:.2f} ({1e3 * s['hundred']:.3g} ms)"
        row(f"100 values of rho against one, after the eigendecomposition; by {name}", ratio, "2")


def against_sklearn(x: torch.Tensor, y: torch.Tensor, counts: list[int], repeats: int) -> None:
    """Compare learning and choosing with RidgeClassifierCV on the same float64 array. x: (n, J); y: (n,)."""
    from sklearn.linear_model import RidgeClassifierCV

    array, labels = x.numpy(), y.numpy()
    for count in counts:
        values = np.array([0.1, 1.0, 10.0]) if count == 3 else np.logspace(-3, 4, count)
        calls = {
            "gcv": lambda v=values: LSSVMHead(784, 10, grid=GRID, rho=1.0).add(x, y).select_rho(v),
            "loo": lambda v=values: LSSVMHead(784, 10, grid=GRID, rho=1.0).add(x, y).select_rho(v, "loo", x, y),
            "theirs": lambda v=values: RidgeClassifierCV(alphas=v).fit(array, labels),
        }
        t = taking_turns(calls, repeats if count <= 10 else 1)
        what = (
            f"learning and choosing among {count} values, against RidgeClassifierCV with the same ({t['theirs']:.1f} s)"
        )
        row(what, f"by GCV {t['theirs'] / t['gcv']:.1f}x, by leave-one-out {t['theirs'] / t['loo']:.1f}x faster", "5x")


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
