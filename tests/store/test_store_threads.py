"""Threads share a store: they take turns, and rows and head agree whatever they do."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.store_file import relearned
from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.errors import NotFittedError, StoreError
from torchlssvm.events import Add, Relabel, Remove, Replace
from torchlssvm.store import SampleStore

J, K = 6, 3
GRID = FixedPoint(8.0)


def together(works: list[Callable[[], None]]) -> list[BaseException]:
    """Run functions in threads of their own; returns what they raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def guarded(work: Callable[[], None]) -> None:
        try:
            start.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def change(store: SampleStore, thread: int, rounds: int) -> None:
    """Add, relabel, replace and remove samples of its own; some events are refused on the way."""
    rng = random.Random(thread)
    x = torch.randn(rounds, J, generator=torch.Generator().manual_seed(thread))
    for i in range(rounds):
        name = f"{thread}-{i}"
        store.apply(Add(ids=[name, f"{name}-"], x=x[[i, i - 1]], y=[i % K, thread % K], subject=f"thread-{thread}"))
        if i % 3 == 1:
            with pytest.raises(ValueError, match="already"):
                store.apply([Relabel(ids=[name], y=[2]), Add(ids=[name], x=x[:1], y=[0])])
            store.apply([Relabel(ids=[name], y=[rng.randrange(K)]), Replace(ids=[f"{name}-"], x=x[:1])])
        if i % 4 == 3:
            store.apply(Remove(ids=[name]))


@pytest.mark.parametrize("runs", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_four_threads_change_a_store(tmp_path: Path, runs: int) -> None:
    for run in range(runs):
        with SampleStore(tmp_path / f"{run}", head=LSSVMHead(J, K, grid=GRID), snapshot_rows=9) as store:
            assert together([lambda t=t: change(store, t, 8) for t in range(4)]) == []
            assert (len(store), store.position) == (4 * (16 - 2), len(store.history()))
            assert store.head.digest() == relearned(store).digest()
            assert store.recompute() == (56, store.head.digest())
        with SampleStore(tmp_path / f"{run}") as again:
            assert again.head.digest() == relearned(again).digest()


@pytest.mark.parametrize("runs", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_threads_read_while_others_change(tmp_path: Path, runs: int) -> None:
    """Whoever has the store or its head sees states that were acknowledged, and none in between."""
    x = torch.randn(4, J, generator=torch.Generator().manual_seed(9))
    for run in range(runs):
        head = LSSVMHead(J, K, grid="auto")
        with SampleStore(tmp_path / f"{run}", head=head) as store:
            done = threading.Event()

            def write(thread: int, store: SampleStore = store, done: threading.Event = done) -> None:
                try:
                    change(store, thread, 6)
                    if thread == 0:
                        store.compact()
                finally:
                    if thread == 0:
                        done.set()

            def read(head: LSSVMHead = head, store: SampleStore = store, done: threading.Event = done) -> None:
                while not done.is_set():
                    with contextlib.suppress(NotFittedError):
                        assert head.predict(x).shape == store.head.predict(x).shape == (4,)
                    with store.view():
                        assert len(store) == store.head.n == sum(len(rows) for rows in store.batches(size=3))
                        assert len(store.history()) == store.position
                    for rows in store.batches(size=2):  # each batch of one state
                        assert rows.x.abs().max() < 8
                    store.preview(Add(ids=["trial"], x=torch.ones(1, J), y=[0]))

            assert together([lambda: write(0), lambda: write(1), read, read]) == []
            assert store.recompute() == (len(store), store.head.digest())
            assert torch.allclose(head.refresh().w, relearned(store).w, atol=1e-12)


def test_a_handle_is_closed_while_others_work(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "s", head=LSSVMHead(J, K, grid=GRID))
    added: list[str] = []
    refused: list[str] = []

    def work(thread: int) -> None:
        for i in range(200):
            name = f"{thread}-{i}"
            try:
                store.apply(Add(ids=[name], x=torch.ones(1, J), y=[0]))
            except StoreError as error:
                refused.append(str(error))
                return
            added.append(name)

    closer = threading.Timer(0.15, store.close)
    closer.start()
    assert together([lambda t=t: work(t) for t in range(3)]) == []
    closer.join()
    assert all("closed" in reason for reason in refused)
    with SampleStore(tmp_path / "s") as again:
        assert sorted(again.find()) == sorted(added)  # exactly what was acknowledged
        assert again.head.digest() == relearned(again).digest()
