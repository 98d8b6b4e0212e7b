"""Learn on random features in one pass, class by class and all classes at once, and check that both heads are equal.

    python recipes/random_features.py                    # everything, about ten minutes on two cores
    python recipes/random_features.py --only mnist --widths 500 2000
    python recipes/random_features.py --only cifar --size 64

On MNIST (ten classes), the recipe measures the test accuracy of ``LSSVMHead`` for different numbers of RandomReLU features.
Another head learns the classes one by one, keeps no sample and ends with the digest of joint training. On CIFAR-10 (10,000 +
2,000 pictures, features of a pretrained MobileNetV2), it learns jointly and class by class, with and without random features
(the second stage of RanPAC).

The data and the weights of the network come from the folder that TORCHLSSVM_DATA names. Without it, the recipe uses
scikit-learn's 8x8 digits instead of MNIST and skips CIFAR-10.
"""

from __future__ import annotations

import argparse
import gzip
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from torchlssvm import AttachedClassifier, FixedPoint, attach
from torchlssvm.features import RandomReLU

BATCH = 2000


def folder() -> Path | None:
    """Where the data is."""
    root = os.environ.get("TORCHLSSVM_DATA")
    return Path(root).expanduser() if root else None


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test pixels in [0, 1] and labels: MNIST, or scikit-learn's digits."""
    root = folder()
    if root is None:
        from sklearn.datasets import load_digits

        x, y = map(torch.from_numpy, load_digits(return_X_y=True))
        test = torch.arange(len(y)) % 5 == 4
        return x[~test] / 16, y[~test], x[test] / 16, y[test]
    parts = []
    for split in ("train", "t10k"):
        for name, offset in (("images-idx3", 16), ("labels-idx1", 8)):
            raw = gzip.decompress((root / "mnist" / f"{split}-{name}-ubyte.gz").read_bytes())
            parts.append(torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=offset))
    return parts[0].view(-1, 784) / 255.0, parts[1].long(), parts[2].view(-1, 784) / 255.0, parts[3].long()


def classifier(J: int, width: int, rho: float, limit: float) -> AttachedClassifier:
    """A head on the features themselves (width 0) or on a random lift of them."""
    lift: nn.Module = RandomReLU(J, width) if width else nn.Identity()
    return attach(lift, num_classes=10, in_features=width or J, rho=rho, grid=FixedPoint(limit=limit))


def learn(clf: AttachedClassifier, x: Tensor, y: Tensor) -> AttachedClassifier:
    """One pass."""
    for rows in torch.arange(len(x)).split(BATCH):
        clf.add(x[rows], y[rows])
    return clf


def accuracy(clf: AttachedClassifier, x: Tensor, y: Tensor) -> float:
    """In percent."""
    right = sum(int((clf.predict(x[rows]) == y[rows]).sum()) for rows in torch.arange(len(x)).split(BATCH))
    return 100.0 * right / len(x)


def class_by_class(clf: AttachedClassifier, x: Tensor, y: Tensor) -> AttachedClassifier:
    """Learn one class after another. Each sample is seen once and not kept."""
    for k in range(10):
        learn(clf, x[y == k], y[y == k])
    return clf


def mnist(widths: list[int], rho: float) -> dict[str, float | bool]:
    """Print accuracy for each number of features, and compare class by class with joint learning."""
    x, y, x_test, y_test = digits()
    name = "MNIST" if folder() else "8x8 digits (TORCHLSSVM_DATA is not set)"
    print(f"\n{name}: {len(x):,} training samples, test accuracy in %, rho = {rho:g}")
    results: dict[str, float | bool] = {}
    for width in [0, *widths]:
        start = time.perf_counter()
        clf = learn(classifier(x.shape[1], width, rho, 64.0), x, y)
        score = accuracy(clf, x_test, y_test)
        results[str(width)] = score
        what = f"RandomReLU, {width} features" if width else "raw pixels"
        print(f"  {what:32s} {score:6.2f}   {time.perf_counter() - start:6.1f} s")
    joint = clf.head.digest()
    clf = class_by_class(classifier(x.shape[1], widths[-1], rho, 64.0), x, y)
    results["same digest"] = clf.head.digest() == joint
    print(f"  class by class, {widths[-1]} features        {accuracy(clf, x_test, y_test):6.2f}   "
          f"same digest as all at once: {results['same digest']}")  # fmt: skip
    return results


