"""An exchange beside a thread that goes on adding: every change is handed over once, none is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchlssvm import FixedPoint, LSSVMHead, Statistics
from torchlssvm.distributed import Delta, agree, discard, merge, sync

J, K = 5, 3
X, Y = torch.randn(60, J, generator=torch.Generator().manual_seed(0)), torch.arange(60) % K
LATE = slice(50, 51)
"""The row that the other thread adds."""

WAIT_SECONDS = 0.3
"""Time for the other thread to get in between two steps, if nothing keeps it out."""


def head() -> LSSVMHead:
    return LSSVMHead(J, K, grid=FixedPoint(8.0), per_class=True, rho=1.0)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    store = torch.distributed.FileStore(str(tmp_path / "group"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def interleave(monkeypatch: pytest.MonkeyPatch, h: LSSVMHead, step: str, after: bool = False) -> threading.Thread:
    """Have another thread add a row to ``h`` before, or after, the next call of a step of the statistics."""
    original = getattr(Statistics, step)
    thread = threading.Thread(target=lambda: h.add(X[LATE], Y[LATE]))

    def wrapped(self: Statistics, *args: Any, **options: Any) -> Any:
        result = original(self, *args, **options) if after else None
        if thread.ident is None and self.num_classes == K:
            thread.start()
            thread.join(WAIT_SECONDS)
        return result if after else original(self, *args, **options)

    monkeypatch.setattr(Statistics, step, wrapped)
    return thread


EXCHANGES: dict[str, tuple[str, Callable[[LSSVMHead, Path], Any]]] = {
    "save": ("state", lambda h, path: Delta.take(h).save(path / "d")),
    "commit": ("compatible", lambda h, path: Delta.take(h).commit()),
    "merge": ("compatible", lambda h, path: merge(head(), Delta.take(h))),
    "agree": ("digest", lambda h, path: agree(h)),
    "sync": ("take_over", lambda h, path: sync(h)),
    "discard": ("take_over", lambda h, path: discard(h)),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_row_that_comes_during_an_exchange_is_pending_after_it(
    exchange: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step, run = EXCHANGES[exchange]
    h = agree(head().add(X[:20], Y[:20])).add(X[20:30], Y[20:30])
    thread = interleave(monkeypatch, h, step)
    run(h, tmp_path)
    thread.join()
    held = 20 if exchange == "discard" else 30
    assert h.digest() == head().add(X[:held], Y[:held]).add(X[LATE], Y[LATE]).digest()
    assert Delta.take(h).digest() == head().add(X[LATE], Y[LATE]).digest()
    assert h.remove(X[LATE], Y[LATE]).digest() == head().add(X[:held], Y[:held]).digest()


def test_a_delta_is_of_one_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums and rows of a delta are those of the same moment."""
    h = agree(head().add(X[:20], Y[:20])).add(X[20:30], Y[20:30])
    thread = interleave(monkeypatch, h, "copy", after=True)
    delta = Delta.take(h)
    thread.join()
    assert len(delta.rows) == delta.statistics.n == 10


def test_deltas_taken_beside_four_threads_hold_every_row_once() -> None:
    node, master = head(), head()
    start = threading.Barrier(5)

    def feed(part: int) -> None:
        start.wait()
        for i in range(part, 60, 4):
            node.add(X[i : i + 1], Y[i : i + 1], ids=[i])

    threads = [threading.Thread(target=feed, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    while any(thread.is_alive() for thread in threads):
        merge(master, Delta.take(node))
    merge(master, Delta.take(node))
    assert master.digest() == node.digest() == head().add(X, Y).digest()
    assert Delta.take(node).statistics.empty
