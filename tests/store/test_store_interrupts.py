"""Interrupted anywhere, a store has applied an event or not, and its head is what its rows give."""

from __future__ import annotations

import linecache
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import torchlssvm
from tests.support.store_file import relearned
from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.errors import StoreError
from torchlssvm.events import Add, Event, Relabel, Remove, Replace
from torchlssvm.store import SampleStore

J, K, N = 4, 3, 12
GRID = FixedPoint(8.0)
ROUNDS_PER_STORE = 40  # every check reads the whole journal, which should not grow for thousands of rounds
PACKAGE = os.path.dirname(torchlssvm.__file__)


class Line:
    """Raise an error before the n-th line of the package that runs inside; ``reached`` tells whether there was one.

    Lines with ``with`` or ``try`` alone are passed over: the interpreter runs nothing there, or the end of the block, where a
    tracer can keep a lock from being released and a signal cannot.
    """

    def __init__(self, n: int, error: type[BaseException]):
        self.left, self.error, self.reached = n, error, False

    def __enter__(self) -> Line:
        sys.settrace(self.trace)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def trace(self, frame: FrameType, what: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if what == "line" and not text.startswith(("with ", "try:")):
            self.left -= 1
            if self.left == 0:
                self.reached = True
                raise self.error("injected")
        return self.trace


def new_store(path: Path, **options: Any) -> SampleStore:
    x = torch.randn(N, J, generator=torch.Generator().manual_seed(0))
    store = SampleStore(path, head=LSSVMHead(J, K, **({"grid": GRID, "rho": 1.0} | options)))
    store.apply(Add(ids=range(N), x=x, y=torch.arange(N) % K, subject=[f"user-{i % 4}" for i in range(N)]))
    return store


def events(round_: int) -> list[Event]:
    x = torch.randn(3, J, generator=torch.Generator().manual_seed(round_))
    return [
        Add(ids=[f"a{round_}", f"b{round_}"], x=x[:2], y=[0, 1], subject="new"),
        Relabel(ids=["0", f"a{round_}"], y=[round_ % K, 2]),
        Replace(ids=["1"], x=x[2:], y=[round_ % K]),
        Remove(ids=[f"a{round_}", f"b{round_}"]),
    ]


def check(store: SampleStore, live: LSSVMHead) -> None:
    """Rows, head, journal and what the head answers agree; the head is the one it always was."""
    assert store.head is live
    fresh, x = relearned(store), torch.ones(2, J)
    assert live.n == fresh.n == len(store)
    assert live.counts.tolist() == fresh.counts.tolist()
    assert torch.allclose(live(x), fresh(x), atol=1e-8)
    if live.statistics.exact:
        assert live.digest() == fresh.digest()
    assert len(store.history()) == store.position


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError, ValueError])
@pytest.mark.parametrize("step", [311, pytest.param(1, marks=pytest.mark.slow)])
def test_an_error_at_every_line(tmp_path: Path, error: type[BaseException], step: int) -> None:
    n, stores, ended = 1 + 7 * len(error.__name__) % step, 0, False
    while not ended:
        path, stores = tmp_path / f"s{stores}", stores + 1
        store = new_store(path)
        for _ in range(ROUNDS_PER_STORE):
            ended = not fails_whole(store, n, error)
            if ended:
                break
            n += step
        store.close()
        with SampleStore(path) as opened:
            check(opened, opened.head)
    assert n > 800  # the errors did reach into the head and the files


def fails_whole(store: SampleStore, n: int, error: type[BaseException]) -> bool:
    """Raise an error at the n-th line of a list of events: all of it is applied, or nothing. False: there is no such line."""
    live, given, position, digest = store.head, events(n), store.position, relearned(store).digest()
    with Line(n, error) as line:
        try:
            receipts = store.apply(given)
        except (error, StoreError):  # a ValueError where a record is read is a damaged record
            receipts = []
    assert store.position in (position, position + 4), n
    assert not receipts or store.position == position + 4, n
    if store.position == position:
        assert relearned(store).digest() == digest, n
    check(store, live)
    again = store.apply(given)
    assert len({r.applied for r in again}) == 1, n
    assert store.position == position + 4
    check(store, live)
    return line.reached


