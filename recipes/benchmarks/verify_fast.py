"""Compare the arithmetic of ``verify --fast`` with the Gram product, and the command with one pass over the store.

    python recipes/benchmarks/verify_fast.py                    # 60,000 x 1280 features, about two minutes on two cores
    python recipes/benchmarks/verify_fast.py --samples 6000 --features 256

The features are random numbers with the distribution of a ReLU network's output. The parts take turns, and each ratio is that
of the shortest times. The pass over the store uses the store's own reader, which checks every row and rounds it to the grid.
The time of SQLite alone is printed too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchlssvm import LSSVMHead, cli
from torchlssvm.events import Add, Remove
from torchlssvm.files import DATABASE_FILE
from torchlssvm.functional import gram
from torchlssvm.statistics.sum_check import SumCheck
from torchlssvm.store import SampleStore, new_suppression_key
from torchlssvm.store.erasure.suppression import KEY_VARIABLE

BATCH, CLASSES = 1024, 10


def seconds(job: Callable[[], Any]) -> float:
    """The time of one call."""
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def fill(folder: Path, samples: int, features: int) -> Path:
    """Make a store, erase somebody, and return the file of the certificate."""
    generator = torch.Generator().manual_seed(0)
    key = new_suppression_key(folder.with_suffix(".key"))
    os.environ[KEY_VARIABLE] = str(key)
    head = LSSVMHead(features, CLASSES, rho="gcv")  # as torchlssvm init makes it
    with SampleStore(folder, head=head, suppression_list=folder.with_suffix(".list")) as store:
        for start in range(0, samples + 10, BATCH):
            n = min(BATCH, samples + 10 - start)
            x = torch.randn(n, features, generator=generator).relu()
            ids = [f"s{start + i}" for i in range(n)]
            store.apply(Add(ids=ids, x=x, y=torch.randint(CLASSES, (n,), generator=generator)))
        store.apply(Remove(ids=[f"s{i}" for i in range(10)], event_id="erasure"))
        store.compact()
        certificate = folder.with_suffix(".json")
        store.certificate("erasure").save(certificate)
    return certificate


def command(*arguments: Any) -> None:
    """Run one command of the library, without its output."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = cli.main([str(a) for a in arguments])
    if code:
        raise SystemExit(f"exit code {code}")


def select(file: Path) -> None:
    """Read all rows with SQLite alone."""
    with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as db:
        cursor = db.execute("SELECT * FROM samples")
        while cursor.fetchmany(BATCH):
            continue


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Measure, print, and return the two ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--features", type=int, default=1280)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    J = options.features
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "store"
        certificate = fill(folder, options.samples, J)
        with SampleStore(folder, readonly=True) as store:
            grid, check = store.head.grid, SumCheck(store.head.statistics)
        packed = torch.zeros(gram.packed_size(J, 0, product=True), dtype=torch.float64)

        def read(work: Callable[[Any], Any] | None = None) -> float:
            """Read all rows once, and return the seconds spent on processing them."""
            spent = 0.0
            with SampleStore(folder, readonly=True) as store, store.view():
                for rows in store.batches():
                    if work is not None:
                        spent += seconds(lambda rows=rows: work(rows))
            return spent

        times: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            for name, measured in (
                ("SQLite alone", lambda: seconds(lambda: select(folder / DATABASE_FILE))),
                ("reading pass", lambda: seconds(read)),
                ("Gram product", lambda: read(lambda rows: gram.accumulate_(packed, grid.quantize(rows.x), J))),
                ("whole Gram product", lambda: read(lambda rows: grid.quantize(rows.x).mT @ rows.x.double())),
                ("Freivalds' test", lambda: read(lambda rows: check.add(rows.x, rows.y))),
                (
                    "verify --fast",
                    lambda: seconds(
                        lambda: command("verify", certificate, "--store", folder, "--fast", "--allow-unsigned")
                    ),
                ),
            ):
                times.setdefault(name, []).append(measured())
        full = seconds(lambda: command("verify", certificate, "--store", folder, "--allow-unsigned"))
    best = {name: min(values) for name, values in times.items()} | {"verify": full}
    print(f"{options.samples:,} x {J:,}, {torch.get_num_threads()} threads, best of {options.rounds}")
    for name, value in best.items():
        print(f"  {name:<20} {value:7.2f} s")
    ratios = {
        "arithmetic": best["Freivalds' test"] / best["Gram product"],
        "command": best["verify --fast"] / best["reading pass"],
    }
    print(f"  Freivalds' test takes {ratios['arithmetic']:.3f} of the Gram product (lower half)")
    print(f"  verify --fast takes {ratios['command']:.2f} of a reading pass")
    return ratios


if __name__ == "__main__":
    main()
