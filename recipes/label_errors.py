"""Find 5 % random and 5 % confusable label errors in MNIST, by leave-one-out margins and by 5-fold logistic regression.

    python recipes/label_errors.py [--samples 10000] [--features 0] [--multiclass ovr ovo] [--without-logistic]

The recipe compares leave-one-out margins with the usual input of cleanlab, the out-of-fold probabilities of logistic
regression, ranked by self-confidence (cleanlab's default) and by normalized margin. It uses the function of cleanlab if
cleanlab is installed, and otherwise the same formula.

Both methods use the same features: pixels, or with ``--features 1500`` random ReLU features of the pixels. MNIST is read from
the folder that TORCHLSSVM_DATA names. The recipe prints average precision (chance is 0.1) and seconds, and then the
calibration error of probabilities on three data sets.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import cross_val_predict

sys.path.insert(0, str(Path(__file__).resolve().parent))
from mnist_pixels import mnist

from torchlssvm import LSSVMHead
from torchlssvm.analysis.label_errors import find_label_errors
from torchlssvm.functional.calibration import expected_calibration_error, least_squares

CONFUSED = np.array([6, 7, 3, 5, 9, 3, 0, 9, 3, 4])
"""The digit that each one is most easily mistaken for."""


def flipped(truth: NDArray[np.int64], seed: int = 0) -> NDArray[np.int64]:
    """Replace 5 % of the labels at random and 5 % by the class that is most easily confused."""
    random = np.random.default_rng(seed)
    order, part, given = random.permutation(len(truth)), len(truth) // 20, truth.copy()
    some, more = order[:part], order[part : 2 * part]
    given[some] = (truth[some] + random.integers(1, 10, part)) % 10
    given[more] = CONFUSED[truth[more]]
    return given


def quality(labels: NDArray[np.int64], p: NDArray[np.float64], method: str) -> NDArray[np.float64]:
    """cleanlab's label quality scores, low for suspicious labels."""
    try:
        from cleanlab.rank import get_label_quality_scores
    except ImportError:
        own = p[np.arange(len(p)), labels]
        others = p.copy()
        others[np.arange(len(p)), labels] = -1
        return own if method == "self_confidence" else (own - others.max(1) + 1) / 2
    out: NDArray[np.float64] = get_label_quality_scores(labels, p, method=method)
    return out


def find(
    x: torch.Tensor,
    given: NDArray[np.int64],
    truth: NDArray[np.int64],
    logistic: bool,
    multiclass: Sequence[str] = ("ovr",),
) -> dict[str, tuple[float, float]]:
    """Average precision and seconds of each method."""
    wrong, labels, out = given != truth, torch.from_numpy(given), {}
    for kind in multiclass:
        start = time.perf_counter()
        head = LSSVMHead(x.shape[1], 10, multiclass=kind, rho=1.0).add(x, labels)
        head.select_rho()
        found = find_label_errors(head, x, labels)
        seconds = time.perf_counter() - start
        name = "leave-one-out margin" + (", one against one" if kind == "ovo" else "")
        out[name] = (average_precision_score(wrong, -found.margins.numpy()), seconds)
    if logistic:
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # 200 steps are what is usual; more change little
            p = cross_val_predict(LogisticRegression(max_iter=200), x.numpy(), given, cv=5, method="predict_proba")
        seconds = time.perf_counter() - start
        for method in ("self_confidence", "normalized_margin"):
            out[f"logistic regression, {method}"] = (
                average_precision_score(wrong, -quality(given, p, method)),
                seconds,
            )
    return out


def calibration(load: Any) -> tuple[float, float, float]:
    """ECE on a held-out half, for the softmax of scores, clipped scores, and calibration on leave-one-out scores."""
    X, labels = load(return_X_y=True)
    x, y = torch.as_tensor((X - X.mean(0)) / np.maximum(X.std(0), 1e-9)), torch.as_tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[::2], order[1::2]
    head = LSSVMHead(x.shape[1], int(y.max()) + 1, rho=1.0).add(x[train], y[train]).calibrate(x[train], y[train])
    ways = (torch.softmax(head(x[test]), 1), least_squares(head(x[test])), head.predict_proba(x[test]))
    a, b, c = (expected_calibration_error(p, y[test]) for p in ways)
    return a, b, c


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=10000)
    parser.add_argument("--features", type=int, default=0)
    parser.add_argument("--multiclass", nargs="+", default=["ovr", "ovo"], choices=["ovr", "ovo"])
    parser.add_argument("--without-logistic", action="store_true")
    options = parser.parse_args()
    x, labels = mnist(options.samples)
    truth = labels.numpy()
    if options.features:
        generator = torch.Generator().manual_seed(0)
        x = torch.relu(x @ torch.randn(784, options.features, generator=generator) / 28)
    print(f"MNIST, {len(x):,} samples, {x.shape[1]} features\n\n| | average precision | seconds |\n|---|---|---|")
    found = find(x, flipped(truth), truth, not options.without_logistic, options.multiclass)
    for name, (precision, seconds) in found.items():
        print(f"| {name} | {precision:.3f} | {seconds:.1f} |")
    print("\n| calibration error | softmax of scores | (1 + score) / 2 | calibrated |\n|---|---|---|---|")
    for name, load in (("digits", load_digits), ("breast cancer", load_breast_cancer), ("wine", load_wine)):
        print(f"| {name} | " + " | ".join(f"{v:.3f}" for v in calibration(load)) + " |")


if __name__ == "__main__":
    main()
