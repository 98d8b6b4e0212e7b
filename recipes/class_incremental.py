"""Learn classes two at a time without the old data, and check that the head equals one that learned all data at once.

    python recipes/class_incremental.py               # scikit-learn's digits through a random network, seconds
    python recipes/class_incremental.py --cifar       # MobileNetV2 features of 10,000 CIFAR-10 pictures (extracted once)

After each step, the recipe prints the accuracy on the classes so far, and whether the statistics equal those of joint
training. At the end, the head forgets one class again, without its samples. You need scikit-learn and lightning.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from correct_labels import digits
from pretrained_head import CACHE, features

from torchlssvm import FixedPoint, LSSVMHead

STEP = 2


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", action="store_true")
    parser.add_argument("--samples", type=int, help="use only this many samples of each part")
    parser.add_argument("--cache", type=Path, default=CACHE)
    o = parser.parse_args(argv)
    x, y, test_x, test_y = features(samples=o.samples, cache=o.cache) if o.cifar else digits()
    grid = FixedPoint.auto(float(x.abs().max()))
    head = LSSVMHead(x.shape[1], STEP, grid=grid, per_class=True, rho=1.0)
    rows = []
    for seen in range(STEP, 11, STEP):
        if seen > STEP:
            head.add_classes(STEP)
        new = (y >= seen - STEP) & (y < seen)
        head.add(x[new], y[new])
        joint = LSSVMHead(x.shape[1], seen, grid=grid, per_class=True, rho=1.0).add(x[y < seen], y[y < seen])
        known = test_y < seen
        right = float((head.predict(test_x[known]) == test_y[known]).double().mean())
        rows.append({"classes": seen, "accuracy": right, "joint": head.digest() == joint.digest()})
        print(f"{seen:2} classes: {right:.1%} accuracy, the same statistics as joint training: {rows[-1]['joint']}")
    head.forget_class(0)
    never = LSSVMHead(x.shape[1], 10, grid=grid, per_class=True, rho=1.0).add(x[y > 0], y[y > 0])
    forgotten = head.digest() == never.digest() and torch.equal(head.refresh().w, never.w)
    print(f"class 0 forgotten: the head that never saw it, bit for bit: {forgotten}")
    return {"rows": rows, "forgotten": forgotten}


if __name__ == "__main__":
    main()
