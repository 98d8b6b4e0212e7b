"""Repeat the MNIST experiment of Lee et al.: learn with half of the labels wrong, and unlearn a tenth of the wrong samples.

    python recipes/mnist_parity.py                                        # everything, about a minute on two cores
    python recipes/mnist_parity.py --samples 6000 --no-curve --repeats 3  # a small part of it

The task is to separate even from odd digits, from 784 pixels and 60,000 samples. A random half of the samples has the wrong
label. The recipe prints accuracy, exactness, the time compared with retraining, the time for different batch sizes of Theorem
1, and storage. It draws OUT/mnist_parity.png, for which you need matplotlib.

The head has its default free intercept. The paper has no intercept, which changes these accuracies by less than half a point.

MNIST comes from the folder mnist/ in TORCHLSSVM_DATA (the four idx files, gzipped), or otherwise from torchvision. If neither
is available, the recipe uses scikit-learn's 8x8 digits.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from timeit import timeit
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from torchlssvm import CompactLSSVMHead, FixedPoint, LSSVMHead
from torchlssvm.functional import cost

GRID = FixedPoint(limit=1.0)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 3000)
CALLS = 192  # a point of the curve takes at most so many calls, and is scaled up if that is not all
PERCENT = (0, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100)
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#595959"


def mnist() -> list[Tensor]:
    """Training images and digits, test images and digits: from TORCHLSSVM_DATA, or downloaded into the user's cache."""
    folder = Path(os.environ.get("TORCHLSSVM_DATA", "")).expanduser() / "mnist"
    if os.environ.get("TORCHLSSVM_DATA") and folder.is_dir():
        names = [(a, *b) for a in ("train", "t10k") for b in (("images-idx3", 16), ("labels-idx1", 8))]
        files = [(gzip.decompress((folder / f"{a}-{b}-ubyte.gz").read_bytes()), offset) for a, b, offset in names]
        return [torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=offset) for data, offset in files]
    from torchvision.datasets import MNIST

    root = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "torchlssvm"
    return [p for s in (True, False) for d in [MNIST(root, train=s, download=True)] for p in (d.data, d.targets)]


def digits() -> list[Tensor]:
    """Training and test images of scikit-learn's 8x8 digits. Every fifth is for testing."""
    from sklearn.datasets import load_digits

    x, y = map(torch.from_numpy, load_digits(return_X_y=True))
    test = torch.arange(len(y)) % 5 == 4
    return [x[~test], y[~test], x[test], y[test]]


