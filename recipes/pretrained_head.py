"""Fit a head on a pretrained network in one pass, and compare it with scikit-learn's LogisticRegression.

    python recipes/pretrained_head.py                                   # 10,000 + 2,000 pictures of CIFAR-10, a few minutes
    python recipes/pretrained_head.py --samples 300 --no-compare        # a small part of it
    python recipes/pretrained_head.py --folder hymenoptera --size 224   # photographs, <folder>/{train,val}/<class>/

Features are extracted once, with a progress bar, and kept in CACHE. rho is chosen by generalized cross-validation from the
head's sums, or by exact leave-one-out if there are few samples.

Weights come from weights/<backbone>_imagenet.pt in TORCHLSSVM_DATA, or otherwise from torchvision. If neither is available,
the recipe prints a message and uses random weights. The data come from cifar10/ in TORCHLSSVM_DATA; without this folder, the
recipe uses scikit-learn's digits. You need torchvision, lightning and scikit-learn.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from torchlssvm import FixedPoint, LSSVMHead, attach
from torchlssvm.backbone_hash import fingerprint
from torchlssvm.backbones import build
from torchlssvm.cli.console import progress
from torchlssvm.lightning import Cifar10Data, FolderData

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "torchlssvm"


def extract(backbone: nn.Module, dataset: Any, what: str, batch: int = 64) -> tuple[Tensor, Tensor]:
    """Features (n, J) and labels (n,), with a progress bar."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backbone = backbone.to(device).eval()
    xs, ys = [], []
    with torch.inference_mode(), progress(argparse.Namespace(json=False), what, len(dataset)) as advance:
        for x, y in DataLoader(dataset, batch_size=batch):
            xs.append(backbone(x.to(device)).flatten(1).cpu())
            ys.append(y)
            advance(len(y))
    return torch.cat(xs).clone(), torch.cat(ys).clone()


def features(
    name: str = "mobilenet_v2", weights: str | None = None, folder: str | None = None, size: int = 96,
    samples: int | None = None, cache: Path = CACHE,
) -> list[Tensor]:  # fmt: skip
    """Training features and labels, test features and labels; from the cache if they were extracted before."""
    backbone = attach(build(name, weights or "auto"), num_classes=2).backbone
    data = (
        Cifar10Data(size, limit=samples, stand_in=True) if folder is None else FolderData(folder, size, limit=samples)
    )
    data.setup("fit")
    key = f"{fingerprint(backbone)} {folder} {size} {samples} {type(data.train).__name__} {len(data.train)}"
    path = cache / f"{name}_{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt"
    if path.exists():
        print(f"features from {path}")
        return list(torch.load(path, weights_only=True))
    parts = [*extract(backbone, data.train, "training set"), *extract(backbone, data.val, "test set")]
    cache.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    torch.save(parts, beside)
    beside.replace(path)
    return parts


def fit(x: Tensor, y: Tensor, classes: int) -> LSSVMHead:
    """Train in one pass and choose rho."""
    head = LSSVMHead(x.shape[1], classes, grid=FixedPoint.auto(float(x.abs().max()))).add(x, y)
    if len(x) > 2 * x.shape[1]:
        head.select_rho(method="gcv")  # from the sums alone
    else:
        head.select_rho(method="loo", x=x, y=y)  # with few samples generalized cross-validation is too sure of itself
    return head


def accuracy(predicted: Any, y: Tensor) -> float:
    return float((torch.as_tensor(predicted) == y).double().mean())


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="mobilenet_v2", help="a classifier of torchvision, or timm/<name>")
    parser.add_argument("--weights", help="a file with its state_dict, or a member of torchvision's enum")
    parser.add_argument("--folder", help="photographs in <folder>/{train,val}/<class>/")
    parser.add_argument("--size", type=int, default=96, help="width and height of the pictures in pixels")
    parser.add_argument("--samples", type=int, help="use only this many samples of each part")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--no-compare", dest="compare", action="store_false", help="skip LogisticRegression")
    o = parser.parse_args(argv)
    x, y, test_x, test_y = features(o.backbone, o.weights, o.folder, o.size, o.samples, o.cache)
    classes = int(y.max()) + 1
    start = time.perf_counter()
    head = fit(x, y, classes)
    _ = head.w
    result: dict[str, Any] = {"seconds": time.perf_counter() - start, "rho": head.rho, "samples": len(x)}
    result["accuracy"] = accuracy(head.predict(test_x), test_y)
    print(f"{len(x)} samples, {x.shape[1]} features, {classes} classes, {len(test_x)} for testing")
    print(f"LSSVMHead:          {result['accuracy']:.1%} in {result['seconds']:.2f} s, rho = {head.rho:.3g}")
    if o.compare:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        start = time.perf_counter()
        other = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000)).fit(x.numpy(), y.numpy())
        result["their_seconds"] = time.perf_counter() - start
        result["their_accuracy"] = accuracy(other.predict(test_x.numpy()), test_y)
        ratio = result["their_seconds"] / result["seconds"]
        print(
            f"LogisticRegression: {result['their_accuracy']:.1%} in {result['their_seconds']:.2f} s, {ratio:.2g} times as long"
        )
    return result


if __name__ == "__main__":
    main()
