"""Use a plain PyTorch loop, without a Trainer: one pass, a correction, a removal and a checkpoint.

    python recipes/raw_loop.py

You need scikit-learn, and lightning for the digits.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from torchlssvm import FixedPoint, attach
from torchlssvm.lightning import DigitsData


def main() -> dict[str, Any]:
    data = DigitsData()
    data.setup("fit")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 10))
    clf = attach(network, num_classes=10, grid=FixedPoint(limit=16.0))

    for x, y in DataLoader(data.train, batch_size=128):  # the whole training
        clf.add(x, y)

    test_x, test_y = data.val.tensors
    x, y = data.train.tensors
    result: dict[str, Any] = {"accuracy": float((clf.predict(test_x) == test_y).double().mean())}
    phi = clf.features(x[:128])  # the same batch as in the loop: the same features, to the bit
    clf.head.relabel(phi[:3], y[:3], (y[:3] + 1) % 10).relabel(phi[:3], (y[:3] + 1) % 10, y[:3])
    clf.head.remove(phi[:50], y[:50])
    with tempfile.TemporaryDirectory() as folder:
        torch.save(clf.state_dict(), Path(folder, "clf.pt"))
        again = attach(
            nn.Sequential(nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 10)), 10, grid=FixedPoint(limit=16.0)
        )
        again.load_state_dict(torch.load(Path(folder, "clf.pt"), weights_only=True))
    result |= {"n": int(again.head.n), "same": again.head.digest() == clf.head.digest()}
    print(
        f"{result['accuracy']:.1%} after one pass; 50 samples removed, {result['n']} left; reloaded: {result['same']}"
    )
    return result


if __name__ == "__main__":
    main()