class Task:
    """Even or odd: pixels x in [0, 1], labels y of which exactly half are wrong, and the true ones."""

    def __init__(self, samples: int | None):
        try:
            parts, self.name, largest = mnist(), "MNIST", 255
        except (ImportError, OSError, RuntimeError) as error:
            print(f"MNIST is neither in TORCHLSSVM_DATA nor to be had from torchvision ({str(error).splitlines()[0]})")
            parts, self.name, largest = digits(), "scikit-learn's 8x8 digits in its place", 16
        x, self.x_test = (p.reshape(len(q), -1).float() / largest for p, q in (parts[:2], parts[2:]))
        self.x, self.true, self.y_test = x[:samples], parts[1][:samples].long() % 2, parts[3].long() % 2
        n = len(self.x)
        self.wrong = torch.randperm(n, generator=torch.Generator().manual_seed(0))[: n // 2]  # in order of removal
        self.y = self.true.index_put((self.wrong,), 1 - self.true[self.wrong])
        found = torch.zeros(n, dtype=torch.bool).index_fill(0, self.wrong[: max(1, n // 20)], True)
        self.found, self.rest = (self.x[found], self.y[found]), (self.x[~found], self.y[~found])

    def head(self) -> LSSVMHead:
        """A new head, without samples."""
        return LSSVMHead(self.x.shape[1], 2, rho=1.0, grid=GRID)

    def compact_head(self) -> CompactLSSVMHead:
        """A new head in the paper's form, without samples."""
        return CompactLSSVMHead(self.x.shape[1], 2, rho=1.0)

    def accuracy(self, scores: Tensor) -> float:
        """Percent of the test set."""
        return 100 * (scores.argmax(1) == self.y_test).double().mean().item()


def least_squares(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """w and b for rho = 1 by orthogonal factorization of the centred rows over I: no Gram matrix is formed."""
    x, y = x.double(), torch.nn.functional.one_hot(y, 2).double() * 2 - 1
    mean, level, eye = x.mean(0), y.mean(0), torch.eye(x.shape[1], dtype=torch.float64)
    w = torch.linalg.lstsq(torch.cat([x - mean, eye]), torch.cat([y - level, 0 * eye[:, :2]]), driver="gels").solution
    return w, level - mean @ w


def relative_error(w: Tensor, reference: Tensor) -> float:
    return ((w - reference).abs().max() / reference.abs().max()).item()


def accuracy_and_exactness(task: Task) -> dict[str, Any]:
    head, again = task.head().add(task.x, task.y), task.head().add(*task.rest)
    r: dict[str, Any] = {"before": task.accuracy(head(task.x_test))}
    r["after"] = task.accuracy(head.remove(*task.found)(task.x_test))
    r["clean"] = task.accuracy(task.head().add(task.x, task.true)(task.x_test))
    r["digest_equal"], r["error_retrained"] = head.digest() == again.digest(), relative_error(head.w, again.w)
    r["bit_identical"] = torch.equal(head.refresh().w, again.w) and torch.equal(head.b, again.b)
    r["error_dense"] = relative_error(head.w, least_squares(GRID.snap(task.rest[0]), task.rest[1])[0])
    w, b = least_squares(*task.rest)
    r["error_grid"], r["ungridded"] = relative_error(head.w, w), task.accuracy(task.x_test.double() @ w + b)
    print(f"\n1. Test accuracy, %\n   {r['before']:8.2f}  before the removal")
    print(f"   {r['after']:8.2f}  after it: {r['after'] - r['before']:+.1f} (paper: +12)")
    print(f"   {r['clean']:8.2f}  trained with all labels right\n\n2. Exactness of the removal")
    print(f"   {r['digest_equal']!s:>8}  digest equal to that of a head that only saw the others")
    print(f"   {r['error_retrained']:8.1e}  relative error of w against that head")
    print(f"   {r['bit_identical']!s:>8}  w and b bit-identical to its own after refresh()")
    print(f"   {r['error_dense']:8.1e}  relative error of w against dense least squares on the gridded pixels")
    print(f"   {r['error_grid']:8.1e}  the same without a grid; accuracy then {r['ungridded']:.2f} %")
    return r


def update_against_retraining(task: Task, repeats: int) -> dict[str, float]:
    """Alternating timings, without the first of each kind. Both end with reading w. w is read before the update starts."""
    head, update, retrain = task.head().add(task.x, task.y), [], []
    for _ in range(repeats + 1):
        _ = head.w
        update.append(timeit(lambda: head.remove(*task.found).w, number=1))
        retrain.append(timeit(lambda: task.head().add(*task.rest).w, number=1))
        head.add(*task.found)
    t = {"retrain": median(retrain[1:]), "update": median(update[1:])}
    t["ratio"] = t["retrain"] / t["update"]
    print(f"\n3. Seconds, medians of {repeats:<5d}retraining    update     ratio")
    print(f"   this head              {t['retrain']:10.3f}{t['update']:10.3f}{t['ratio']:9.1f}x")
    print(f"   paper, on its laptop   {0.81:10.3f}{0.26:10.3f}{3.1:9.1f}x")
    return t


def batch_curve(task: Task, repeats: int) -> dict[str, Any]:
    """Seconds for Theorem 1 in batches of each size, w and P up to date at the end.

    A compact head splits a long removal by ``cost.batch_size``; for the curve it is told the size instead.
    """
    x, y = task.found
    head, best = task.compact_head().add(task.x, task.y), min(len(y), cost.batch_size(task.x.shape[1]))

    def removal(size: int, rule: Callable[[int], int]) -> float:
        rows, times = min(len(y), size * CALLS), []
        parts = list(zip(x[:rows].split(size), y[:rows].split(size), strict=True))
        for _ in range(repeats + 1):
            with mock.patch.object(cost, "batch_size", rule):
                times.append(timeit(lambda: ([head.remove(*part) for part in parts], head.P), number=1))
            head.add(x[:rows], y[:rows])
        return median(times[1:]) * len(y) / rows

    sizes = [size for size in SIZES if size < len(y)] + [len(y)]
    points = [(size, removal(size, lambda J, size=size: size)) for size in sizes]
    automatic = removal(len(y), cost.batch_size)
    print(f"\n4. Seconds to remove {len(y):,} samples by Theorem 1, compact form, in batches (*: a part, scaled up)")
    for size, took in points:
        print(f"   {took:8.3f}  {size}{' *' if size * CALLS < len(y) else ''}")
    print(f"   {automatic:8.3f}  automatic, {best}")
    return {"points": points, "automatic": (best, automatic)}


def storage(task: Task) -> dict[str, int]:
    def saved(head: torch.nn.Module) -> int:
        torch.save(head.state_dict(), file := io.BytesIO())
        return file.tell()

    full, compact = (head.add(task.x, task.y) for head in (task.head(), task.compact_head()))
    sizes = {
        "raw data, float32 pixels and int64 labels": task.x.nbytes + task.y.nbytes,
        "raw data, one byte a pixel and label": task.x.numel() + len(task.y),
        "w and C, the compact form": compact.w.nbytes + compact.C.nbytes,
        "statistics": sum(v.nbytes for v in full.statistics.state().values()),
        "saved state_dict, compact form": saved(compact),
        "saved state_dict, with statistics": saved(full),
    }
    print("\n5. Storage, MB\n" + "\n".join(f"   {size / 1e6:8.2f}  {name}" for name, size in sizes.items()))
    return sizes


def accuracy_curve(task: Task) -> list[tuple[float, float]]:
    """Test accuracy while all wrong samples are removed from a head, step by step."""
    head, points = task.head().add(task.x, task.y), []
    stops = [round(len(task.wrong) * percent / 100) for percent in PERCENT]
    for percent, start, stop in zip(PERCENT, [0, *stops], stops, strict=False):
        index = task.wrong[start:stop]
        points.append((percent, task.accuracy(head.remove(task.x[index], task.y[index])(task.x_test))))
    return points


def draw(path: Path, r: dict[str, Any]) -> None:
    """Draw accuracy against the number of removed samples and, if measured, time against batch size."""
    from matplotlib.figure import Figure

    curve, n, star = r["curve"], r["removed"], {"marker": "*", "ls": "", "color": ORANGE, "ms": 16, "zorder": 3}
    fig = Figure((11 if curve else 5.5, 4.3), layout="constrained")
    fig.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    axes = fig.subplots(1, 2 if curve else 1, squeeze=False)[0]
    ax = axes[0]
    ax.plot(*zip(*r["accuracy_curve"], strict=True), "o-", color=BLUE, label="exact removals from one head")
    ax.axhline(r["clean"], color=GREY, ls="--", label=f"trained with all labels right: {r['clean']:.1f} %")
    ax.plot(10, r["after"], **star, label=f"the paper's 10 %: from {r['before']:.1f} to {r['after']:.1f} %")
    ax.set(xlabel="wrong samples removed (%)", ylabel="test accuracy (%)", title="Unlearning the wrong labels")
    if curve:
        ax = axes[1]
        sizes, times = zip(*curve["points"], strict=True)
        part = sum(size * CALLS < n for size in sizes)
        ax.plot(sizes, times, "o-", color=BLUE, label="Theorem 1, compact form")
        ax.plot(sizes[:part], times[:part], "o", color=BLUE, mfc="white", label="scaled up from a part")
        ax.plot(*curve["automatic"], **star, label=f"automatic, batches of {curve['automatic'][0]}")
        ax.axhline(r["retrain"], color=GREY, ls="--", label=f"retraining: {r['retrain']:.2f} s")
        ax.axhline(r["update"], color=GREEN, ls="-.", label=f"update with statistics: {r['update']:.3f} s")
        ax.set(xscale="log", yscale="log", xlabel="batch size (samples)", ylabel=f"time to remove {n:,} samples (s)")
        ax.set(title="Update time by batch size", ylim=(None, 1.5 * max(times)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_major_formatter("{x:g}")
    for ax in axes:
        ax.legend(frameon=False, loc="upper right" if curve and ax is axes[1] else "lower right")
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(path, dpi=160)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, help="use only this many of the first training samples")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    parser.add_argument("--repeats", type=int, default=7, help="number of timings of each kind")
    parser.add_argument("--no-curve", action="store_true", help="skip the curve over batch sizes")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="number of torch threads")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    task = Task(options.samples)
    print(f"{task.name}, even or odd: {len(task.y):,} samples, {task.x.shape[1]} features, {options.threads} threads")
    print(f"{len(task.wrong):,} labels are wrong, {len(task.found[1]):,} of these samples are removed")
    result = {"data": task.name, "samples": len(task.y), "removed": len(task.found[1]), **accuracy_and_exactness(task)}
    result |= update_against_retraining(task, options.repeats)
    result["curve"] = None if options.no_curve else batch_curve(task, min(3, options.repeats))
    result |= {"storage": storage(task), "accuracy_curve": accuracy_curve(task)}
    options.out.mkdir(parents=True, exist_ok=True)
    result["picture"] = options.out / "mnist_parity.png"
    draw(result["picture"], result)
    print(f"\nWritten: {result['picture']}")
    return result


if __name__ == "__main__":
    main()
