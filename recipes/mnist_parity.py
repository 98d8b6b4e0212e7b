"""Half of the labels are wrong, some of the wrong samples are found: the MNIST experiment of Lee et al.

    python recipes/mnist_parity.py                       # everything, about two minutes on two cores
    python recipes/mnist_parity.py --samples 6000 --no-curve --repeats 3

Even against odd digits from 784 pixels, 60,000 samples, a random half of them with the wrong label. A least-squares head
learns them, then forgets a tenth of the wrong ones exactly. Printed: accuracy, exactness, time against retraining, time
against the batch size of Theorem 1 and storage; drawn: OUT/mnist_parity.png. The head has the default free intercept
(the paper has none, which changes accuracies by less than half a point).

MNIST comes from the folder mnist/ in TORCHLSSVM_DATA (the four idx files, gzipped), else from torchvision's download, else
scikit-learn's 8x8 digits stand in. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.functional import cost

GRID = FixedPoint(limit=1.0)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 3000)
CALLS = 192  # a timing of the curve takes at most so many calls, and is scaled up if that is not all
PERCENT = (0, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100)
PAPER = {"retrain": 0.81, "update": 0.26, "gain": 12.0}
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#595959"


class Task(NamedTuple):
    """Features (n, J) in [0, 1], true and given labels (n,), the test set, and which are wrong, in order of removal."""

    name: str
    x: Tensor
    true: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    wrong: Tensor

    def found(self) -> tuple[Tensor, Tensor]:
        """The tenth of the wrong samples that is removed."""
        index = self.wrong[: len(self.wrong) // 10]
        return self.x[index], self.y[index]

    def survivors(self) -> tuple[Tensor, Tensor]:
        """All others."""
        keep = torch.ones(len(self.y), dtype=torch.bool)
        keep[self.wrong[: len(self.wrong) // 10]] = False
        return self.x[keep], self.y[keep]


# -- data --------------------------------------------------------------------------------------------------------------


def mnist_from_folder(folder: Path) -> tuple[Any, ...]:
    """Images and digits, training then test, from gzipped idx files."""
    parts = []
    for name in ("train", "t10k"):
        for kind, offset in (("images-idx3", 16), ("labels-idx1", 8)):
            content = gzip.decompress((folder / f"{name}-{kind}-ubyte.gz").read_bytes())
            parts.append(torch.from_numpy(np.frombuffer(content, np.uint8, offset=offset).copy()))
    return tuple(parts)


def mnist_from_torchvision() -> tuple[Any, ...]:
    """The same from torchvision, downloaded into the user's cache."""
    from torchvision.datasets import MNIST

    root = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "torchlssvm"
    sets = [MNIST(root, train=train, download=True) for train in (True, False)]
    return tuple(part for s in sets for part in (s.data, s.targets))


