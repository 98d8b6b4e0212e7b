"""Measure the speed of the kernel machines as ratios from one run. Both sides start from a computed kernel matrix.

    python recipes/benchmarks/kernel_machines.py                    # every table, about three minutes on two cores
    python recipes/benchmarks/kernel_machines.py --only single      # single | batch | loo | crossover | newton
    python recipes/benchmarks/kernel_machines.py --threads 1

The machines are compared with a Cholesky solve, which factors K + I/C for the remaining samples and solves for y and 1. The
times include the updates that a machine defers. The two sides of each line alternate, and the line gives the ratio of their
medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from torchlssvm import KernelLSSVM, LagrangianSVM
from torchlssvm.functional import cost
from torchlssvm.kernels import RBF

J, C, KERNEL = 18, 1.0, RBF(sigma=2.0)


def seconds(job: Callable[[], object]) -> float:
    """The time of one call."""
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def data(n: int) -> tuple[Tensor, Tensor]:
    """Two classes of standard normal rows, moved apart."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 2
    return torch.randn(n, J, dtype=torch.float64, generator=generator) + 0.5 * y[:, None], y


def resolver(x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """The alternative: factor a given matrix by Cholesky and solve."""
    Q = KERNEL(x, x) + torch.eye(len(x), dtype=torch.float64) / C
    t = torch.stack([2.0 * y - 1.0, torch.ones(len(y))], 1).double()
    return lambda: torch.cholesky_solve(t, torch.linalg.cholesky(Q))


def in_use(x: Tensor, y: Tensor) -> KernelLSSVM:
    """A machine that already has its inverse, as after the first update."""
    machine = KernelLSSVM(KERNEL, C=C)
    machine.add(x, y)
    return machine.compute_inverse()


def one_by_one(machine: KernelLSSVM, call: Callable[..., object], *columns: Tensor) -> None:
    """Make a call for each row, read b after each, and finish all deferred work at the end."""
    for row in zip(*columns, strict=True):
        call(*row)
        _ = machine.b
    machine.compute_inverse()


def single(rounds: int) -> None:
    """Remove 64 samples and then add 64, one by one, and read b after each."""
    print(
        "\nOne sample, mean of 64, b read after each: Cholesky re-solve / ours  (target at n=4,000: remove >= 200, add >= 50)"
    )
    for n in (1000, 2000, 4000):
        x, y = data(n + 64 * (rounds + 1))
        machine, again = in_use(x[:n], y[:n]), resolver(x[:n], y[:n])
        times: dict[str, list[float]] = {"remove": [], "add": [], "solve": []}
        for r in range(rounds + 1):
            start = n + 64 * r
            jobs = {
                "remove": lambda m=machine: one_by_one(m, m.remove, m.ids[:64, None]),
                "add": lambda m=machine, x=x[start : start + 64], y=y[start : start + 64]: one_by_one(
                    m, m.add, x[:, None], y[:, None]
                ),
            }
            t = {"solve": seconds(again)} | {name: seconds(job) / 64 for name, job in jobs.items()}
            if r:
                for name, value in t.items():
                    times[name].append(value)
        s, a, b = (statistics.median(times[k]) for k in ("solve", "remove", "add"))
        print(
            f"  n={n:5d}   solve {s * 1e3:7.1f} ms   remove {a * 1e3:5.2f} ms {s / a:5.0f}x"
            f"   add {b * 1e3:5.2f} ms {s / b:5.0f}x"
        )


def batch(rounds: int) -> None:
    """Change k samples at once. A removal takes 2 n^2 k flops; print its rate as a share of a matrix product's rate."""
    print(
        "\nk samples at once: Cholesky re-solve / ours; share of the rate of an (n, k) x (k, n) product over 2 n^2 k flops"
    )
    print("  (targets: k=20 of n=2,020 removed >= 8x; k=200 of n=4,000 removed at a share >= 0.8)")
    for n, k in ((2020, 20), (2020, 50), (2020, 200), (4000, 20), (4000, 200)):
        x, y = data(n)
        machine, again = in_use(x, y), resolver(x[k:], y[k:])
        square, left, right = (torch.randn(*shape, dtype=torch.float64) for shape in ((n, n), (n, k), (k, n)))
        times: dict[str, list[float]] = {"solve": [], "remove": [], "add": [], "gemm": []}
        for r in range(rounds + 1):
            gone = machine.ids[:k]

            t = {
                "solve": seconds(again),
                "gemm": seconds(lambda a=square, b=left, c=right: a.addmm_(b, c, alpha=1e-9)),
                "remove": seconds(lambda m=machine, gone=gone: (m.remove(gone), m.compute_inverse())),
                "add": seconds(lambda m=machine, x=x[:k], y=y[:k]: (m.add(x, y), m.compute_inverse())),
            }
            if r:
                for name, value in t.items():
                    times[name].append(value)
        s, g, a, b = (statistics.median(times[name]) for name in ("solve", "gemm", "remove", "add"))
        print(
            f"  n={n:5d} k={k:3d}   solve {s * 1e3:7.1f} ms   remove {a * 1e3:6.1f} ms {s / a:5.1f}x, share {g / a:4.2f}"
            f"   add {b * 1e3:6.1f} ms {s / b:5.1f}x"
        )


def loo(rounds: int) -> None:
    """Compare all leave-one-out scores of a new machine with two fits (kernel and Cholesky)."""
    print("\nExact leave-one-out of all samples / two fits, kernel included   (target at n=2,000: < 1)")
    for n in (1000, 2000, 4000):
        x, y = data(n)
        fits, scores = [], []
        for r in range(rounds + 1):
            machine = KernelLSSVM(KERNEL, C=C)
            fit = seconds(lambda m=machine, x=x, y=y: m.add(x, y))
            left_out = seconds(machine.leave_one_out)
            if r:
                fits.append(fit)
                scores.append(left_out)
        f, s = statistics.median(fits), statistics.median(scores)
        print(f"  n={n:5d}   fit {f * 1e3:7.1f} ms   leave-one-out {s * 1e3:7.1f} ms   ratio {s / (2 * f):.2f}")


def crossover(rounds: int) -> None:
    """Compare an update of k rows with solving again for the r left. The rule compares 4 n^2 k or 2 n^2 k with 2 r^3."""
    print("\nk samples, update / factor and invert anew (kernel included), and what the rule does")
    rule = cost.block_update_pays
    for n in (64, 200, 1000, 2000):
        x, y = data(2 * n)
        for what in ("add", "remove"):
            cells = []
            for share in (50, 10, 4, 2):
                k = max(1, n // share)
                times: dict[bool, list[float]] = {True: [], False: []}
                for r in range(rounds + 1):
                    for update in (True, False):
                        machine = in_use(x[:n], y[:n])
                        call = (
                            (machine.add, x[n : n + k], y[n : n + k])
                            if what == "add"
                            else (machine.remove, machine.ids[:k])
                        )
                        cost.block_update_pays = lambda *_, update=update: update  # type: ignore[assignment]
                        try:
                            t = seconds(lambda c=call, m=machine: (c[0](*c[1:]), m.compute_inverse()))
                        finally:
                            cost.block_update_pays = rule
                        if r:
                            times[update].append(t)
                pays = rule(n, k if what == "add" else 0, k if what == "remove" else 0, True)
                ratio = statistics.median(times[True]) / statistics.median(times[False])
                cells.append(f"n/{share}: {ratio:.2f} ({'update' if pays else 'anew'})")
            print(f"  n={n:5d} {what:6s}   " + "   ".join(cells))


def newton(rounds: int) -> None:
    """Steps and time of the two solvers of the Lagrangian SVM, from scratch and after 20 removals."""
    print("\nLagrangian SVM, n=1,000: steps cold / after 20 removals, and seconds of the second")
    x, y = data(1000)
    y = torch.where(torch.rand(1000, generator=torch.Generator().manual_seed(1)) < 0.1, 1 - y, y)
    for penalty in (1e-3, 1.0, 10.0, 100.0):
        cells = []
        for solver in ("iteration", "newton"):
            machine = LagrangianSVM(KERNEL, C=penalty, solver=solver, max_iter=100_000)
            ids = machine.add(x, y)
            _ = machine.alpha
            cold = machine.iterations
            machine.remove(ids[:20])
            t = seconds(lambda m=machine: m.alpha)
            cells.append(f"{solver} {cold:5d} / {machine.iterations:5d}  {t * 1e3:8.1f} ms")
        print(f"  C={penalty:7g}   " + "   ".join(cells))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = {"single": single, "batch": batch, "loo": loo, "crossover": crossover, "newton": newton}
    parser.add_argument("--only", choices=tables)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} thread(s), {options.rounds} rounds; RBF, J = {J}, C = {C:g}")
    for name, table in tables.items():
        if options.only in (None, name):
            table(options.rounds)


if __name__ == "__main__":
    main()
