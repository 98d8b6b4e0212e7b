"""One state at a time: threads wait for each other, and an interrupted update is either undone or refused."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.support.faults import Failing, replaced
from torchlssvm import FixedPoint, LSSVMHead, MarginHead, TorchLSSVMError
from torchlssvm.errors import InterruptedUpdateError
from torchlssvm.functional import gram
from torchlssvm.linear import normal_equations as normal
from torchlssvm.linear import solvers
from torchlssvm.linear.solution import Solution
from torchlssvm.statistics.accumulator import Accumulator, FloatSums

J, K = 24, 3
GRID = FixedPoint(8.0)
generator = torch.Generator().manual_seed(4)
X = torch.randn(900, J, generator=generator).clamp(-4, 4)
Y = torch.arange(900) % K


def head(**options: Any) -> LSSVMHead:
    return LSSVMHead(J, K, **({"grid": GRID, "rho": 1.0} | options))


def run_threads(*jobs: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def change_from_four_threads(seed: int) -> None:
    """Three threads add and remove shares of their own, one reads all the time."""
    h = head().add(X[:300], Y[:300])
    done = threading.Event()

    def work(part: int) -> Callable[[], None]:
        def job() -> None:
            mine = range(300 + part * 200, 500 + part * 200, 7 + seed % 5)
            for i in mine:
                h.add(X[i : i + 3], Y[i : i + 3])
                h.remove(X[i : i + 1], Y[i : i + 1])
                h.relabel(X[i + 1 : i + 2], Y[i + 1 : i + 2], (Y[i + 1 : i + 2] + 1) % K)

        return job

    def read() -> None:
        while not done.is_set():
            assert h(X[:4]).isfinite().all()
            h.digest()
            _ = h.P

    reader = threading.Thread(target=read)
    reader.start()
    try:
        run_threads(*(work(part) for part in range(3)))
    finally:
        done.set()
        reader.join(60)
    expected = head().add(X[:300], Y[:300])
    for part in range(3):
        for i in range(300 + part * 200, 500 + part * 200, 7 + seed % 5):
            expected.add(X[i + 2 : i + 3], Y[i + 2 : i + 3]).add(X[i + 1 : i + 2], (Y[i + 1 : i + 2] + 1) % K)
    assert h.digest() == expected.digest()
    torch.testing.assert_close(h.w, expected.w, rtol=0, atol=1e-10)


def test_threads() -> None:
    for seed in range(3):
        change_from_four_threads(seed)


@pytest.mark.slow
def test_a_hundred_runs_of_four_threads() -> None:
    for seed in range(100):
        change_from_four_threads(seed)


def reloaded(h: Any, make: Callable[[], Any]) -> Any:
    loaded = make()
    loaded.load_state_dict(h.state_dict())
    return loaded


COPIES: dict[str, Callable[[Any, Callable[[], Any]], Any]] = {
    "checkpoint": reloaded,
    "pickle": lambda h, make: pickle.loads(pickle.dumps(h)),
    "deepcopy": lambda h, make: copy.deepcopy(h),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", [LSSVMHead, MarginHead])
def test_a_copy_made_beside_a_writer_is_of_one_state(kind: Any, way: str) -> None:
    def make() -> Any:
        return kind(J, K, grid=GRID, rho=1.0)

    h, done = make().add(X[:300], Y[:300]), threading.Event()
    digests = [make().add(X[: 300 + i], Y[: 300 + i]).digest() for i in range(6)]

    def write() -> None:
        while not done.is_set():
            for i in range(300, 305):
                h.add(X[i : i + 1], Y[i : i + 1])
            h.remove(X[300:305], Y[300:305])

    def save() -> None:
        try:
            for _ in range(30 if kind is LSSVMHead else 8):
                copied = COPIES[way](h, make)
                w = copied.w.clone()
                torch.testing.assert_close(w, copied.refresh().w, rtol=0, atol=1e-9)
                assert copied.digest() == digests[int(copied.n) - 300]
                copied.remove(X[:300], Y[:300])  # the rows are those of the sums
                assert copied.n <= 5
        finally:
            done.set()

    run_threads(write, save)
    h.add(X[310:311], Y[310:311])  # the head itself is whole


def test_readers_of_a_clean_head_do_not_wait() -> None:
    h = head().add(X, Y)
    expected = h(X[:5])
    with h._lock:
        run_threads(lambda: torch.testing.assert_close(h(X[:5]), expected))


def test_two_threads_that_merge_crosswise_end() -> None:
    a, b = head().add(X[:5], Y[:5]), head().add(X[5:9], Y[5:9])
    run_threads(lambda: a.merge(b) and None, lambda: b.merge(a) and None)
    assert {a.n, b.n} in ({9, 13}, {9, 14}, {14, 13})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_a_lock_of_its_own() -> None:
    code = """