def small_digits() -> tuple[Any, ...]:
    """Scikit-learn's 8x8 digits, every fifth for testing."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = torch.from_numpy(digits.data), torch.from_numpy(digits.target)
    test = torch.arange(len(y)) % 5 == 4
    return x[~test], y[~test], x[test], y[test]


def load_task(samples: int | None) -> Task:
    """Even or odd, with exactly half of the labels turned round."""
    folder = Path(os.environ.get("TORCHLSSVM_DATA", ""), "mnist")
    name, largest = "MNIST", 255
    if "TORCHLSSVM_DATA" in os.environ and folder.is_dir():
        parts = mnist_from_folder(folder)
    else:
        try:
            parts = mnist_from_torchvision()
        except (ImportError, OSError, RuntimeError) as error:
            print(
                f"No MNIST in TORCHLSSVM_DATA and none from torchvision ({error}): scikit-learn's 8x8 digits stand in."
            )
            name, largest, parts = "scikit-learn digits", 16, small_digits()
    x, digit, x_test, digit_test = parts
    x, x_test = (p.reshape(len(q), -1).float() / largest for p, q in ((x, digit), (x_test, digit_test)))
    x, true = x[:samples], digit[:samples].long() % 2
    wrong = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: len(x) // 2]
    return Task(name, x, true, true.index_put((wrong,), 1 - true[wrong]), x_test, digit_test.long() % 2, wrong)


# -- the tables --------------------------------------------------------------------------------------------------------


def new_head(task: Task, statistics: bool = True) -> LSSVMHead:
    return LSSVMHead(task.x.shape[1], 2, rho=1.0, grid=GRID, statistics=statistics)


def percent_right(task: Task, scores: Tensor) -> float:
    return 100 * (scores.argmax(1) == task.y_test).double().mean().item()


def dense_solution(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """w and b by orthogonal factorization of the centred rows over the root of rho I (rho = 1): no Gram matrix."""
    x, y = x.double(), torch.nn.functional.one_hot(y, 2).double() * 2 - 1
    mean, level = x.mean(0), y.mean(0)
    x, y = (
        torch.cat([x - mean, torch.eye(len(mean)).double()]),
        torch.cat([y - level, torch.zeros(len(mean), 2).double()]),
    )
    w = torch.linalg.lstsq(x, y, driver="gels").solution
    return w, level - mean @ w


def relative_error(w: Tensor, reference: Tensor) -> float:
    return ((w - reference).abs().max() / reference.abs().max()).item()


def accuracy_and_exactness(task: Task) -> tuple[dict[str, float], dict[str, Any]]:
    """Tables 1 and 2."""
    head = new_head(task).add(task.x, task.y)
    before = percent_right(task, head(task.x_test))
    head.remove(*task.found())
    after = percent_right(task, head(task.x_test))
    clean = percent_right(task, new_head(task).add(task.x, task.true)(task.x_test))
    x, y = task.survivors()
    again = new_head(task).add(x, y)
    exact = {"digest_equal": head.digest() == again.digest(), "error_retrained": relative_error(head.w, again.w)}
    head.refresh()
    exact["bit_identical"] = torch.equal(head.w, again.w) and torch.equal(head.b, again.b)
    exact["error_dense"] = relative_error(head.w, dense_solution(GRID.snap(x), y)[0])
    w, b = dense_solution(x, y)
    exact["accuracy_ungridded"] = percent_right(task, task.x_test.double() @ w + b)
    exact["error_ungridded"] = relative_error(head.w, w)
    return {"before": before, "after": after, "clean": clean}, exact


def seconds(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def update_against_retraining(task: Task, repeats: int) -> dict[str, float]:
    """Table 3: medians of alternated timings, after one round to warm up. Each includes reading w."""
    found, survivors = task.found(), task.survivors()
    head = new_head(task).add(task.x, task.y)
    times: dict[str, list[float]] = {"retrain": [], "update": []}
    for _ in range(repeats + 1):
        _ = head.w
        times["update"].append(seconds(lambda: head.remove(*found).w))
        times["retrain"].append(seconds(lambda: new_head(task).add(*survivors).w))
        head.add(*found)
    return {name: median(t[1:]) for name, t in times.items()}


def batch_curve(task: Task, repeats: int) -> dict[str, Any]:
    """Table 4: seconds to remove the samples found, by Theorem 1 in batches of each size, w and P included.

    A compact head splits a long removal into batches of ``cost.batch_size(J)`` itself; for the curve it is told the size.
    """
    x, y = task.found()
    head = new_head(task, statistics=False).add(task.x, task.y)

    def removal(size: int, rows: int) -> float:
        def job() -> object:
            for a in range(0, rows, size):
                head.remove(x[a : min(a + size, rows)], y[a : min(a + size, rows)])
            return head.w, head.P

        took = seconds(job)
        head.add(x[:rows], y[:rows])
        return took * len(y) / rows

    removal(len(y), len(y))
    points = []
    for size in [s for s in SIZES if s < len(y)] + [len(y)]:
        with mock.patch.object(cost, "batch_size", lambda J, size=size: size):
            points.append((size, median(removal(size, min(len(y), size * CALLS)) for _ in range(repeats))))
    automatic = median(removal(len(y), len(y)) for _ in range(repeats))
    return {"points": points, "automatic": (cost.batch_size(x.shape[1]), automatic)}


def storage(task: Task) -> dict[str, int]:
    """Table 5, in bytes."""

    def saved(head: LSSVMHead) -> int:
        torch.save(head.state_dict(), file := io.BytesIO())
        return file.tell()

    full, compact = (new_head(task, s).add(task.x, task.y) for s in (True, False))
    return {
        "raw data (float32 pixels, int64 labels)": task.x.nbytes + task.y.nbytes,
        "raw data (one byte a pixel and label)": task.x.numel() + len(task.y),
        "w and P = I - C (compact form)": compact.w.nbytes + compact.P.nbytes,
        "statistics (integers)": sum(v.nbytes for v in full.statistics.state().values()),
        "saved state_dict, compact form": saved(compact),
        "saved state_dict, with statistics": saved(full),
    }


def accuracy_curve(task: Task) -> list[tuple[float, float]]:
    """Test accuracy as the wrong samples leave one head, step by step."""
    head, done, points = new_head(task).add(task.x, task.y), 0, []
    for percent in PERCENT:
        stop = round(len(task.wrong) * percent / 100)
        index, done = task.wrong[done:stop], stop
        head.remove(task.x[index], task.y[index])
        points.append((percent, percent_right(task, head(task.x_test))))
    return points


def draw(path: Path, result: dict[str, Any]) -> None:
    """Accuracy against what is removed and, if measured, time against batch size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    accuracy, times, curve, found = (result[key] for key in ("accuracy", "time", "curve", "found"))
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True})
    fig, axes = plt.subplots(
        1, 2 if curve else 1, figsize=(13 if curve else 6.5, 4.8), squeeze=False, layout="constrained"
    )
    left = axes[0, 0]
    left.plot(*zip(*result["accuracy_curve"], strict=True), "o-", color=BLUE, markersize=5)
    left.axhline(accuracy["clean"], color=GREY, linestyle="--", linewidth=1)
    left.annotate(f"all labels right: {accuracy['clean']:.1f} %", (1, accuracy["clean"]), (0, 5), color=GREY,
                  xycoords=("axes fraction", "data"), textcoords="offset points", ha="right")  # fmt: skip
    left.plot(10, accuracy["after"], "o", color=ORANGE, markersize=11, zorder=3)
    left.annotate(f"10 % removed, as in the paper:\n{accuracy['before']:.1f} % → {accuracy['after']:.1f} %", color=ORANGE,
                  xy=(10, accuracy["after"]), xytext=(14, -4), textcoords="offset points", va="top")  # fmt: skip
    left.set(xlabel="wrong samples removed (%)", ylabel="test accuracy (%)", title="Removing samples with wrong labels")
    if curve:
        right = axes[0, 1]
        for measured, fill, label in (
            (True, BLUE, "Theorem 1, compact form"),
            (False, "white", "the same, scaled up from a part"),
        ):
            points = [p for p in curve["points"] if (p[0] * CALLS >= found) == measured]
            if points:
                right.plot(
                    *zip(*points, strict=True),
                    "o",
                    color=BLUE,
                    markerfacecolor=fill,
                    markersize=6,
                    zorder=3,
                    label=label,
                )
        right.plot(*zip(*curve["points"], strict=True), "-", color=BLUE, zorder=2)
        size, took = curve["automatic"]
        right.plot(size, took, "*", color=ORANGE, markersize=17, zorder=4, label=f"automatic choice, batches of {size}")
        for key, text, style in (("retrain", "retraining", "--"), ("update", "update with statistics", "-.")):
            right.axhline(times[key], color=GREEN if key == "update" else GREY, linestyle=style, linewidth=1.5,
                          label=f"{text}: {times[key]:.3g} s")  # fmt: skip
        right.set(
            xscale="log", yscale="log", xlabel="batch size (samples)", ylabel=f"time to remove {found:,} samples (s)"
        )
        right.set_title("Update time by batch size")
        right.legend(frameon=False, loc="upper right", fontsize=10)
        right.grid(which="major", alpha=0.25)
    left.grid(alpha=0.25)
    fig.savefig(path, dpi=150)
    plt.close(fig)


