"""Measure the recall of rare classes with and without weights, and on a stream whose class ratio changes.

    python recipes/imbalance_stream.py            # CoverType from TORCHLSSVM_DATA, else scikit-learn's digits; half a minute

1. One to a hundred: krummholz against lodgepole pine (CoverType), with the rare class reduced to 1 % of the other. The recipe
   prints the recall of both classes without weights, with "complement" (wLPSVM, equation (17) of Zhu et al.), with "balanced",
   and by scikit-learn's RidgeClassifier(class_weight="balanced").
2. A stream (Figure 1 of Zhu et al.): the class ratio changes from 1:1 to 1:100 and back. A sliding window removes old samples,
   and the weights follow the current class counts. For comparison, the recipe also uses no weights, and the weights of the
   first window throughout. It draws OUT/imbalance_stream.png.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.analysis.sliding_window import SlidingWindow

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#595959"


def covertype() -> tuple[np.ndarray, np.ndarray, str]:
    path = Path(os.environ.get("TORCHLSSVM_DATA", "")).expanduser() / "covtype/covtype.data.gz"
    c = np.loadtxt(path, delimiter=",", dtype=np.int16)
    c = c[(c[:, 54] == 2) | (c[:, 54] == 7)]
    return c[:, :54].astype(np.float64), (c[:, 54] == 7).astype(np.int64), "CoverType, krummholz against lodgepole pine"


def digits() -> tuple[np.ndarray, np.ndarray, str]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return x, (y == 8).astype(np.int64), "scikit-learn's digits, eight against the rest"


class Task:
    """Standardised features, 1 is the rare class; the last fifth, in random order, is for testing."""

    def __init__(self) -> None:
        try:
            x, y, self.name = covertype()
        except OSError:
            x, y, self.name = digits()
        order = np.random.default_rng(0).permutation(len(x))
        x, y = x[order], y[order]
        deviation = x.std(0)
        x = (x - x.mean(0)) / np.where(deviation > 0, deviation, 1.0)
        self.grid = FixedPoint(2.0 ** math.ceil(math.log2(np.abs(x).max())))
        cut = len(x) * 4 // 5
        self.x, self.y = torch.from_numpy(x[:cut]), torch.from_numpy(y[:cut])
        self.x_test, self.y_test = torch.from_numpy(x[cut:]), torch.from_numpy(y[cut:])

    def head(self, **options: Any) -> LSSVMHead:
        return LSSVMHead(self.x.shape[1], 2, grid=self.grid, rho=1.0, **options)

    def thinned(self) -> tuple[Tensor, Tensor]:
        """One rare sample to a hundred others."""
        rare, others = (self.y == 1).nonzero()[:, 0], (self.y == 0).nonzero()[:, 0]
        keep = torch.cat([others, rare[: max(2, len(others) // 100)]])
        return self.x[keep], self.y[keep]

    def recalls(self, predicted: Tensor) -> tuple[float, float]:
        """Recall of the rare and of the frequent class on the test set, in percent."""
        right = (predicted == self.y_test).double()
        return 100 * float(right[self.y_test == 1].mean()), 100 * float(right[self.y_test == 0].mean())


def one_to_a_hundred(task: Task) -> dict[str, Any]:
    x, y = task.thinned()
    r: dict[str, Any] = {"counts": torch.bincount(y).tolist()}
    heads = {
        "no weights": task.head(),
        "complement": task.head(class_weight="complement", intercept="penalized"),
        "balanced": task.head(class_weight="balanced"),
    }
    for name, head in heads.items():
        r[name] = task.recalls(head.add(x, y).predict(task.x_test))
    from sklearn.linear_model import RidgeClassifier

    ridge = RidgeClassifier(class_weight="balanced").fit(task.grid.snap(x).numpy(), y.numpy())
    gridded = task.grid.snap(task.x_test)
    r["RidgeClassifier, balanced"] = task.recalls(torch.from_numpy(ridge.predict(gridded.numpy())))
    scores, theirs = heads["balanced"](gridded)[:, 1], torch.from_numpy(ridge.decision_function(gridded.numpy()))
    r["scores"] = float((scores - theirs).abs().max())
    print(f"1. {task.name}, {r['counts'][1]} to {r['counts'][0]} samples; recall in percent")
    print(f"   {'':<28}{'rare':>8}{'frequent':>10}")
    for name in [*heads, "RidgeClassifier, balanced"]:
        print(f"   {name:<28}{r[name][0]:8.2f}{r[name][1]:10.2f}")
    print(f"   largest difference of a score, balanced against RidgeClassifier: {r['scores']:.1e}")
    return r


def stream(task: Task, steps: int, batch: int, window: int) -> dict[str, Any]:
    """Learn batches with a changing share of rare samples, and return the recall for each kind of weights, step by step."""
    rare, others = (task.y == 1).nonzero()[:, 0], (task.y == 0).nonzero()[:, 0]
    ways = {
        "weights of the moment": task.head(class_weight="complement", intercept="penalized"),
        "weights of the first window": task.head(per_class=True, intercept="penalized"),
        "no weights": task.head(intercept="penalized"),
    }
    windows = {name: SlidingWindow(head, window) for name, head in ways.items()}
    r: dict[str, Any] = {"share": [], **{name: [] for name in ways}}
    used = [0, 0]
    for step in range(steps):
        share = 10 ** (-1 + math.cos(4 * math.pi * step / steps))  # of a rare sample to a frequent one: 1 to 1/100
        count = round(batch * share / (1 + share))
        pick = []
        for kind, (pool, n) in enumerate(((rare, count), (others, batch - count))):
            pick.append(pool[torch.arange(used[kind], used[kind] + n) % len(pool)])
            used[kind] += n
        index = torch.cat(pick)
        for name, one in windows.items():
            one.add(task.x[index], task.y[index])
            if step == window // batch and name == "weights of the first window":
                n = one.machine.counts.double()
                one.machine.class_weight = 1 - n / n.sum()
            r[name].append(task.recalls(one.machine.predict(task.x_test)))
        counts = ways["no weights"].counts
        r["share"].append(float(counts[1] / counts.sum()))
    head, fresh = ways["weights of the moment"], task.head(class_weight="complement", intercept="penalized")
    for part in windows["weights of the moment"]:
        fresh.add(*part)
    r["exact"] = head.digest() == fresh.digest()
    low, high = min(r["share"]), max(r["share"])
    print(f"\n2. The stream: {steps} batches of {batch}, a window of {window}; rare share {low:.3f} to {high:.3f}")
    print(f"   {'':<30}{'lowest recall, rare':>20}{'lowest mean of both':>21}")
    for name in ways:
        late = np.array(r[name][window // batch + 1 :])
        print(f"   {name:<30}{late[:, 0].min():20.2f}{late.mean(1).min():21.2f}")
    print(f"   the window's head has the digest of one that only saw the window: {r['exact']}")
    return r


def draw(r: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(8, 7), sharex=True, layout="constrained")
    share = np.array(r["share"])
    top.stackplot(range(len(share)), share, 1 - share, colors=[ORANGE, "#cccccc"])
    top.set(ylabel="share in the window", title="The class ratio changes, the weights follow")
    top.text(0.02, 0.15, "rare", color="white", weight="bold", transform=top.transAxes)
    top.text(0.02, 0.8, "frequent", weight="bold", transform=top.transAxes)
    top.margins(0)
    styles = {
        "weights of the moment": (BLUE, "-"),
        "weights of the first window": (ORANGE, "--"),
        "no weights": (GREY, ":"),
    }
    for axis, kind, label in ((middle, 0, "recall, rare class, %"), (bottom, 1, "recall, frequent class, %")):
        for name, (color, line) in styles.items():
            axis.plot([v[kind] for v in r[name]], color=color, linestyle=line, label=name)
        axis.set(ylabel=label)
    bottom.set(xlabel="batch")
    figure.legend(*middle.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(given: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--window", type=int, default=4000)
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args(given)
    task = Task()
    r = {"hundred": one_to_a_hundred(task), "stream": stream(task, options.steps, options.batch, options.window)}
    options.out.mkdir(parents=True, exist_ok=True)
    draw(r["stream"], options.out / "imbalance_stream.png")
    print(f"\nDrawn: {options.out / 'imbalance_stream.png'}")
    return r


if __name__ == "__main__":
    main()
