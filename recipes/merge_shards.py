"""Learn one head from many shards of features. Every rank sums its shards, one sync adds the sums, rank 0 saves the head.

    torchrun --nproc-per-node 2 recipes/merge_shards.py shards/*.npz --classes 2 --limit 512 --out head.pt

A shard is an .npz file with arrays ``x`` (n, J) and ``y`` (n,), or a .pt file with such a dictionary. The ranks take shards in
turn. The head is the same, bit for bit, for any number of ranks and any order of shards. All ranks need the same grid, so pass
``--limit``, the largest magnitude of a feature.

To load the head, create one with the same arguments: LSSVMHead(J, K, ...).load_state_dict(torch.load(path)). Without torchrun,
the recipe runs as one rank.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.distributed import sync


def read(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """x (n, J) and y (n,) of a shard."""
    if path.suffix == ".pt":
        saved = torch.load(path, weights_only=True)
        return saved["x"], saved["y"]
    with np.load(path) as saved:
        return torch.from_numpy(saved["x"]), torch.from_numpy(saved["y"]).long()


def progress(paths: list[Path], show: bool) -> Iterator[Path]:
    """Yield the paths, with a progress bar on standard error."""
    start = time.perf_counter()
    for done, path in enumerate(paths):
        yield path
        if show:
            share = (done + 1) / len(paths)
            bar = "#" * round(30 * share)
            seconds = time.perf_counter() - start
            left = seconds / share - seconds
            sys.stderr.write(
                f"\rrank 0 [{bar:<30}] {done + 1}/{len(paths)} shards, {seconds:.1f} s, {left:.1f} s to go "
            )
    if show and paths:
        sys.stderr.write("\n")


def accumulate(head: LSSVMHead, paths: Iterable[Path]) -> LSSVMHead:
    """Add every shard."""
    for path in paths:
        head.add(*read(path))
    return head


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="+", type=Path)
    parser.add_argument("--classes", type=int, required=True, help="number of classes")
    parser.add_argument("--limit", type=float, required=True, help="the largest magnitude of a feature")
    parser.add_argument("--bits", type=int, default=20, help="bits of the grid below the limit")
    parser.add_argument("--rho", type=float, default=1.0)
    parser.add_argument("--intercept", default="free", choices=["free", "penalized", "none"])
    parser.add_argument("--class-weight", default=None, choices=["balanced", "complement"])
    parser.add_argument(
        "--min-samples", type=int, default=0, help="refuse to send the sums of a class with fewer samples"
    )
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--out", type=Path, default=Path("head.pt"))
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> dict[str, Any]:
    options = arguments(given)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if "RANK" not in os.environ:  # not under torchrun: one rank
        dist.init_process_group(options.backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(options.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        shards = sorted(options.shards)
        J = read(shards[0])[0].shape[1]
        head = LSSVMHead(
            J, options.classes, rho=options.rho, intercept=options.intercept, class_weight=options.class_weight,
            grid=FixedPoint(options.limit, options.bits),
        )  # fmt: skip
        start = time.perf_counter()
        accumulate(head, progress(shards[rank::world], show=rank == 0))
        summed = time.perf_counter()
        sync(head, min_samples=options.min_samples)
        synced = time.perf_counter()
        if rank == 0:
            w = head.w
            seconds = [summed - start, synced - summed, time.perf_counter() - synced]
            torch.save(head.state_dict(), options.out)
            print(f"{head.n} samples of {J} features in {len(shards)} shards, {world} rank(s)")
            print("summed in {:.2f} s, synced in {:.2f} s, solved in {:.2f} s".format(*seconds))
            print(f"digest {head.digest()}\nw {tuple(w.shape)} and everything else: {options.out}")
        return {"digest": head.digest(), "n": head.n}
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
