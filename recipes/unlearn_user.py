"""Erase a user with one event and a certificate, and show that the model equals one that never saw them.

    python recipes/unlearn_user.py                    # scikit-learn's digits through a random network, seconds
    python recipes/unlearn_user.py --cifar            # MobileNetV2 features of 10,000 CIFAR-10 pictures (extracted once)
    python recipes/unlearn_user.py --device cuda

For the membership check, the recipe compares the scores of the erased samples with those of a model that never saw them. They
are equal, bit for bit, so the model does not reveal that it once learned these samples. You need scikit-learn and lightning,
and cryptography for a signature.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from correct_labels import digits
from pretrained_head import CACHE, features

from torchlssvm import FixedPoint, LSSVMHead, verify
from torchlssvm.audit import new_key
from torchlssvm.events import Add, Remove
from torchlssvm.store import SampleStore

USERS, USER = 50, "user-42"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", action="store_true")
    parser.add_argument("--samples", type=int, help="use only this many samples of each part")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cache", type=Path, default=CACHE)
    o = parser.parse_args(argv)
    x, y, test_x, test_y = features(samples=o.samples, cache=o.cache) if o.cifar else digits()
    x, y, test_x = x.to(o.device), y.to(o.device), test_x.to(o.device)
    owners = [f"user-{i % USERS}" for i in range(len(x))]
    theirs = torch.tensor([owner == USER for owner in owners], device=o.device)
    grid = FixedPoint.auto(float(x.abs().max()))

    def empty() -> LSSVMHead:
        return LSSVMHead(x.shape[1], 10, grid=grid, device=o.device, rho=1.0)

    result: dict[str, Any] = {"erased": int(theirs.sum())}
    with tempfile.TemporaryDirectory() as folder:
        public = new_key(Path(folder, "key.pem"))
        with SampleStore(Path(folder, "store"), head=empty()) as store:
            store.apply(Add(ids=[str(i) for i in range(len(x))], x=x, y=y, subject=owners))
            with_them = store.head.refresh()(x[theirs]).clone()
            start = time.perf_counter()
            done = store.apply(Remove(subject=USER))
            store.head.refresh()
            result["milliseconds"] = 1000 * (time.perf_counter() - start)
            store.compact()
            certificate = store.certificate(done.event_id, key=Path(folder, "key.pem"))
            result["verified"] = bool(verify(certificate, store=store, public_key=public))
            never = empty().add(x[~theirs], y[~theirs])
            result["same_digest"] = store.head.digest() == never.digest()
            result["same_scores"] = torch.equal(store.head(x[theirs]), never.refresh()(x[theirs]))
            result["moved"] = float((with_them - never(x[theirs])).abs().max())
            result["accuracy"] = float((store.head.predict(test_x).cpu() == test_y).double().mean())
    print(
        f"{USER} had {result['erased']} of {len(x)} samples; erased in {result['milliseconds']:.0f} ms, durable and journalled"
    )
    print(f"certificate signed and verified: {result['verified']}")
    print(f"statistics are those of a head that never saw them: {result['same_digest']}")
    print(
        f"their scores too, bit for bit: {result['same_scores']} (before, they differed by up to {result['moved']:.3f})"
    )
    return result


if __name__ == "__main__":
    main()