def cifar_features(size: int, samples: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """MobileNetV2's 1,280 features of the CIFAR-10 pictures, enlarged; training part and test part with labels."""
    import numpy as np
    from torchvision.models import mobilenet_v2

    root = folder()
    assert root is not None
    network = mobilenet_v2(weights=None)
    network.load_state_dict(torch.load(root / "weights" / "mobilenet_v2_imagenet.pt", weights_only=True))
    network.eval()
    z = np.load(root / "cifar10" / "cifar10_12k.npz")
    mean, std = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    parts: list[Tensor] = []
    for split in ("train", "test"):
        pictures, labels = torch.from_numpy(z[f"x_{split}"]), torch.from_numpy(z[f"y_{split}"]).long()
        keep = len(labels) if samples is None else min(samples, len(labels))
        features = []
        with torch.inference_mode():
            for part in pictures[:keep].split(100):
                large = nn.functional.interpolate(part / 255.0, size=(size, size), mode="bilinear", antialias=True)
                features.append(network.features((large - mean) / std).mean((2, 3)))
        parts += [torch.cat(features).clone(), labels[:keep]]
    return parts[0], parts[1], parts[2], parts[3]


def cifar(size: int, width: int, samples: int | None) -> dict[str, float | bool]:
    """Joint and class by class, with and without the lift."""
    start = time.perf_counter()
    x, y, x_test, y_test = cifar_features(size, samples)
    took = time.perf_counter() - start
    print(
        f"\nCIFAR-10 subset, {len(x):,} pictures at {size}x{size}, MobileNetV2 features ({took:.0f} s), accuracy in %"
    )
    mean, std = x.mean(0), x.std(0).clamp(min=1e-6)
    x, x_test = (x - mean) / std, (x_test - mean) / std
    results: dict[str, float | bool] = {}
    print(f"  {'':24s}{'joint':>8s}{'class by class':>16s}   same digest")
    for lift, rho in ((0, 1000.0), (width, 1000.0 * width / 1280)):
        joint = learn(classifier(x.shape[1], lift, rho, 256.0), x, y)
        steps = class_by_class(classifier(x.shape[1], lift, rho, 256.0), x, y)
        name = f"with a lift to {lift}" if lift else "features"
        results[name] = accuracy(joint, x_test, y_test)
        results[f"{name}, class by class"] = accuracy(steps, x_test, y_test)
        results[f"{name}, same digest"] = joint.head.digest() == steps.head.digest()
        print(
            f"  {name:24s}{results[name]:8.2f}{results[f'{name}, class by class']:16.2f}   {results[f'{name}, same digest']}"
        )
    return results


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float | bool]]:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["mnist", "cifar"])
    parser.add_argument("--widths", type=int, nargs="+", default=[250, 500, 1000, 2000])
    parser.add_argument("--rho", type=float, default=1.0, help="regularization of the MNIST heads")
    parser.add_argument("--size", type=int, default=96, help="size of the enlarged CIFAR-10 pictures in pixels")
    parser.add_argument("--lift", type=int, default=4000, help="number of random features on CIFAR-10")
    parser.add_argument("--samples", type=int, help="number of CIFAR-10 pictures of each part (default: all)")
    options = parser.parse_args(arguments)
    results = {}
    if options.only != "cifar":
        results["mnist"] = mnist(options.widths, options.rho)
    if options.only != "mnist" and folder():
        results["cifar"] = cifar(options.size, options.lift, options.samples)
    return results


if __name__ == "__main__":
    main()
