"""Measure how often prediction sets contain the true class, and the calibration error (ECE), before and after an erasure.

    python recipes/benchmarks/prediction_sets.py                                      # scikit-learn's digits
    python recipes/benchmarks/prediction_sets.py ~/.cache/torchlssvm/feature_maps_cifar10_96.pt
    python recipes/benchmarks/prediction_sets.py ~/.cache/torchlssvm/feature_maps_banking77.pt
    python recipes/benchmarks/prediction_sets.py FEATURES --splits 9        # the shares in 9 random splits, without erasures

Pass the features that ``recipes/feature_maps.py --only cifar10`` (or banking77) extracts. The recipe erases one of fifty
subjects. The band is 1.96 standard deviations of a share of the test samples. The threshold comes from the training samples.
"""

from __future__ import annotations

import argparse
import math
import tempfile

import torch
from torch import Tensor, nn

from torchlssvm import LSSVMHead, attach
from torchlssvm.functional.calibration import expected_calibration_error
from torchlssvm.functional.conformal import misfit, threshold

LEVELS = (0.8, 0.9, 0.95, 0.99)


def load(path: str | None) -> tuple[Tensor, Tensor, int]:
    """Features (N, J), labels (N,), and the number n of training samples, which come first."""
    if path:
        saved = torch.load(path, weights_only=True)
        last = 2 * list(saved["widths"].values())[-1]  # mean and deviation of the last layer
        return nn.functional.normalize(saved["views"][0][:, -last:].float()), saved["y"], saved["n"]
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(x)[order].float(), torch.from_numpy(y)[order], 1000


def band(level: float, test: int, held: int) -> float:
    """1.96 standard deviations of the share of test samples whose set contains the label."""
    return 1.96 * math.sqrt(level * (1 - level) * (1 / test + 1 / held))


def splits(x: Tensor, y: Tensor, n: int, count: int) -> None:
    """Print how often the sets contain the label in random splits into n training samples and the others."""
    shares = torch.empty(count, len(LEVELS), dtype=torch.float64)
    for seed in range(count):
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        train, test = order[:n], order[n:]
        head = LSSVMHead(x.shape[1], int(y.max()) + 1).add(x[train], y[train])
        own = misfit(head.leave_one_out(x[train], y[train])).gather(1, y[train, None])[:, 0]
        found = misfit(head(x[test])).gather(1, y[test, None])[:, 0]
        shares[seed] = torch.tensor([float((found <= threshold(own, p)).double().mean()) for p in LEVELS])
    for level, share in zip(LEVELS, shares.mT, strict=True):
        inside = int(((share - level).abs() <= band(level, len(y) - n, n)).sum())
        print(f"level {level:.2f}: mean {share.mean():.4f}, {inside} of {count} splits inside")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", nargs="?")
    parser.add_argument("--splits", type=int, help="number of random splits")
    options = parser.parse_args()
    x, y, n = load(options.features)
    if options.splits:
        splits(x, y, n, options.splits)
        return
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
        for level in LEVELS:
            sets = clf.predict_set(x[n:], level)
            covered = float(sets.gather(1, y[n:, None]).double().mean())
            single = float((sets.sum(1) == 1).double().mean())
            size = float(sets.sum(1).double().mean())
            width = band(level, test, held)
            inside = "inside" if abs(covered - level) <= width else "OUTSIDE"
            print(
                f"  level {level:.2f}: contains the label {covered:.3f} ({inside} +- {width:.3f}), "
                f"mean size {size:.2f}, one class {single:.2f}"
            )


if __name__ == "__main__":
    main()
