"""Compare the speed and memory of the margin head with scikit-learn's LinearSVC and with fits that keep no inverse.

    python recipes/benchmarks/margin_head.py                  # every table; some 15 minutes on one core
    python recipes/benchmarks/margin_head.py --only removal   # removal | leave_out | memory | growth | mnist | choosing

The features are those of MobileNetV2 on 10,000 pictures of CIFAR-10 (from the cache of ``recipes/pretrained_head.py``), MNIST
pixels for ``mnist``, and random numbers for ``growth``. Times are CPU seconds of one thread, which a busy machine changes
little. The two sides of a comparison take turns.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchlssvm import FixedPoint, LSSVMHead, MarginHead

RHO = 200.0
"""Regularization on the CIFAR-10 features: about what k-fold chooses."""

TOLERANCES = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-10)
"""Tolerances of LinearSVC, from which the loosest is taken that reaches our objective to 1e-8."""


def seconds(job: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    job()
    return time.process_time() - start


def cifar() -> tuple[Tensor, Tensor]:
    """Features (10,000, 1,280) and labels."""
    from pretrained_head import features

    x, y, _, _ = features()
    return x, y


def objective(x: np.ndarray, y: np.ndarray, w: np.ndarray, b: np.ndarray, rho: float) -> float:
    """The objective of all classes with a penalized intercept."""
    signs = np.where(y[:, None] == np.arange(w.shape[1]), 1.0, -1.0)
    loss = np.maximum(0.0, 1.0 - signs * (x @ w + b))
    return float(rho * (np.sum(w * w) + np.sum(b * b)) + np.sum(loss * loss))


def removal(rounds: int) -> None:
    """Compare removing one sample and reading the weights with refits, and a fit from scratch with LinearSVC."""
    from sklearn.svm import LinearSVC

    x, y = cifar()
    n, J, K = len(x), x.shape[1], 10
    grid = FixedPoint.auto(float(x.abs().max()))
    head = MarginHead(J, K, rho=RHO, intercept="penalized", grid=grid)
    adding = seconds(lambda: head.add(x, y))
    cold = [seconds(lambda: head.w)]
    snapped, labels = grid.snap(x).numpy(), y.numpy()
    mine = objective(snapped, labels, head.w.numpy(), head.b.numpy(), RHO)
    for tol in TOLERANCES:
        svc = LinearSVC(C=1 / (2 * RHO), loss="squared_hinge", dual=False, tol=tol, max_iter=10000)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = seconds(lambda svc=svc: svc.fit(snapped, labels))
        excess = objective(snapped, labels, svc.coef_.T, svc.intercept_, RHO) / mine - 1
        print(f"LinearSVC tol={tol:g}: {theirs:.2f} s, objective {excess:+.1e} relative to ours", flush=True)
        if excess <= 1e-8:
            break
    print(
        f"cold fit {cold[0]:.2f} s: {cold[0] / theirs:.2f} of LinearSVC's (asked 0.5); with {adding:.2f} s of adding "
        f"{(cold[0] + adding) / theirs:.2f}"
    )
    active = head.active_counts
    print(
        f"active samples a class: {int(active.min())} to {int(active.max())}, mean {float(active.double().mean()):.0f}"
    )
    times: dict[str, list[float]] = {"remove": [], "anew": []}
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:rounds].tolist()
    for i in order:
        times["remove"].append(seconds(lambda i=i: head.remove(x[i : i + 1], y[i : i + 1]).w))
        if len(times["anew"]) < 5:  # from the active sets of before, all Gram matrices formed anew
            twin = copy.deepcopy(head)
            times["anew"].append(seconds(lambda twin=twin: twin.refresh()))
        if len(cold) < 3:
            rest = MarginHead(J, K, rho=RHO, intercept="penalized", grid=grid).add(x[1:], y[1:])
            cold.append(seconds(lambda rest=rest: rest.w))
    mean, middle = statistics.mean(times["remove"]), statistics.median(times["remove"])
    print(
        f"remove one of all samples, weights read: mean {mean * 1e3:.1f} ms, median {middle * 1e3:.1f} ms, {rounds} samples"
    )
    for name, other, asked in (
        ("LinearSVC's refit", theirs, 150),
        ("our cold fit", statistics.median(cold), 40),
        ("Gram matrices formed anew", statistics.median(times["anew"]), 10),
    ):
        print(f"  {name}: {other:.2f} s, {other / mean:.0f}x of the mean (asked {asked}x)", flush=True)
    one = [i for i in range(n) if i not in set(order)][: 4 * rounds]
    held = head.active(x[one], y[one]).any(1).tolist()
    some = [i for i, on in zip(one, held, strict=True) if on][:rounds]
    spent = [seconds(lambda i=i: head.remove(x[i : i + 1], y[i : i + 1]).w) for i in some]
    print(
        f"  of samples that are active in a class: mean {statistics.mean(spent) * 1e3:.1f} ms, "
        f"{theirs / statistics.mean(spent):.0f}x LinearSVC's refit"
    )
    hundred = [i for i in range(n) if i not in set(order) | set(some)][:100]
    spent_100 = seconds(lambda: head.remove(x[hundred], y[hundred]).w)
    print(f"  100 at once: {spent_100 * 1e3:.0f} ms; drift since the fit {head.drift():.1e}")


def leave_out(rounds: int) -> None:
    """Compare leaving out every sample with removing each one."""
    x, y = cifar()
    head = MarginHead(x.shape[1], 10, rho=RHO).add(x, y)
    _ = head.w
    few = 20 * rounds
    all_of = seconds(lambda: head.leave_one_out(x[:few], y[:few]))
    one = statistics.mean(
        seconds(lambda i=i: head.remove(x[i : i + 1], y[i : i + 1]).w) for i in range(few, few + rounds)
    )
    print(
        f"leave-one-out of {few} samples: {all_of:.1f} s, {all_of / few * 1e3:.1f} ms a sample; "
        f"removing one: {one * 1e3:.1f} ms"
    )


def memory(rounds: int) -> None:
    """Peak memory in addition to the rows, measured in a separate process."""
    del rounds
    for J, K in ((1280, 10), (1280, 100)):
        found = subprocess.run(
            [sys.executable, __file__, "--peak", str(J), str(K)], capture_output=True, text=True, check=True
        )
        print(found.stdout.strip(), flush=True)


def peak(J: int, K: int) -> None:
    """Print the peak memory of a fit and some removals, without rows and features."""
    generator = torch.Generator().manual_seed(0)
    n = 10000
    y = torch.arange(n) % K
    x = torch.randn(n, J, generator=generator).relu_()
    x += 0.12 * torch.randn(K, J, generator=generator)[y]
    before = resident("VmRSS")
    head = MarginHead(J, K, rho=RHO).add(x, y)
    spent = seconds(lambda: head.w)
    for i in range(5):
        _ = head.remove(x[i : i + 1], y[i : i + 1]).w
    most, held = (resident(name) - before - n * J * 4 / 2**20 for name in ("VmHWM", "VmRSS"))
    share = float(head.active_counts.double().mean()) / n
    print(
        f"J = {J}, K = {K}: {held:.0f} MB beside the rows, {most:.0f} MB at the peak; fit {spent:.1f} s, {share:.0%} active"
    )


def resident(name: str) -> float:
    """Memory of this process in MB: "VmRSS" now, "VmHWM" at its peak."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    return float("nan")


