"""Measure the same work with and without another process that keeps one core busy.

    python recipes/benchmarks/under_load.py             # about a minute on two cores, on a machine that is quiet otherwise
    python recipes/benchmarks/under_load.py --small     # seconds, for trying it out

Rounds alternate between undisturbed and disturbed, and the figures are medians. The share is the disturbed speed divided by
the undisturbed speed. Retraining learns a head from 60,000 rows of 784 features, the shape of MNIST. The data are random.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.demo import tell
from torchlssvm.events import Add, Remove
from torchlssvm.store import SampleStore
from torchlssvm.store.database import PRAGMAS

ASKED = {"single durable erasure": 0.6, "MNIST retraining": 0.4, "ingest of 1,024 rows": 0.6, "demo step": 0.6}
"""Share of the undisturbed speed that is to be left."""


def spin() -> None:
    """Keep one core busy indefinitely."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    while True:
        pass


class Disturbance:
    """A process that can keep one core busy."""

    def __init__(self) -> None:
        self.process = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
        self.process.start()
        self.pid = self.process.pid or 0
        time.sleep(1.0)
        os.kill(self.pid, signal.SIGSTOP)

    @contextmanager
    def on(self, really: bool) -> Iterator[None]:
        """Keep a core busy inside the context, or leave the process asleep."""
        if really:
            os.kill(self.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGSTOP)

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()


def seconds(work: Callable[[], Any]) -> float:
    """Time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Erasures:
    """Single erasures from a store, each durable, with the weights up to date after it."""

    def __init__(self, folder: Path, n: int, J: int, count: int):
        x, y = torch.rand(n, J), torch.arange(n) % 10
        self.count, self.next = count, 0
        self.store = SampleStore(folder / "erasures", head=LSSVMHead(J, 10, grid=FixedPoint(1.0), rho=1.0))
        self.store.apply(Add(ids=[str(i) for i in range(n)], x=x, y=y))
        _ = self.store.head.w

    def round(self) -> float:
        """Seconds of one erasure, the median of some."""
        times = []
        for _ in range(self.count):
            event = Remove(ids=[str(self.next)])
            times.append(seconds(lambda: (self.store.apply(event), self.store.head.w)))  # noqa: B023
            self.next += 1
        return statistics.median(times)


class Ingest:
    """Batches of 1,024 rows into a store, and the same bytes into a bare SQLite table."""

    def __init__(self, folder: Path, J: int):
        self.x, self.y = torch.rand(1024, J), torch.arange(1024) % 10
        self.store = SampleStore(
            folder / "ingest", head=LSSVMHead(J, 10, grid=FixedPoint(1.0), rho=1.0), snapshot_rows=10**9
        )
        self.db = sqlite3.connect(folder / "bare.sqlite", isolation_level=None)
        self.db.execute("PRAGMA journal_mode = WAL")
        for name, value in PRAGMAS.items():
            self.db.execute(f"PRAGMA {name} = {value}")
        self.db.execute("CREATE TABLE samples (seq INTEGER PRIMARY KEY, features BLOB)")
        self.blobs = [(row.numpy().tobytes(),) for row in FixedPoint(1.0).integers(self.x)]
        self.next, self.bare = 0, [0.0]

    def plain(self) -> None:
        """Insert the rows as they are."""
        self.db.execute("BEGIN IMMEDIATE")
        self.db.executemany("INSERT INTO samples (features) VALUES (?)", self.blobs)
        self.db.execute("COMMIT")

    def round(self) -> float:
        """Seconds of a batch, head update included; ``bare`` has those of the plain inserts."""
        ids = [str(i) for i in range(self.next, self.next + 1024)]
        self.next += 1024
        self.bare.append(seconds(self.plain))
        return seconds(lambda: self.store.apply(Add(ids=ids, x=self.x, y=self.y)))


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Measure everything and return the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    o = parser.parse_args(argv)
    torch.manual_seed(0)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {os.cpu_count()} core(s), {o.rounds} rounds"
    )
    n = 6000 if o.small else 60_000
    x, y = torch.randint(256, (n, 784)) / 255, torch.arange(n) % 10
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ingest = Ingest(folder, 256 if o.small else 1280)
        work: dict[str, Callable[[], float]] = {
            "single durable erasure": Erasures(folder, *((500, 128, 5) if o.small else (5000, 512, 15))).round,
            "MNIST retraining": lambda: seconds(lambda: LSSVMHead(784, 10, rho=1.0).add(x, y).w),
            "ingest of 1,024 rows": ingest.round,
            "demo step": lambda: statistics.mean(step["ms"] for step in tell(0)["steps"]) / 1e3,
        }
        disturbance = Disturbance()
        times: dict[tuple[str, bool], list[float]] = {(n, d): [] for n in work for d in (False, True)}
        bare: dict[bool, list[float]] = {False: [], True: []}
        try:
            for _ in range(o.rounds + 1):
                for name, job in work.items():
                    for disturbed in (False, True):
                        with disturbance.on(disturbed):
                            times[name, disturbed].append(job())
                        if job == ingest.round:
                            bare[disturbed].append(ingest.bare[-1])
        finally:
            disturbance.end()
    shares = {}
    print("| | undisturbed, ms | beside a busy process, ms | share of the speed | asked |\n|---|---|---|---|---|")
    for name in work:
        alone, beside = (statistics.median(times[name, d][1:]) for d in (False, True))
        shares[name] = alone / beside
        print(f"| {name} | {1e3 * alone:.1f} | {1e3 * beside:.1f} | {alone / beside:.2f} | {ASKED[name]} |")
    for disturbed, what in ((False, "undisturbed"), (True, "beside a busy process")):
        ratio = statistics.median(bare[disturbed][1:]) / statistics.median(times["ingest of 1,024 rows", disturbed][1:])
        print(f"ingest by bare SQLite inserts, {what}: {ratio:.2f} of their speed, head update included")
    return shares


if __name__ == "__main__":
    main()
