"""Readers beside a writer see one state, and a store that cannot be written can be read all the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from torchlssvm import FixedPoint, LSSVMHead, verify
from torchlssvm.cli import main
from torchlssvm.errors import StoreBusyError, StoreDiskError, StoreError
from torchlssvm.events import Add, Remove
from torchlssvm.store import SampleStore

J, K, N = 5, 3, 24


def filled(path: Path) -> tuple[SampleStore, str]:
    """A store with an erasure, and the certificate of it."""
    x = torch.randn(N, J, generator=torch.Generator().manual_seed(0))
    store = SampleStore(path, head=LSSVMHead(J, K, grid=FixedPoint(8.0)))
    store.apply(Add(ids=range(N), x=x, y=torch.arange(N) % K, subject=[f"user-{i % 4}" for i in range(N)]))
    receipt = store.apply(Remove(subject="user-1"))
    return store, store.certificate(receipt.event_id).to_json()


@contextmanager
def writer(path: Path) -> Iterator[None]:
    """Another process that adds, removes, compacts, closes and opens the store all the time."""
    script = Path(__file__).parents[1] / "support" / "store_writer.py"
    process = subprocess.Popen([sys.executable, str(script), str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield
        (path.parent / "stop").touch()
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert int(out) > 10  # it did work meanwhile
    finally:
        process.kill()


def read_beside_a_writer(path: Path, openings: int, verifications: int) -> list[str]:
    """Open, read and verify a new store while another process changes it; returns the alarms."""
    store, certificate = filled(path)
    store.close()
    alarms, positions = [], set()
    with writer(path):
        kept = SampleStore(path, readonly=True)
        for i in range(openings):
            try:
                with SampleStore(path, readonly=i % 8 != 0) as reader:
                    positions.add(reader.position)
                    if i % 5 == 0:
                        with reader.view():
                            assert (len(reader), reader.head.digest()) == reader.recompute()
                            assert len(reader.history()) == reader.position
                            assert sum(reader.subjects().values()) <= len(reader)
                    if i % 7 == 0:
                        reader.stats()
                    if i * verifications // openings != (i + 1) * verifications // openings:
                        which = kept if i % 2 else reader
                        assert verify(certificate, head=which.head, store=which, allow_unsigned=True)
            except Exception as error:
                alarms.append(repr(error))
        kept.close()
    assert len(positions) > openings // 50  # the store did change
    return alarms


@pytest.mark.parametrize(
    "stores", [1, pytest.param(67, marks=pytest.mark.slow)]
)  # 67: 10,050 openings, 2,010 times verified
def test_no_false_alarm_beside_a_writer(tmp_path: Path, stores: int) -> None:
    alarms = []
    for i in range(stores):
        (tmp_path / str(i)).mkdir()
        openings = 60 if stores == 1 else 150
        alarms += read_beside_a_writer(tmp_path / str(i) / "store", openings, verifications=openings // 5)
    assert alarms == [], f"{len(alarms)} false alarms, e.g. {alarms[0]}"


# -- a folder that cannot be written -----------------------------------------------------------------------------------


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """The folder under another name where nothing can be written, not even by root."""
    if os.geteuid():
        for path in (*folder.iterdir(), folder):
            path.chmod(0o500 if path.is_dir() else 0o400)
        yield folder
        folder.chmod(0o700)
        return
    place = folder.with_name(folder.name + "-read-only")
    place.mkdir()
    if subprocess.run(["mount", "--bind", "-o", "ro", str(folder), str(place)], capture_output=True).returncode:
        pytest.skip("needs to mount a folder read-only, since root can write everywhere else")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("log", [False, True])
def test_a_copy_that_cannot_be_written_is_read_unless_it_has_a_log(
    tmp_path: Path, log: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    store, certificate = filled(tmp_path / "store")
    (tmp_path / "c.json").write_text(certificate)
    if not log:
        store.close()
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    store.close()
    before = {p.name: p.read_bytes() for p in (tmp_path / "copy").iterdir() if p.suffix != ".sqlite-shm"}
    assert ("samples.sqlite-wal" in before) == log
    if log:
        (tmp_path / "copy" / "samples.sqlite-shm").unlink()
    with read_only(tmp_path / "copy") as folder:
        if log:
            with pytest.raises(StoreDiskError, match="its log is not empty"):
                SampleStore(folder, readonly=True)
            return
        assert main(["verify", str(tmp_path / "c.json"), "--store", str(folder), "--allow-unsigned"]) == 0
        assert capsys.readouterr().err == ""
        with SampleStore(folder, readonly=True) as reader, SampleStore(folder, readonly=True):
            assert (18, reader.head.digest()) == reader.recompute()
            assert len(reader.dataset()) == 18
            with pytest.raises(StoreError, match="reading only"):
                reader.apply(Remove(ids=["0"]))
        with pytest.raises(StoreDiskError, match=r"samples\.sqlite"), SampleStore(folder) as store:
            store.apply(Remove(ids=["0"]))
    assert {p.name: p.read_bytes() for p in (tmp_path / "copy").iterdir()} == before


def test_a_file_that_cannot_be_locked_and_changes_is_not_believed(tmp_path: Path) -> None:
    store, _ = filled(tmp_path / "store")
    store.close()
    with read_only(tmp_path / "store") as folder:
        if folder == tmp_path / "store":
            pytest.skip("needs a second way to the folder, which only root can make")
        with SampleStore(folder, readonly=True) as reader:
            assert len(reader) == 18
            with SampleStore(tmp_path / "store") as other:
                other.apply(Remove(subject="user-2"))
            with pytest.raises(StoreBusyError, match="was changed while it was read"):
                reader.recompute()
        with SampleStore(folder, readonly=True) as reader:
            assert reader.recompute()[0] == 12
