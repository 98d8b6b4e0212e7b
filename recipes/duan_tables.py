"""Repeat Tables 1 and 2 of Duan et al., "Decremental Learning Algorithms for Nonlinear Lagrangian and Least Squares SVMs".

    python recipes/duan_tables.py                       # every data set, about three minutes on two cores
    python recipes/duan_tables.py --only thyroid image2 --repeats 3

The machine unlearns k samples on the paper's data sets and sizes, with RBF and sigma = 2: one by one (Table 1), and 20 or 50
at once (Table 2). Removals go on until at least 64 samples are gone and all deferred work is done. The printed time is the
mean per removal.

The recipe compares this time, as a ratio, with solving again for the remaining samples by a Cholesky factorization (the paper
used an explicit inverse). For the Lagrangian SVM, this solve is followed by equation (3) from a cold start. Both sides start
from a computed kernel matrix. The times in the paper include the kernel, which hides the saving. The last column shows the
saving that the paper reports.

The data come from the folder that TORCHLSSVM_DATA names. Without this folder, only scikit-learn's breast cancer set is used.
"""

from __future__ import annotations

import argparse
import gzip
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchlssvm import KernelLSSVM, LagrangianSVM
from torchlssvm.kernels import RBF

SIGMA, C_LSSVM = 2.0, 1.0


class Set(NamedTuple):
    """A data set of the paper: the file, its size there, what counts as +1, and the LSSVM's saving for k = 1, 20, 50."""

    file: str
    size: int
    positive: Callable[[np.ndarray], np.ndarray]
    saving: dict[int, str]


SETS = {
    "thyroid": Set("thyroid/new_thyroid.csv.gz", 140, lambda y: y == 1, {1: "1.0 %", 20: "6.5 %", 50: "8.5 %"}),
    "ringnorm": Set("ringnorm/ringnorm.csv.gz", 400, lambda y: y > 0, {1: "0.4 %", 20: "1.3 %", 50: "1.0 %"}),
    "german": Set("german/german.csv.gz", 720, lambda y: y == 1, {1: "0.9 %", 20: "misprint", 50: "1.0 %"}),
    "splice": Set("splice/splice.csv.gz", 1000, lambda y: y == 0, {1: "0.7 %", 20: "0.8 %", 50: "0.7 %"}),
    "image1": Set("segment/segment.csv.gz", 1300, lambda y: y <= 3, {1: "1.4 %", 20: "1.5 %", 50: "1.4 %"}),
    "image2": Set("segment/segment.csv.gz", 2020, lambda y: y <= 3, {1: "2.3 %", 20: "2.4 %", 50: "1.9 %"}),
}


def load(name: str, everything: bool = False) -> tuple[Tensor, Tensor]:
    """Standardised features (n, J) and labels 0/1, as many as in the paper unless everything is asked for, in a fixed order."""
    root = os.environ.get("TORCHLSSVM_DATA")
    if root:
        with gzip.open(Path(root) / SETS[name].file) as lines:
            table = np.genfromtxt(lines, delimiter=",", skip_header=1)
        x, y = table[:, :-1], SETS[name].positive(table[:, -1])
    else:
        from sklearn.datasets import load_breast_cancer

        x, y = load_breast_cancer(return_X_y=True)
    x = x[:, x.std(0) > 0]  # the image set has a constant column
    order = np.random.default_rng(0).permutation(len(x))[: None if everything else SETS[name].size]
    x, y = x[order], y[order]
    return torch.from_numpy((x - x.mean(0)) / x.std(0)), torch.from_numpy(y.astype(np.int64))