@pytest.mark.parametrize("options", [{"grid": "auto"}, {"grid": None}, {"per_class": True, "folds": 0}], ids=str)
def test_an_error_with_every_kind_of_head(tmp_path: Path, options: dict[str, Any]) -> None:
    store = new_store(tmp_path / "s", **options)
    live = store.head
    for n in range(3, 1500, 131):
        given = events(n)
        with Line(n, KeyboardInterrupt), suppress(KeyboardInterrupt):
            store.apply(given)
        check(store, live)
        store.apply(given)
        check(store, live)
    store.close()


@pytest.mark.parametrize("use", ["head", "restore", "close", "compact", "preview", "calibrate", "open"])
@pytest.mark.parametrize("step", [151, pytest.param(3, marks=pytest.mark.slow)])
def test_an_error_in_whatever_else_a_store_does(tmp_path: Path, use: str, step: int) -> None:
    n, stores, reached = 1, 0, True
    while reached:  # how many lines a use has may grow with the journal
        path, stores = tmp_path / f"s{stores}", stores + 1
        with new_store(path) as store, SampleStore(path) as other:
            for _ in range(ROUNDS_PER_STORE):
                other.apply(Relabel(ids=["0"], y=[n % K]))  # the head has something to follow
                reached = goes_on(store, use, n)
                if not reached:
                    break
                n += step
    assert n > step


def goes_on(store: SampleStore, use: str, n: int) -> bool:
    """Interrupt a use of a store at its n-th line: the store goes on. False: there is no such line."""
    store = SampleStore(store.path) if store.closed else store
    with Line(n, KeyboardInterrupt) as line, suppress(KeyboardInterrupt):
        match use:
            case "head":
                store.head.predict(torch.ones(1, J))
            case "preview":
                store.preview(Remove(subject="user-1"), x=torch.ones(2, J))
            case "open":
                SampleStore(store.path).close()
            case _:
                getattr(store, use)()
    if use == "close":
        store.close()
        store = SampleStore(store.path)
    check(store, store.head)
    assert store.apply(Relabel(ids=["1"], y=[n % K])).applied
    check(store, store.head)
    if use == "close":
        store.close()
    return line.reached


@contextmanager
def signals(seconds: float) -> Iterator[None]:
    """One real SIGINT to this process after some time."""
    plain = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
        deadline = time.monotonic() + 5
        while timer.is_alive() and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(0.001)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, plain)


def timed(store: SampleStore, given: list[Event]) -> float:
    """The seconds it takes to apply these events."""
    start = time.monotonic()
    store.apply(given)
    return time.monotonic() - start


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals go to the main thread")
@pytest.mark.parametrize("count", [25, pytest.param(2000, marks=pytest.mark.slow)])
def test_real_signals(tmp_path: Path, count: int) -> None:
    rng, store, inside = random.Random(0), new_store(tmp_path / "s"), 0
    live, usual = store.head, min(timed(store, events(-1 - k)) for k in range(5))
    for n in range(10 * count):
        if n >= count and inside:
            break
        given, position, returned = events(n), store.position, False
        try:
            with signals(rng.uniform(0.0, usual)):
                store.apply(given)
                returned = True
        except KeyboardInterrupt:
            inside += not returned
        assert store.position in (position, position + 4)
        assert not returned or store.position == position + 4
        if not returned or n % 20 == 0:
            check(store, live)
            store.apply(given)
            assert store.position == position + 4
            check(store, live)
    assert inside  # some came while an event was applied
    store.close()
    with SampleStore(tmp_path / "s") as opened:
        check(opened, opened.head)
