"""Compare kernel machines of 100 and more samples with a direct implementation, in one run.

    python recipes/benchmarks/small_kernel_machines.py                # about a minute
    python recipes/benchmarks/small_kernel_machines.py --rounds 200 --sizes 100 200

- ``direct`` is the code one would write by hand. It keeps x, y and the kernel matrix, removes or inserts rows (and computes
  their kernel, as torchlssvm does), factors K + I/C by Cholesky, and solves again for alpha and b.
- ``by id`` also gives each sample a permanent id. It looks ids up, and refuses NaN and labels out of range, as torchlssvm
  does.
- ``bare`` is only the Cholesky factorization and the solve, for a given matrix.

Every side reads the solution after each change. Work that torchlssvm defers is spread over the changes that caused it. Times
are processor time of one thread, so other processes do not count. Rounds alternate between the sides. The figures are ratios
of medians over blocks of 32 rounds, and above 1 torchlssvm is faster.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from torchlssvm import KernelLSSVM, LagrangianSVM
from torchlssvm.kernels import RBF

J, KERNEL = 5, RBF(sigma=2.0)
NAMES = ("direct remove", "by id remove", "remove", "direct add", "by id add", "add")
BLOCK = 32
"""Rounds of which the mean is taken: 64 changes, after which one sample at a time fills what waits for a common product."""


class Direct:
    """A kernel LS-SVM (C = 1) or Lagrangian SVM (C = 1/n, iteration (3) from a cold start) by Cholesky, without ids."""

    def __init__(self, x: Tensor, y: Tensor, C: float, lagrangian: bool):
        self.x, self.y, self.C, self.lagrangian = x, 2.0 * y.double() - 1.0, C, lagrangian
        self.K = KERNEL(x, x) + float(lagrangian)
        self.solve()

    def remove(self, gone: Tensor) -> None:
        keep = torch.ones(len(self.x), dtype=torch.bool)
        keep[gone] = False
        self.x, self.y, self.K = self.x[keep], self.y[keep], self.K[keep][:, keep]
        self.solve()

    def add(self, x: Tensor, y: Tensor) -> None:
        side, corner = KERNEL(x, self.x) + float(self.lagrangian), KERNEL(x, x) + float(self.lagrangian)
        self.K = torch.cat([torch.cat([self.K, side.mT], 1), torch.cat([side, corner], 1)])
        self.x, self.y = torch.cat([self.x, x]), torch.cat([self.y, 2.0 * y.double() - 1.0])
        self.solve()

    def matrix(self) -> Tensor:
        Q = self.y[:, None] * self.K * self.y if self.lagrangian else self.K.clone()
        Q.diagonal().add_(1.0 / self.C)
        return Q

    def right(self) -> Tensor:
        one = torch.ones_like(self.y)
        return one[:, None] if self.lagrangian else torch.stack([self.y, one], 1)

    def solve(self) -> None:
        L = torch.linalg.cholesky(self.matrix())
        h = torch.cholesky_solve(self.right(), L)
        if self.lagrangian:
            self.alpha = lagrangian_iteration(L, h, self.C)
        else:
            self.b = h[:, 0].sum() / h[:, 1].sum()
            self.alpha = h[:, 0] - h[:, 1] * self.b


class DirectById(Direct):
    """Direct with ids: a dictionary from ids to rows, and the input checks that ids require."""

    def __init__(self, x: Tensor, y: Tensor, C: float, lagrangian: bool):
        self.row_of, self.next_id = {i: i for i in range(len(x))}, len(x)
        super().__init__(x, y, C, lagrangian)

    def remove(self, gone: Tensor) -> None:
        ids = gone.tolist()
        if len(set(ids)) < len(ids) or any(i not in self.row_of for i in ids):
            raise KeyError("an id is not held, or given twice")
        rows = torch.tensor([self.row_of[i] for i in ids])
        super().remove(rows)
        for i in ids:
            del self.row_of[i]
        self.row_of = {i: row for row, i in enumerate(self.row_of)}

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        if not math.isfinite(float(x.sum())) or not 0 <= int(y.min()) <= int(y.max()) < 2 or len(x) != len(y):
            raise ValueError("x is not finite, or y no label")
        x = x.to(torch.float64)
        super().add(x, y)
        if not math.isfinite(float(self.K[-len(x) :].sum())):
            raise ValueError("the kernel is not finite")
        ids = range(self.next_id, self.next_id + len(x))
        self.row_of.update(zip(ids, range(len(self.row_of), len(self.x)), strict=True))
        self.next_id += len(x)
        return torch.arange(ids.start, ids.stop)


def lagrangian_iteration(L: Tensor, alpha: Tensor, C: float, tol: float = 1e-5) -> Tensor:
    """Equation (3) of Duan et al., from Q^-1 1."""
    z = torch.zeros_like(alpha)
    while True:
        z = (z - 1.9 / C * alpha).clamp(min=0.0)
        before, alpha = alpha, torch.cholesky_solve(1.0 + z, L)
        if (alpha - before).norm() <= tol:
            return alpha[:, 0]


def bare(Q: Tensor, right: Tensor) -> Tensor:
    """Cholesky and the solve alone."""
    return torch.cholesky_solve(right, torch.linalg.cholesky(Q))


def seconds(job: Callable[..., object], *arguments: object) -> float:
    """The processor time of a call."""
    start = time.thread_time()
    job(*arguments)
    return time.thread_time() - start


def row(n: int, k: int, lagrangian: bool, rounds: int) -> dict[str, float]:
    """Median seconds of a change of k samples, each side; ``rounds`` times removed and added again."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, J, dtype=torch.float64, generator=generator)
    y = (x[:, 0] + 0.5 * torch.randn(n, dtype=torch.float64, generator=generator) > 0).long()
    C = 1 / n if lagrangian else 1.0
    ours = LagrangianSVM(KERNEL, C=C) if lagrangian else KernelLSSVM(KERNEL, C=C)
    ours.add(x, y)
    ours.compute_inverse()
    direct, by_id = Direct(x, y, C, lagrangian), DirectById(x, y, C, lagrangian)
    read = (lambda: ours.alpha) if lagrangian else (lambda: ours.b)
    times: dict[str, list[float]] = {name: [] for name in (*NAMES, "bare")}
    for turn in range(rounds + 3):
        ids, x_k, y_k = ours.ids[:k], direct.x[:k], (direct.y[:k] > 0).long()
        t = {
            "direct remove": seconds(direct.remove, torch.arange(k)),
            "by id remove": seconds(by_id.remove, ids),
            "remove": seconds(ours.remove, ids) + seconds(read),
        }
        t["bare"] = seconds(bare, direct.matrix(), direct.right())
        t |= {
            "direct add": seconds(direct.add, x_k, y_k),
            "by id add": seconds(by_id.add, x_k, y_k),
            "add": seconds(ours.add, x_k, y_k) + seconds(read),
        }
        if turn >= 3:
            for name, value in t.items():
                times[name].append(value)
    assert float((ours.alpha - direct.alpha if lagrangian else ours.alpha[:, 1] - direct.alpha).abs().max()) < 1e-4
    return {
        name: statistics.median(map(statistics.mean, zip(*[iter(v)] * BLOCK, strict=True))) for name, v in times.items()
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5 * BLOCK, help=f"a multiple of {BLOCK}")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 140, 200, 400])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, 1 thread, {options.rounds} rounds; RBF, J = {J}; direct / ours, above 1 ours is faster"
    )
    for lagrangian in (False, True):
        print("\nLagrangianSVM, C = 1/n" if lagrangian else "\nKernelLSSVM, C = 1, two classes")
        for n in options.sizes:
            for k in (1, 20, 50):
                r = row(n, k, lagrangian, options.rounds)
                cells = [f"  n={n:4d} k={k:2d}"]
                for change in ("remove", "add"):
                    own, direct, by_id = r[change], r[f"direct {change}"], r[f"by id {change}"]
                    cells += [f"{change} {own * 1e6:5.0f} us {direct / own:5.2f}x ({by_id / own:5.2f}x by id)"]
                cells += [f"direct {r['direct remove'] * 1e6:5.0f}, {r['direct add'] * 1e6:5.0f} us"]
                print("   ".join([*cells, f"bare {r['bare'] * 1e6:5.0f} us"]), flush=True)


if __name__ == "__main__":
    main()