def growth(rounds: int) -> None:
    """Time of a fit from scratch and of a removal for different n, J and K."""
    print(f"{'n':>6} {'J':>5} {'K':>4} {'active':>7} {'cold, s':>8} {'remove one, ms':>15}")
    generator = torch.Generator().manual_seed(0)
    base = (5000, 512, 10)
    for n, J, K in (
        base,
        (10000, 512, 10),
        (20000, 512, 10),
        (5000, 256, 10),
        (5000, 1024, 10),
        (5000, 512, 5),
        (5000, 512, 20),
    ):
        y = torch.arange(n) % K
        x = torch.randn(n, J, generator=generator).relu_() + 0.35 * torch.randn(K, J, generator=generator)[y]
        head = MarginHead(J, K, rho=n / 50).add(x, y)
        fit = seconds(lambda head=head: head.w)
        share = float(head.active_counts.double().mean()) / n
        spent = [
            seconds(lambda i=i, head=head, x=x, y=y: head.remove(x[i : i + 1], y[i : i + 1]).w) for i in range(rounds)
        ]
        print(f"{n:6} {J:5} {K:4} {share:7.1%} {fit:8.2f} {statistics.mean(spent) * 1e3:15.1f}", flush=True)


def mnist(rounds: int) -> None:
    """All of MNIST's pixels."""
    from accuracy import mnist as read

    data = read(60000)
    head = MarginHead(784, 10, rho=60.0)
    adding = seconds(lambda: head.add(data.x, data.y))
    fit = seconds(lambda: head.w)
    right = float((head.predict(data.x_test) == data.y_test).double().mean())
    share = float(head.active_counts.double().mean()) / 60000
    spent = [seconds(lambda i=i: head.remove(data.x[i : i + 1], data.y[i : i + 1]).w) for i in range(rounds)]
    many = seconds(lambda: head.remove(data.x[1000:1100], data.y[1000:1100]).w)
    print(
        f"MNIST, n = 60,000, J = 784: adding {adding:.1f} s, fit {fit:.1f} s, accuracy {right:.2%}, {share:.1%} active"
    )
    print(
        f"  remove one: mean {statistics.mean(spent) * 1e3:.0f} ms ({fit / statistics.mean(spent):.0f}x); "
        f"100: {many * 1e3:.0f} ms"
    )


def choosing(rounds: int) -> None:
    """Time to choose rho by k-fold, as a multiple of a least-squares fit."""
    del rounds
    x, y = cifar()
    x, y = x[:5000].clone(), y[:5000]
    for K in (10, 20):
        if K == 20:  # each class in two halves, which differ in 40 columns
            half = torch.rand(len(y), generator=torch.Generator().manual_seed(0)) < 0.5
            x[:, :40] += 0.3 * half[:, None]
            y = y + 10 * half
        least = seconds(lambda x=x, y=y, K=K: LSSVMHead(x.shape[1], K, rho=1.0).add(x, y).w)
        head = MarginHead(x.shape[1], K).add(x, y)
        spent = seconds(lambda head=head: head.select_rho(apply=False))
        print(f"n = 5,000, J = 1,280, K = {K}: least-squares fit {least:.2f} s, choosing {spent:.2f} s", flush=True)


TABLES = {
    "removal": removal,
    "leave_out": leave_out,
    "memory": memory,
    "growth": growth,
    "mnist": mnist,
    "choosing": choosing,
}


def main() -> None:
    """Print the requested tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--rounds", type=int, default=60, help="number of samples to remove (default: 60)")
    parser.add_argument("--peak", type=int, nargs=2, metavar=("J", "K"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        peak(*options.peak)
        return
    for name in options.only:
        print(f"\n{TABLES[name].__doc__}")
        TABLES[name](options.rounds)


if __name__ == "__main__":
    main()
