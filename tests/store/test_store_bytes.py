"""After a removal and a compaction, the files of a store are those of a store that never saw the sample, byte for byte.

Nonces, keys and times come from the test. What may differ is the record of the removal itself:

- the journal, which has two entries more: the sample's Add with a commitment whose nonce is gone, and its Remove;
- the position and chain hash of the journal's end: in the record "state", in the snapshot and its name, in "acknowledged";
- the record "compacted", which is such a position, and the name of the record with the key of the last position.
"""

from __future__ import annotations

import hashlib
import itertools
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from torchlssvm import FixedPoint, KernelLSSVM, LSSVMHead, MarginHead
from torchlssvm.events import Add, Relabel, Remove
from torchlssvm.kernels import RBF
from torchlssvm.store import SampleStore, journal, sample_table
from torchlssvm.untrusted import load_tensors

J, N = 5, 40
X, Y = torch.randn(N + 1, J, generator=torch.Generator().manual_seed(8)), torch.arange(N + 1) % 2
HEADS: dict[str, Callable[[], Any]] = {
    "LSSVMHead": lambda: LSSVMHead(J, 2, grid=FixedPoint(8.0)),
    "MarginHead": lambda: MarginHead(J, 2, grid=FixedPoint(8.0), rho=1.0),
    "KernelLSSVM": lambda: KernelLSSVM(RBF(sigma=2.0)),
}


@pytest.fixture
def secrets_of_the_test(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Start random numbers and times again."""

    def start() -> None:
        count = itertools.count()

        def nonces(size: int) -> bytes:
            """Random bytes that depend on the place of a call alone, so that each batch has its own."""
            return hashlib.shake_256(b"%d" % next(count)).digest(size)

        monkeypatch.setattr(sample_table.os, "urandom", nonces)
        monkeypatch.setattr(journal, "now", lambda: "2026-01-01T00:00:00.000000+00:00")
        monkeypatch.setattr("torchlssvm.store.sample_store.now", lambda: "2026-01-01T00:00:00.000000+00:00")
        monkeypatch.setattr(time, "time", lambda: 1.0e9)
        monkeypatch.setattr(journal.Journal, "commit", committed)

    def committed(self: journal.Journal, digest: str | None, position: int) -> bytes | None:
        if digest is not None:
            self.db.put(journal.opening_name(position), {"key": "00" * 32})
        return None if digest is None else bytes(32)

    return start


def store_of(path: Path, kind: str, guest: bool) -> None:
    """A store of N samples; with ``guest``, one more that is removed again."""
    with SampleStore(path, head=HEADS[kind]()) as store:
        store.apply(Add([f"s{i}" for i in range(20)], X[:20], Y[:20], [f"u{i // 4}" for i in range(20)]))
        store.apply(Add([f"s{i}" for i in range(20, N)], X[20:N], Y[20:N]))
        store.apply(Relabel(ids=["s3"], y=[0]))
        if guest:
            store.head.predict(X)
            store.apply(Add(["guest"], X[N:], Y[N:], "guest-subject"))
            store.head.predict(X)
            store.apply(Remove(subject="guest-subject"))
        store.compact()


def database_without_journal(path: Path, out: Path) -> tuple[bytes, set[str]]:
    """The bytes of the database without the fields that may differ, and the names of its records."""
    with closing(sqlite3.connect(path / "samples.sqlite")) as db:
        names = {name for (name,) in db.execute("SELECT name FROM meta")}
        db.execute("DELETE FROM journal")
        db.execute("DELETE FROM meta WHERE name IN ('state', 'compacted') OR name LIKE 'opening/%'")
        db.commit()
        db.execute("VACUUM INTO ?", (str(out),))
    return out.read_bytes(), {name.partition("/")[0] for name in names}


@pytest.mark.parametrize("kind", HEADS)
def test_the_files_are_those_of_a_store_that_never_saw_the_sample(
    tmp_path: Path, kind: str, secrets_of_the_test: Callable[[], None]
) -> None:
    folders = [tmp_path / "saw", tmp_path / "never"]
    for folder, guest in zip(folders, (True, False), strict=True):
        secrets_of_the_test()
        store_of(folder, kind, guest)
    saw, never = ({p.name: p for p in folder.iterdir()} for folder in folders)
    snapshots = [[p for name, p in sorted(files.items()) if name.endswith(".snapshot.pt")] for files in (saw, never)]
    assert len(snapshots[0]) == len(snapshots[1]) == (0 if kind == "KernelLSSVM" else 1)
    others = {"samples.sqlite", "acknowledged"}
    for files, mine in zip((saw, never), snapshots, strict=True):
        assert set(files) == others | {p.name for p in mine}
    for a, b in zip(*snapshots, strict=True):
        states = [load_tensors(path) for path in (a, b)]
        sums = [state.pop("statistics") for state in states]
        assert {name for name in states[0] if states[0][name] != states[1][name]} == {"position", "chain"}
        assert sums[0].keys() == sums[1].keys()
        for name, tensor in sums[0].items():
            assert tensor.dtype == sums[1][name].dtype
            assert torch.equal(tensor, sums[1][name]), name
        assert a.stat().st_size == b.stat().st_size
    (content, records), (expected, known) = (
        database_without_journal(folder, tmp_path / f"{folder.name}.sqlite") for folder in folders
    )
    assert records == known
    assert content == expected
