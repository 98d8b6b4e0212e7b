"""A disk that is full, a folder that is gone: nothing is acknowledged, nothing is lost, and no event is blamed for it."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.faults import replaced
from tests.support.store_file import relearned
from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.corrections.corrector import Corrector
from torchlssvm.corrections.seen_samples import SeenSamples
from torchlssvm.errors import StoreDiskError, StoreError
from torchlssvm.events import Add, Event, Relabel, Remove
from torchlssvm.store import SampleStore
from torchlssvm.store.database import Database

J, K = 64, 3
GRID = FixedPoint(8.0)


def add(i: int, n: int = 20) -> Add:
    x = torch.randn(n, J, generator=torch.Generator().manual_seed(i))
    return Add(ids=[f"{i}-{k}" for k in range(n)], x=x, y=torch.arange(n) % K, subject=f"s{i}", event_id=f"e{i}")


class Disk:
    """A folder whose room can be taken away and given back."""

    def __init__(self, path: Path):
        self.path = path

    def fill(self) -> None:
        """Leave not a byte."""
        with open(self.path / "ballast", "ab", buffering=0) as file:
            for size in (65536, 4096, 512, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue

    def empty(self) -> None:
        (self.path / "ballast").unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A real file system of two megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.name != "posix" or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs to mount a small file system")
    yield Disk(place)
    subprocess.run(["umount", "-l", str(place)], check=True)


def limited(store: SampleStore, pages: int) -> None:
    """Let SQLite say that the disk is full."""
    store._db.connection.execute(f"PRAGMA max_page_count = {pages}")


# -- full --------------------------------------------------------------------------------------------------------------


def test_a_full_disk_acknowledges_nothing(disk: Disk) -> None:
    with SampleStore(disk.path / "s", head=LSSVMHead(J, K, grid=GRID)) as store:
        store.apply(add(0))
        before = store.head.digest()
        disk.fill()
        refused = ""
        for i in range(1, 30):  # the log has some room of its own
            try:
                store.apply([add(i), Relabel(ids=["0-0"], y=[i % K])])
            except StoreDiskError as error:
                refused = str(error)
                break
        assert "samples.sqlite" in refused
        assert store.head.digest() == relearned(store).digest()
        assert store.position == 1 + 2 * (i - 1)
        with pytest.raises(StoreDiskError):
            store.apply(add(i, 200))
        assert store.head.digest() == relearned(store).digest()
        assert i > 1 or store.head.digest() == before
        disk.empty()
        assert store.apply(add(i)).applied
        assert store.head.digest() == relearned(store).digest()
        assert store.recompute() == (len(store), store.head.digest())


def test_a_corrector_blames_no_event_for_the_disk(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "s", head=LSSVMHead(J, K, grid=GRID))
    store.apply(add(0))
    corrector = Corrector(store.head, store)
    given: list[Event] = [Remove(ids=["nobody"], event_id="bad"), *(add(i, 300) for i in range(1, 4))]
    limited(store, 30)
    with pytest.raises(StoreDiskError, match="full"):
        corrector.apply(given)
    assert store.head.digest() == relearned(store).digest()
    limited(store, 1 << 20)
    assert [o.status for o in corrector.apply(given)] == ["refused", "applied", "applied", "applied"]
    assert len(store) == 920
    assert store.head.digest() == relearned(store).digest()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        corrector.apply([Remove(subject="s1")])


@pytest.mark.parametrize("first", [True, False])
def test_ids_that_cannot_be_noted_on_a_full_disk_are_noted_later(tmp_path: Path, first: bool) -> None:
    store = SampleStore(tmp_path / "s", head=LSSVMHead(J, K, grid=FixedPoint(8.0)))
    seen = SeenSamples(store)
    if not first:
        seen.record(["early"])
    with files_up_to(200), pytest.raises(StoreDiskError, match="offered"):
        seen.record(map(str, range(100)))
    assert "7" not in seen
    seen.record(["late"])
    again = SeenSamples(store)
    assert ("early" in again, "7" in again, "late" in again) == (not first, False, True)
    store.close()


def test_closing_on_a_full_disk_says_so_and_loses_nothing_else(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    store = SampleStore(disk.path / "s", head=LSSVMHead(J, K, grid=GRID))
    for i in range(4):
        store.apply(add(i))
    digest = store.head.digest()
    disk.fill()
    store.close()  # the snapshot only saves time
    assert "closed without a snapshot" in caplog.text
    assert not list((disk.path / "s").glob("*.tmp"))
    disk.empty()
    with SampleStore(disk.path / "s") as again:
        assert (again.head.digest(), len(again)) == (digest, 80)
        assert again.head.digest() == relearned(again).digest()


def test_options_that_cannot_be_kept_are_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = SampleStore(tmp_path / "s", head=LSSVMHead(J, K, grid=GRID, rho=1.0))
    store.apply(add(0))
    digest = store.head.digest()
    store.head.rho = 0.5
    store._db.connection.execute("PRAGMA query_only = ON")  # as on a disk that has become read-only
    with pytest.raises(StoreDiskError, match="every event is kept, but not the options"):
        store.close()
    assert store.closed
    store.close()
    with SampleStore(tmp_path / "s") as again:
        assert (again.head.rho, again.head.digest()) == (1.0, digest)


# -- gone --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced", "log deleted"])
def test_a_folder_that_is_gone_acknowledges_nothing(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="torchlssvm.store")
    path = tmp_path / "s"
    store = SampleStore(path, head=LSSVMHead(J, K, grid=GRID))
    store.apply(add(0))
    shutil.copytree(path, tmp_path / "backup")
    receipt = store.apply(Remove(ids=["0-0"]))
    if how == "log deleted":
        (path / "samples.sqlite-wal").unlink()
    elif how == "deleted":
        shutil.rmtree(path)
    else:
        path.rename(tmp_path / "elsewhere")
    if how == "replaced":
        (tmp_path / "backup").rename(path)
    for write in (
        lambda: store.apply(add(1)),
        lambda: store.apply(add(2)),
        lambda: store.certificate(receipt.event_id),
        lambda: store.compact(),
        lambda: store.set_note("a", 1),
        lambda: Corrector(store.head, store).apply([add(3)]),
    ):
        with pytest.raises(StoreError, match="was deleted, moved or replaced"):
            write()
    store.close()
    if how == "moved":
        with SampleStore(tmp_path / "elsewhere") as again:
            assert (again.position, len(again)) == (2, 19)
            assert again.head.digest() == relearned(again).digest()


def test_a_folder_that_goes_while_an_event_is_written(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "s", head=LSSVMHead(J, K, grid=GRID))
    store.apply(add(0))

    def losing_the_folder(real: Any) -> Any:
        def run(db: Database, sql: str, *values: object) -> None:
            real(db, sql, *values)
            if sql == "COMMIT":
                shutil.rmtree(tmp_path / "s")

        return run

    lost = replaced(Database, "run", losing_the_folder)
    with lost, pytest.raises(StoreError, match="was deleted, moved or replaced"):
        store.apply(add(1))
    store.close()


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Let every write beyond a size fail, as on a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_backup_that_fails_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    with SampleStore(tmp_path / "store", head=LSSVMHead(J, K, grid=GRID)) as store:
        store.apply(add(0, 2000))
        with files_up_to(100_000), pytest.raises(StoreDiskError, match="copy"):
            store.backup(tmp_path / "copy")
        assert not (tmp_path / "copy").exists()
        store.backup(tmp_path / "copy")
    with files_up_to(100_000), pytest.raises(StoreDiskError, match="again"):
        SampleStore.from_backup(tmp_path / "copy", tmp_path / "again")
    assert not (tmp_path / "again").exists()
    SampleStore.from_backup(tmp_path / "copy", tmp_path / "again")
    with SampleStore(tmp_path / "again") as store:
        assert len(store) == 2000


def test_a_hard_link_that_cannot_be_copied_leaves_nothing(tmp_path: Path) -> None:
    with SampleStore(tmp_path / "store", head=LSSVMHead(J, K, grid=GRID)) as store:
        store.apply(add(0, 200))
    before = sorted(p.name for p in store.path.iterdir())
    shutil.copytree(store.path, tmp_path / "linked", copy_function=os.link)
    with files_up_to(8192), pytest.raises(StoreDiskError, match="hard link"):
        SampleStore(store.path)
    assert sorted(p.name for p in store.path.iterdir()) == before
    with SampleStore(store.path) as store:
        assert len(store) == 200
