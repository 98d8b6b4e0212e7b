"""Compare a durable store with bare SQLite inserts, with rebuilding the statistics, and with refitting.

    python recipes/benchmarks/store.py                    # 60,000 x 1280 features, about two minutes on two cores
    python recipes/benchmarks/store.py --samples 6000 --features 256

The features are random numbers with the distribution of a ReLU network's output. Each ratio compares two measurements of one
run, which take turns if possible.
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchlssvm import LSSVMHead, verify
from torchlssvm.events import Add, Remove
from torchlssvm.store import SampleStore
from torchlssvm.store.database import PRAGMAS

BATCH, CLASSES, SUBJECT = 1024, 10, 100


def seconds(job: Callable[[], Any]) -> float:
    """The time of one call."""
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


class Timed:
    """Adds up the time spent in some methods of an object."""

    def __init__(self, target: Any, names: tuple[str, ...]):
        self.total = 0.0
        for name in names:
            setattr(target, name, self.wrap(getattr(target, name)))

    def wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.total += time.perf_counter() - start

        return timed


def bare(path: Path) -> sqlite3.Connection:
    """The minimal alternative: a table of blobs with the same pragmas."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    for name, value in PRAGMAS.items():
        db.execute(f"PRAGMA {name} = {value}")
    db.execute("CREATE TABLE samples (seq INTEGER PRIMARY KEY, features BLOB)")
    return db


def ingest(folder: Path, x: torch.Tensor, y: torch.Tensor) -> SampleStore:
    """Fill the store and a bare table in turns, batch by batch."""
    n, J = x.shape
    store = SampleStore(folder / "store", head=LSSVMHead(J, CLASSES, rho=1.0), snapshot_rows=10**9)
    machine: Any = store.live.adapter
    head = Timed(machine, ("exchange", "digest", "note"))
    db = bare(folder / "bare.sqlite")
    ours, theirs = [], []
    for start in range(0, n, BATCH):
        rows = slice(start, min(n, start + BATCH))
        ids = [f"sample-{i}" for i in range(rows.start, rows.stop)]
        subjects = [f"user-{i // SUBJECT}" for i in range(rows.start, rows.stop)]
        head.total = 0.0
        time_ours = seconds(lambda: store.apply(Add(ids=ids, x=x[rows], y=y[rows], subject=subjects)))  # noqa: B023
        ours.append(time_ours - head.total)
        blobs = [(bytes(b),) for b in store.table.codec.encode(x[rows])]

        def plain() -> None:
            db.execute("BEGIN IMMEDIATE")
            db.executemany("INSERT INTO samples (features) VALUES (?)", blobs)  # noqa: B023
            db.execute("COMMIT")

        theirs.append(seconds(plain))
    db.close()
    raw = sum(len(b[0]) for b in blobs) / len(blobs) * n
    rate = [len(x) / sum(t) for t in (ours, theirs)]
    store._db.truncate_log()
    size = (folder / "store" / "samples.sqlite").stat().st_size
    print(f"ingest, head update excluded: {rate[0]:,.0f} samples/s, bare SQLite inserts {rate[1]:,.0f}/s")
    typical = statistics.median(theirs) / statistics.median(ours)
    print(f"  ratio of the speeds {rate[0] / rate[1]:.2f} (median batch {typical:.2f})          (target: >= 0.50)")
    print(f"file {size / 1e6:.0f} MB, raw gridded features {raw / 1e6:.0f} MB ({raw / n / J:.0f} bytes each)")
    print(f"  ratio {size / raw:.3f}          (target: <= 1.30)")
    return store


def erase(store: SampleStore, key: Any) -> None:
    """Compare a durable, certified erasure of 100 samples with rebuilding the statistics from the store."""
    config = store.head.config()
    rebuild = seconds(lambda: store.relearn(LSSVMHead.from_config(config)).digest())
    times = []
    for i in range(5):
        event = Remove(subject=f"user-{7 * i + 3}")

        def job(event: Remove = event) -> None:
            store.apply(event)
            store.certificate(event.event_id, key=key)

        times.append(seconds(job))
    once = statistics.median(times)
    print(f"erasing a subject of {SUBJECT}, durable and certified: {1e3 * once:.1f} ms (first {1e3 * times[0]:.1f} ms)")
    print(
        f"  rebuilding the statistics from the store: {rebuild:.2f} s, ratio {once / rebuild:.2%}          (target: < 3%)"
    )


def follow(store: SampleStore) -> None:
    """Compare two ways in which another process takes over an erasure: from published sums, and by summing the rows."""
    with SampleStore(store.path, readonly=True) as reader:
        head = reader.head
        times = []
        for i in range(3):
            store.apply(Remove(subject=f"user-{7 * i + 6}"))
            times.append(seconds(lambda: head.n))
        rebuild = seconds(lambda: reader.relearn(LSSVMHead.from_config(head.config())).digest())
    once = statistics.median(times)
    print(f"a reader follows an erasure at its next use: {1e3 * once:.0f} ms, summing the rows {1e3 * rebuild:.0f} ms")


def singles(store: SampleStore, x: torch.Tensor, y: torch.Tensor, count: int) -> None:
    """Compare single erasures, each durable, with refitting scikit-learn's ridge classifier."""
    from sklearn.linear_model import RidgeClassifier

    ids = store.find(subject="user-1")[:count]
    took = seconds(lambda: [store.apply(Remove(ids=[i])) for i in ids])
    weights = seconds(lambda: store.head.weight)
    X, Y = x.numpy(), y.numpy()
    refit = seconds(lambda: RidgeClassifier(solver="cholesky").fit(X, Y))
    rate = len(ids) / took
    print(
        f"single erasures, each durable: {rate:.0f} a second; bringing the weights up to date: {1e3 * weights:.0f} ms"
    )
    print(
        f"  refitting RidgeClassifier: {refit:.1f} s; one erasure with weights is {refit / (1 / rate + weights):.0f}x faster"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--features", type=int, default=1280)
    parser.add_argument("--folder", type=Path, help="where the store is made (default: a temporary folder)")
    options = parser.parse_args()
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key = Ed25519PrivateKey.generate()
    except ImportError:
        key = None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.samples, options.features, generator=generator).relu_()
    y = torch.randint(CLASSES, (options.samples,), generator=generator)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {options.samples} x {options.features}")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        store = ingest(Path(folder), x, y)
        erase(store, key)
        follow(store)
        singles(store, x, y, 50)
        event = Remove(subject="user-5")
        store.apply(event)
        took = seconds(store.compact)
        certificate = store.certificate(event.event_id, key=key)
        public = None if key is None else key.public_key()
        check = seconds(lambda: verify(certificate, store.head, store, public_key=public, allow_unsigned=key is None))
        print(f"compaction {took:.1f} s; verification with head and store (every row summed anew) {check:.1f} s")
        store.close()


if __name__ == "__main__":
    main()
