"""Compare incremental, distributed and distributed incremental wLPSVM with batch learning (Table I of Zhu et al.).

    python recipes/wlpsvm_tables.py                              # all four data sets on 1, 2, 3 and 4 ranks, a minute
    python recipes/wlpsvm_tables.py --sets Heart BreastWisconsin # a few seconds

For each data set and number of ranks, the samples are split at random into unequal shares.

- Inc: one rank learns half of the samples, then the other half.
- Dist: each rank learns its share, followed by one sync.
- DistInc: each rank learns half of its share, syncs, learns the other half, and syncs again.

Then a tenth of all samples is removed, each on a rank that never held it, and learned again there. The recipe prints the
2-norm of the difference of [w; b] from batch learning. It is 0 if every bit of w and b is the same, and inf if the digests
differ. You need the data sets in the folder that TORCHLSSVM_DATA names.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
import wlpsvm_data

from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.distributed import sync


def new(x: Tensor, grid: FixedPoint) -> LSSVMHead:
    return LSSVMHead(x.shape[1], 2, intercept="penalized", class_weight="complement", grid=grid, rho=1.0)


def difference(head: LSSVMHead, batch: dict[str, Any]) -> float:
    """The 2-norm of the difference, or inf if the digests differ."""
    far = float(torch.cat([(head.w - batch["w"]).reshape(-1), head.b - batch["b"]]).norm())
    return far if head.digest() == batch["digest"] else float("inf")


def one_set(rank: int, group: Any, size: int, saved: dict[str, Any], seed: int) -> dict[str, float]:
    """Inc, Dist and DistInc of a set on ranks 0..size-1."""
    x, y, batch = saved["x"], saved["y"], saved["batch"]
    grid = FixedPoint(saved["limit"])
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    cuts = torch.randperm(len(x) - 1, generator=generator)[: size - 1].add(1).sort().values.tolist()
    mine = order.tensor_split(cuts)[rank]
    half = len(mine) // 2
    out = {}
    if size == 1:
        head = new(x, grid).add(x[order[: len(x) // 2]], y[order[: len(x) // 2]])
        _ = head.w
        head.add(x[order[len(x) // 2 :]], y[order[len(x) // 2 :]])
        out["Inc"] = difference(head, batch)
    out["Dist"] = difference(sync(new(x, grid).add(x[mine], y[mine]), group), batch)
    head = sync(new(x, grid).add(x[mine[:half]], y[mine[:half]]), group)
    sync(head.add(x[mine[half:]], y[mine[half:]]), group)
    out["DistInc"] = difference(head, batch)
    gone = order.tensor_split(cuts)[(rank + 1) % size]  # the neighbour's samples
    gone = gone[: len(gone) // 10]
    sync(head.remove(x[gone], y[gone]), group)
    assert size == 1 or head.digest() != batch["digest"]
    sync(head.add(x[gone], y[gone]), group)
    out["removed elsewhere"] = difference(head, batch)
    return out


def ranks_main(rank: int, world: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    groups = {n: dist.new_group(list(range(n))) for n in range(1, world + 1)}
    results = {}
    for number, name in enumerate(names):
        saved = torch.load(f"{folder}/{name}.pt", mmap=True, weights_only=True)
        for size, group in groups.items():
            if rank < size:
                results[name, size] = one_set(rank, group, size, saved, seed=10 * number + size)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def table(names: list[str], world: int = 4) -> dict[tuple[str, int], list[dict[str, float]]]:
    """The differences on every rank, for each data set and number of ranks."""
    out: dict[tuple[str, int], list[dict[str, float]]] = {}
    torch.set_num_threads(1)  # solved weights are the same bits for the same number of threads
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            x, y, grid = wlpsvm_data.load(name)
            head = new(x, grid).add(x, y)
            batch = {"w": head.w.clone(), "b": head.b.clone(), "digest": head.digest()}
            torch.save({"x": x, "y": y, "limit": grid.limit, "batch": batch}, f"{folder}/{name}.pt")
            out |= {(name, size): [] for size in range(1, world + 1)}
            print(f"{name}: {len(x)} samples, {x.shape[1]} features, {int(y.sum())} positive", file=sys.stderr)
        mp.spawn(ranks_main, (world, folder, names), nprocs=world)
        for rank in range(world):
            for key, result in torch.load(f"{folder}/{rank}.pt", weights_only=True).items():
                out[key].append(result)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=list(wlpsvm_data.SETS), choices=list(wlpsvm_data.SETS))
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    results = table(options.sets, options.ranks)
    columns = ["Inc", "Dist", "DistInc", "removed elsewhere"]
    print(f"{'difference against the batch':<30}{'ranks':>6}" + "".join(f"{c:>19}" for c in columns))
    for (name, size), parts in results.items():
        cells = [max((p[c] for p in parts if c in p), default=None) for c in columns]
        print(f"{name:<30}{size:>6}" + "".join(f"{'' if c is None else f'{c:g}':>19}" for c in cells))


if __name__ == "__main__":
    main()
