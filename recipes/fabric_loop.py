"""Learn with Lightning Fabric: every process learns its share of the data, and ``sync`` adds up the shares.

    python recipes/fabric_loop.py                 # one process
    python recipes/fabric_loop.py --devices 2     # two, on CPUs with gloo

You need lightning and scikit-learn. recipes/raw_loop.py shows a loop without Fabric.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.distributed import sync
from torchlssvm.lightning import DigitsData
from torchlssvm.lightning.ranks import are_several, without_padding


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    o = parser.parse_args(argv)
    strategy = "ddp_fork" if o.devices > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=o.devices, strategy=strategy)
    return fabric.launch(learn)  # type: ignore[no-any-return]


def learn(fabric: Fabric) -> dict[str, Any]:
    data = DigitsData()
    data.setup("fit")
    loader = fabric.setup_dataloaders(DataLoader(data.train, batch_size=100))  # shared out over the processes
    head = LSSVMHead(64, 10, grid=FixedPoint(limit=1.0), rho=1.0)
    for batch_idx, (x, y) in enumerate(loader):
        keep = without_padding(loader, batch_idx, len(y))  # the sampler repeats samples to make all shares even
        head.add(x[:keep], y[:keep])
    if are_several():
        sync(head)
    x, y = data.train.tensors
    test_x, test_y = data.val.tensors
    alone = LSSVMHead(64, 10, grid=FixedPoint(limit=1.0), rho=1.0).add(x, y)
    result = {
        "n": int(head.n), "same": head.digest() == alone.digest() and torch.equal(head.refresh().w, alone.w),
        "accuracy": float((head.predict(test_x) == test_y).double().mean()),
    }  # fmt: skip
    fabric.print(
        f"{fabric.world_size} process(es): {result['n']} samples, {result['accuracy']:.1%}; as one machine: {result['same']}"
    )
    return result


if __name__ == "__main__":
    main()