def seconds(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def resolve_lssvm(Q: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Equation (7) from Q by Cholesky."""
    t = torch.stack([y, torch.ones_like(y)], 1)
    a, e = torch.cholesky_solve(t, torch.linalg.cholesky(Q)).unbind(1)
    b = a.sum() / e.sum()
    return a - e * b, b


def resolve_lsvm(Q: Tensor, C: float, tol: float = 1e-5) -> Tensor:
    """Equation (3) from a cold start, Q factored once."""
    L = torch.linalg.cholesky(Q)
    one = torch.ones(len(Q), 1, dtype=Q.dtype)
    alpha, z, step = torch.cholesky_solve(one, L), torch.zeros_like(one), 1.9 / C
    for _ in range(100_000):
        z = (z - step * alpha).clamp(min=0)
        before, alpha = alpha, torch.cholesky_solve(one + z, L)
        if (alpha - before).norm() <= tol:
            break
    return alpha[:, 0]


def unlearner(k: int) -> Callable[[KernelLSSVM | LagrangianSVM, Tensor, Tensor], None]:
    """Remove k samples at a time, and read the solution after each removal."""

    def unlearn(machine: KernelLSSVM | LagrangianSVM, ids: Tensor, gone: Tensor) -> None:
        for part in gone.split(k):
            machine.remove(ids[part])
            _ = machine.alpha if isinstance(machine, LagrangianSVM) else machine.b
        machine.compute_inverse()  # terms that wait for a common product: none is left out of the count

    return unlearn


def row(name: str, k: int, repeats: int) -> dict[str, float]:
    """One line: seconds to solve again and to update, for both machines, and the largest deviation from a dense solve."""
    x, y = load(name)
    n, kernel, count = len(x), RBF(sigma=SIGMA), -(-64 // k)
    signs = (2 * y - 1).double()
    K = kernel(x, x)
    svm, lsvm = KernelLSSVM(kernel, C=C_LSSVM), LagrangianSVM(kernel, C=1 / n, bias="augmented")
    times: dict[str, list[float]] = {key: [] for key in ("lssvm direct", "lssvm", "lsvm direct", "lsvm")}
    errors, unlearn = [], unlearner(k)
    generator = torch.Generator().manual_seed(k)
    svm_ids, lsvm_ids = svm.add(x, y), lsvm.add(x, y)
    for turn in range(repeats + 1):  # the first one warms up
        gone = torch.randperm(n, generator=generator)[: k * count]
        keep = torch.ones(n, dtype=torch.bool)
        keep[gone[:k]] = False
        Q = K[keep][:, keep]
        Qs = Q + torch.eye(len(Q), dtype=Q.dtype) / C_LSSVM
        Ql = signs[keep, None] * Q * signs[keep] + torch.eye(len(Q), dtype=Q.dtype) * n
        _ = svm.compute_inverse(), lsvm.compute_inverse(), lsvm.alpha  # the state that a machine in use is in
        t = {
            "lssvm direct": seconds(lambda Qs=Qs, keep=keep: resolve_lssvm(Qs, signs[keep])),
            "lsvm direct": seconds(lambda Ql=Ql, n=n: resolve_lsvm(Ql, 1 / n)),
        }
        t["lssvm"] = seconds(lambda ids=svm_ids, gone=gone: unlearn(svm, ids, gone)) / count
        t["lsvm"] = seconds(lambda ids=lsvm_ids, gone=gone: unlearn(lsvm, ids, gone)) / count
        if turn:
            for key, value in t.items():
                times[key].append(value)
        left = torch.ones(n, dtype=torch.bool)
        left[gone] = False
        Q = K[left][:, left]
        truth, _ = resolve_lssvm(Q + torch.eye(len(Q), dtype=Q.dtype) / C_LSSVM, signs[left])
        position = torch.searchsorted(svm.ids, svm_ids[left])
        errors.append(float((svm.alpha[position, 1] - truth).abs().max() / truth.abs().max()))
        svm_ids, lsvm_ids = svm_ids.clone(), lsvm_ids.clone()
        svm_ids[gone], lsvm_ids[gone] = svm.add(x[gone], y[gone]), lsvm.add(x[gone], y[gone])
        svm.refresh(), lsvm.refresh()
    return {key: statistics.median(value) for key, value in times.items()} | {"error": max(errors)}


def main(arguments: list[str] | None = None) -> dict[tuple[str, int], dict[str, float]]:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    names = options.only if os.environ.get("TORCHLSSVM_DATA") else options.only[:1]
    if not os.environ.get("TORCHLSSVM_DATA"):
        print("TORCHLSSVM_DATA is not set: scikit-learn's breast cancer set stands in")
    results = {}
    print(
        f"{torch.get_num_threads()} thread(s), medians of {options.repeats}; direct = Cholesky, kernel matrix at hand for both"
    )
    for title, sizes in (("Table 1, online", (1,)), ("Table 2, batch", (20, 50))):
        print(f"\n{title}\n{'set':10s}{'n':>6s}{'k':>4s} | LSSVM direct     ours   ratio | LSVM direct     ours   ratio | "
              f"{'error':8s} | the paper saved")  # fmt: skip
        for name in names:
            for k in sizes:
                r = results[name, k] = row(name, k, options.repeats)
                n = len(load(name)[0])
                cells = [
                    f"{r[f'{m} direct'] * 1e3:9.2f} ms {r[m] * 1e3:5.2f} ms {r[f'{m} direct'] / r[m]:6.1f}x"
                    for m in ("lssvm", "lsvm")
                ]
                saved = f"{r['error']:.1e}  | {SETS[name].saving[k]}"
                print(f"{name:10s}{n:6d}{k:4d} | {' | '.join(cells)} | {saved}")
    return results


if __name__ == "__main__":
    main()
