"""A process that changes a store without a pause until a file named ``stop`` stands beside it: python tests/store_writer.py STORE"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torchlssvm.errors import StoreBusyError
from torchlssvm.events import Add, Relabel, Remove
from torchlssvm.store import SampleStore


def main() -> None:
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    rng, held = random.Random(0), []
    store = SampleStore(path, snapshot_rows=40)
    print("ready", flush=True)
    J, K = store.head.in_features, store.head.num_classes
    for i in itertools.count():
        if (path.parent / "stop").exists():
            break
        x = torch.tensor([[rng.uniform(-2, 2) for _ in range(J)] for _ in range(3)])
        ids = [f"{i}-{k}" for k in range(3)]
        store.apply(Add(ids=ids, x=x, y=[rng.randrange(K) for _ in ids], subject=f"u{i}"))
        held.append(f"u{i}")
        if len(held) > 6:
            store.apply([Remove(subject=held.pop(0)), Relabel(ids=ids[:1], y=[rng.randrange(K)])])
        if i % 50 == 20:
            try:
                store.compact()
            except StoreBusyError:
                continue  # a reader keeps the log
        if i % 30 == 10:
            store.close()
            store = SampleStore(path, snapshot_rows=40)
    store.close()
    print(i)


if __name__ == "__main__":
    main()
