"""Measure time and memory on one machine with many features, many classes, and many rows in a store.

    python recipes/benchmarks/scale.py features         # J = 10,000, 50,000 rows streamed: about 5 minutes on two cores
    python recipes/benchmarks/scale.py classes          # K = 1,000 and 10,000 at J = 1,024: about a minute
    python recipes/benchmarks/scale.py rows             # 1,000,000 rows of 256 features in a store: about 15 minutes
    python recipes/benchmarks/scale.py all --small      # seconds, for trying it out

Each part runs in its own process, so its peak memory is the resident size of that process. Rows are generated batch by batch
and are never all in memory. Each size is measured together with a quarter of the size, to show the growth.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from torchlssvm import FixedPoint, LSSVMHead, verify
from torchlssvm.errors import OutOfMemoryError
from torchlssvm.events import Add, Remove
from torchlssvm.store import SampleStore

GRID = FixedPoint(limit=8.0)
BATCH = 1000
"""Rows made and learned at a time."""


def rows(n: int, J: int, K: int, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of samples; the same ones for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, n, BATCH):
        count = min(BATCH, n - start)
        x = torch.randn(count, J, generator=generator).clamp_(-7.9, 7.9)
        yield x, torch.arange(start, start + count) % K


def peak_megabytes() -> float:
    """The largest resident size of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


class Report:
    """Lines of a table: what was done, the seconds it took (by the clock, and of all processors), and the peak of the memory.

    On a busy machine, processor seconds are the better measure.
    """

    def __init__(self, title: str) -> None:
        print(f"\n{title}\n| | seconds | of processors | peak MB |\n|---|---|---|---|", flush=True)

    def time(self, what: str, work: Callable[[], Any]) -> Any:
        """Run one step and print its line."""
        start, used = time.perf_counter(), time.process_time()
        out = work()
        seconds, used = time.perf_counter() - start, time.process_time() - used
        print(f"| {what} | {seconds:.3g} | {used:.3g} | {peak_megabytes():,.0f} |", flush=True)
        return out


def features(J: int, n: int) -> None:
    """Learn n rows of J features, remove one, remove 1,000."""
    report = Report(f"{J:,} features, {n:,} rows streamed, 10 classes")
    head = LSSVMHead(J, 10, grid=GRID, rho=1.0)

    def learn() -> None:
        for x, y in rows(n, J, 10):
            head.add(x, y)

    x, y = next(rows(n, J, 10))
    bare = peak_megabytes()
    report.time("learn", learn)
    report.time("solve, read w", lambda: head.w)
    report.time("remove one, read w", lambda: head.remove(x[:1], y[:1]).w)
    report.time("remove 1,000, read w", lambda: head.remove(x[1:], y[1:]).w)
    report.time("digest", head.digest)
    packed, square = 8 * J * (J + 1) / 2e6, 8 * J * J / 1e6
    print(
        f"packed statistics {packed:,.0f} MB + one square matrix {square:,.0f} MB; peak {peak_megabytes():,.0f} MB, "
        f"{peak_megabytes() / (packed + square):.2f} times that ({bare:,.0f} MB before the first row)",
        flush=True,
    )


def classes(J: int, K: int, n: int) -> None:
    """Learn many classes, one against the rest, and measure the cost of sums per class."""
    report = Report(f"{K:,} classes, {J:,} features, {n:,} rows")
    head = LSSVMHead(J, K, grid=GRID, rho=1.0)

    def learn() -> None:
        for x, y in rows(n, J, K):
            head.add(x, y)

    x, y = next(rows(n, J, K))
    report.time("learn", learn)
    report.time("solve, read w", lambda: head.w)
    report.time("remove one, read w", lambda: head.remove(x[:1], y[:1]).w)
    report.time("scores of 1,000", lambda: head(x))
    each = 8 * head.statistics.packed_length("labels") / 1e6
    own = 8 * LSSVMHead(J, K, grid=GRID, per_class=True, rho=1.0).statistics.packed_length("labels") / 1e6
    print(f"sums: {each:,.0f} MB in all; with per_class=True {own:,.1f} MB for each class, {K * own:,.0f} MB in all")
    if K * own > 8000:
        try:
            LSSVMHead(J, K, grid=GRID, per_class=True, rho=1.0).add(
                torch.zeros(K, J), torch.arange(K)
            )  # refused before anything is allocated, or it fits
        except OutOfMemoryError as error:
            print(f"  OutOfMemoryError: {error}", flush=True)


def stored(J: int, n: int, folder: Path) -> None:
    """Open, erase one sample, compact and verify a store with n rows."""
    report = Report(f"{n:,} rows of {J:,} features in a store")
    path = folder / "store"

    def fill() -> None:
        with SampleStore(path, head=LSSVMHead(J, 10, grid=GRID, rho=1.0)) as store:
            for i, (x, y) in enumerate(rows(n, J, 10)):
                ids = [str(k) for k in range(i * BATCH, i * BATCH + len(x))]
                store.apply(Add(ids=ids, x=x, y=y, subject=[f"u{k}" for k in ids]))

    report.time("fill", fill)
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    print(f"| size on disk {size / 1e6:,.0f} MB, {size / n:,.0f} bytes a row | | | |")
    store = report.time("open", lambda: SampleStore(path))
    event = Remove(ids=["5"])
    report.time("erase one", lambda: store.apply(event))
    report.time("read w", lambda: store.head.w)
    report.time("erase another", lambda: store.apply(Remove(ids=["6"])))
    report.time("compact", store.compact)
    certificate = report.time("certificate", lambda: store.certificate(event.event_id))
    report.time("verify", lambda: verify(certificate, store=store, allow_unsigned=True))
    store.close()


def alone(work: Callable[..., None], *arguments: Any) -> None:
    """Run a part in a separate process."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"a part ended with exit code {process.exitcode}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["features", "classes", "rows", "all"])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--folder", type=Path, default=None, help="folder for the store (default: a temporary folder)")
    o = parser.parse_args(argv)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s)")
    if o.part in ("features", "all"):
        for J, n in ((200, 2500), (400, 2500)) if o.small else ((2500, 50_000), (5000, 50_000), (10_000, 50_000)):
            alone(features, J, n)
    if o.part in ("classes", "all"):
        for K in (10, 50) if o.small else (100, 1000, 10_000):
            alone(classes, *((64, K, 2000) if o.small else (1024, K, 50_000)))
    if o.part in ("rows", "all"):
        for n in (1000, 4000) if o.small else (250_000, 1_000_000):
            folder = Path(tempfile.mkdtemp(dir=o.folder))
            try:
                alone(stored, 16 if o.small else 256, n, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