import os, threading, torch
from torchlssvm import LSSVMHead
head = LSSVMHead(4, 2, rho=1.0).add(torch.randn(9, 4), torch.arange(9) % 2)
held, leave = threading.Event(), threading.Event()
def hold():
    with head._lock:
        held.set(); leave.wait()
thread = threading.Thread(target=hold); thread.start(); held.wait()
child = os.fork()
if not child:
    head.digest(); os._exit(0)
code = os.waitpid(child, 0)[1]; leave.set(); thread.join(); raise SystemExit(code)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_copies_have_locks_of_their_own() -> None:
    h = head().add(X[:9], Y[:9])
    with h._lock:
        for other in (copy.deepcopy(h), pickle.loads(pickle.dumps(h))):
            run_threads(lambda other=other: other.add(X[9:], Y[9:]) and None)


# -- interruptions -----------------------------------------------------------------------------------------------------------

CALLS: list[tuple[Any, str]] = [
    (gram, "accumulate_"), (gram, "carry_"), (gram, "lower_bytes"),
    *((Accumulator, name) for name in ("append", "push", "flush", "move_side")),
    *((FloatSums, name) for name in ("add", "open", "carry")),
    *((Solution, name) for name in ("append", "take_in", "set_base", "inverse", "_defer", "shift_targets")),
    (normal, "fill_system"), (normal, "factor_"),
    (solvers.SharedSolver, "changed"), (solvers.SharedSolver, "solve"),
]  # fmt: skip

OPERATIONS: dict[str, Callable[[LSSVMHead], Any]] = {
    "add one": lambda h: h.add(X[600:601], Y[600:601]),
    "add many": lambda h: h.add(X[600:], Y[600:]),
    "remove one": lambda h: h.remove(X[:1], Y[:1]),
    "remove many": lambda h: h.remove(X[:290], Y[:290]),
    "relabel": lambda h: h.relabel(X[:2], Y[:2], (Y[:2] + 1) % K),
    "update": lambda h: h.update(add=(X[600:603], Y[600:603]), remove=(X[:2], Y[:2])),
    "merge": lambda h: h.merge(head(per_class=h.statistics.per_class).add(X[600:700], Y[600:700])),
    "rho": lambda h: setattr(h, "rho", 2.0),
    "read": lambda h: h.P,
    "digest": lambda h: h.digest(),
    "state_dict": lambda h: h.state_dict(),
}


def prepare(options: dict[str, Any], unread: bool) -> LSSVMHead:
    """A head with 600 samples; ``unread``: some of them wait to be summed and taken in."""
    h = head(**options).add(X[:300], Y[:300])
    _ = h.w, h.digest()
    h.add(X[300:598], Y[300:598])
    if not unread:
        _ = h.w
    return h.add(X[598:600], Y[598:600])


class Planted(BaseException):
    """As KeyboardInterrupt: no handler of Exception catches it."""


def outcome(h: LSSVMHead, before: LSSVMHead, after: LSSVMHead) -> str:
    """The state is that before, that after, or every use is refused; anything else fails."""
    try:
        w = h.w
    except InterruptedUpdateError:
        for use in (lambda: h(X[:1]), lambda: h.add(X[:1], Y[:1]), lambda: h.state_dict(), lambda: pickle.dumps(h)):
            with pytest.raises(TorchLSSVMError):
                use()
        with pytest.raises(InterruptedUpdateError):
            h.digest()
        h.load_state_dict(before.state_dict())
        torch.testing.assert_close(h.w, before.w, rtol=0, atol=1e-9)
        return "refused"
    for name, other in (("before", before), ("after", after)):
        if h.digest() == other.digest() and h.rho == other.rho and torch.allclose(w, other.w, rtol=0, atol=1e-9):
            torch.testing.assert_close(h.P, other.P, rtol=0, atol=1e-8)
            return name
    raise AssertionError("the state is neither that before nor that after, and it is not refused")


