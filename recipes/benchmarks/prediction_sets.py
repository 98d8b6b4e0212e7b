"""Measure how often prediction sets contain the true class, and the calibration error (ECE), before and after an erasure.

    python recipes/benchmarks/prediction_sets.py                                      # scikit-learn's digits
    python recipes/benchmarks/prediction_sets.py ~/.cache/torchlssvm/feature_maps_cifar10_96.pt
    python recipes/benchmarks/prediction_sets.py ~/.cache/torchlssvm/feature_maps_banking77.pt

Pass the features that ``recipes/feature_maps.py --only cifar10`` (or banking77) extracts. The recipe erases one of fifty
subjects. The band is 1.96 standard deviations of a share of the test samples. The threshold comes from the training samples.
"""

from __future__ import annotations

import math
import sys
import tempfile

import torch
from torch import Tensor, nn

from torchlssvm import attach
from torchlssvm.functional.calibration import expected_calibration_error


def load(arguments: list[str]) -> tuple[Tensor, Tensor, int]:
    """Features (N, J), labels (N,), and the number n of training samples, which come first."""
    if arguments:
        saved = torch.load(arguments[0], weights_only=True)
        last = 2 * list(saved["widths"].values())[-1]  # mean and deviation of the last layer
        return nn.functional.normalize(saved["views"][0][:, -last:].float()), saved["y"], saved["n"]
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(x)[order].float(), torch.from_numpy(y)[order], 1000


def main() -> None:
    x, y, n = load(sys.argv[1:])
    K = int(y.max()) + 1
    clf = attach(nn.Identity(), K, in_features=x.shape[1], store=tempfile.mkdtemp())
    clf.add(x[:n], y[:n], ids=[f"s{i}" for i in range(n)], subjects=[f"u{i % 50}" for i in range(n)])
    for when in ("before", "after"):
        if when == "after":
            clf.remove(subject="u7")
        held, test = len(clf.store), len(y) - n
        ece = expected_calibration_error(clf.predict_proba(x[n:]), y[n:])
        print(
            f"{when} the erasure: {held} samples, {test} test samples, accuracy {clf.score(x[n:], y[n:]):.3f}, ECE {ece:.3f}"
        )
        for level in (0.8, 0.9, 0.95, 0.99):
            sets = clf.predict_set(x[n:], level)
            covered = float(sets.gather(1, y[n:, None]).double().mean())
            band = 1.96 * math.sqrt(level * (1 - level) * (1 / test + 1 / held))
            single = float((sets.sum(1) == 1).double().mean())
            size = float(sets.sum(1).double().mean())
            inside = "inside" if abs(covered - level) <= band else "OUTSIDE"
            print(
                f"  level {level:.2f}: contains the label {covered:.3f} ({inside} +- {band:.3f}), "
                f"mean size {size:.2f}, one class {single:.2f}"
            )


if __name__ == "__main__":
    main()