def report(result: dict[str, Any]) -> None:
    """Print the tables."""
    a, e, t, found = (result[key] for key in ("accuracy", "exact", "time", "found"))
    print(f"\n1. Test accuracy, %                    (removed: {found:,} samples)")
    print(
        f"   before {a['before']:.2f}   after {a['after']:.2f}   gain {a['after'] - a['before']:+.2f} (paper {PAPER['gain']:+.0f})"
    )
    print(f"   trained on all labels right {a['clean']:.2f}")
    print("\n2. Exactness after the removal")
    print(f"   digest equal to a head that never saw the samples   {e['digest_equal']}")
    print(f"   relative error of w against retraining              {e['error_retrained']:.1e}")
    print(f"   bit-identical after refresh()                       {e['bit_identical']}")
    print(f"   relative error of w against dense least squares     {e['error_dense']:.1e}")
    print(f"   without a grid: accuracy {e['accuracy_ungridded']:.2f}, w differs by {e['error_ungridded']:.1e}")
    print(f"\n3. Seconds, medians of {result['repeats']} alternated timings     retrain   update   ratio")
    print(f"   this head                                   {t['retrain']:9.3f} {t['update']:8.3f} {t['ratio']:6.1f}x")
    print(f"   paper (its laptop)                          {PAPER['retrain']:9.2f} {PAPER['update']:8.2f} {3.1:6.1f}x")
    if curve := result["curve"]:
        print(f"\n4. Seconds to remove {found:,} samples by Theorem 1, compact form   (*: a part, scaled up)")
        for size, took in curve["points"]:
            print(f"   batches of {size:<5d}{took:9.3f}{' *' if size * CALLS < found else ''}")
        print(
            f"   automatic ({curve['automatic'][0]})  {curve['automatic'][1]:8.3f}   with statistics {t['update']:.3f}"
        )
    print("\n5. Storage, MB")
    for name, size in result["storage"].items():
        print(f"   {name:<42}{size / 1e6:8.2f}")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, help="use only the first so many training samples")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    parser.add_argument("--repeats", type=int, default=7, help="timings of each thing")
    parser.add_argument("--no-curve", action="store_true", help="leave the batch sizes out")
    parser.add_argument("--threads", type=int, help="for torch")
    options = parser.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    task = load_task(options.samples)
    n, J = task.x.shape
    print(
        f"{task.name}, even or odd: {n:,} samples, {J} features, {len(task.wrong):,} labels wrong; {torch.get_num_threads()} threads"
    )
    accuracy, exact = accuracy_and_exactness(task)
    times = update_against_retraining(task, options.repeats)
    times["ratio"] = times["retrain"] / times["update"]
    result = {
        "data": task.name, "samples": n, "found": len(task.found()[1]), "repeats": options.repeats,
        "accuracy": accuracy, "exact": exact, "time": times, "storage": storage(task),
        "curve": None if options.no_curve else batch_curve(task, min(3, options.repeats)),
        "accuracy_curve": accuracy_curve(task), "picture": options.out / "mnist_parity.png",
    }  # fmt: skip
    report(result)
    options.out.mkdir(parents=True, exist_ok=True)
    draw(result["picture"], result)
    print(f"\nWritten: {result['picture']}")
    return result


if __name__ == "__main__":
    main()