@pytest.mark.parametrize("unread", [False, True], ids=["read", "unread"])
@pytest.mark.parametrize("options", [{}, {"per_class": True}], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_exception_at_every_accumulating_call(operation: str, options: dict[str, Any], unread: bool) -> None:
    """Planted before and after the first and the second call of each function that the operation calls."""
    before, after = prepare(options, unread), prepare(options, unread)
    counters = [Failing(Planted(), at=0) for _ in CALLS]  # never: they count
    with ExitStack() as stack:
        for (owner, name), counter in zip(CALLS, counters, strict=True):
            stack.enter_context(replaced(owner, name, counter))
        OPERATIONS[operation](after)
    for (owner, name), counter in zip(CALLS, counters, strict=True):
        for nth, late in [(n, late) for n in range(1, min(2, counter.calls) + 1) for late in (False, True)]:
            h = prepare(options, unread)
            with replaced(owner, name, Failing(Planted(), nth, late)), pytest.raises(Planted):
                OPERATIONS[operation](h)
            outcome(h, before, after)


SIGNALS = """
import signal, sys, time, random, torch, threading, os, copy
from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.errors import InterruptedUpdateError
torch.set_num_threads(1)
seed, times = int(sys.argv[1]), int(sys.argv[2])
rng = random.Random(seed)
generator = torch.Generator().manual_seed(seed)
J, K = 48, 3
X = torch.randn(3000, J, generator=generator).clamp(-4, 4); Y = torch.arange(3000) % K
base = LSSVMHead(J, K, grid=FixedPoint(8.0), rho=1.0).add(X[:1500], Y[:1500])
counts = {"before": 0, "after": 0, "refused": 0}
for round in range(times):
    head = copy.deepcopy(base); head.w
    kind = rng.randrange(4)
    change = [lambda h: h.add(X[1500:], Y[1500:]), lambda h: h.remove(X[:1200], Y[:1200]),
              lambda h: [h.remove(X[i:i + 1], Y[i:i + 1]) for i in range(8)], lambda h: (h.add(X[1500:1600], Y[1500:1600]), h.P)][kind]
    after = copy.deepcopy(base); change(after)
    parts = {base.digest(), after.digest()}
    if kind == 2:
        step = copy.deepcopy(base)
        for i in range(8):
            parts.add(step.remove(X[i:i + 1], Y[i:i + 1]).digest())
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.random() * 0.004 + 1e-5)
        change(head)
        time.sleep(0.01)
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        digest = head.digest()
    except InterruptedUpdateError:
        counts["refused"] += 1
        continue
    assert digest in parts, round
    counts["before" if digest == base.digest() else "after"] += 1
    fresh = copy.deepcopy(head).refresh()
    assert torch.allclose(head.w, fresh.w, rtol=0, atol=1e-9), round
print(counts)
"""


def run_signals(seed: int, times: int) -> str:
    prelude = "import signal\nsignal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + SIGNALS, str(seed), str(times)], capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
def test_signals() -> None:
    assert "refused" in run_signals(0, 60)


@pytest.mark.slow
def test_two_thousand_signals() -> None:
    print(run_signals(1, 2000))


# -- moving ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"multiclass": "ovo"}], ids=str)
def test_a_move_that_fails_leaves_the_head_where_it_was(options: dict[str, Any]) -> None:
    h, twin = (head(**options).add(X, Y) for _ in range(2))
    for device in ("meta", "cuda:7"):
        with pytest.raises((RuntimeError, AssertionError)):
            h.to(device)
        assert h.device.type == "cpu"
        torch.testing.assert_close(h(X[:5]), twin(X[:5]), rtol=0, atol=0)
    h.remove(X[:3], Y[:3])
    assert h.n == len(X) - 3


def test_a_move_that_runs_out_of_memory() -> None:
    h = head().add(X, Y)
    digest, w = h.digest(), h.w.clone()
    with replaced(type(h.statistics), "to", Failing(Planted())), pytest.raises((Planted, RuntimeError, AssertionError)):
        h.to("cuda")
    assert h.digest() == digest
    torch.testing.assert_close(h.w, w, rtol=0, atol=0)
