"""Threads are chosen by the work, and sums do not depend on them."""

import signal
import threading
import time

import numpy as np
import pytest
import torch

from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.functional.threads import SMALL_WORK, share_out, threads_for
from torchlssvm.statistics.accumulator import SHARED_RUNS

CPU = torch.device("cpu")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_small_work_has_one_thread_and_large_work_all(two_threads):
    with threads_for(SMALL_WORK - 1):
        assert torch.get_num_threads() == 1
        with threads_for(SMALL_WORK):
            assert torch.get_num_threads() == 2
            with threads_for(0):
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with pytest.raises(KeyError), threads_for(0), threads_for(SMALL_WORK):
        raise KeyError
    assert torch.get_num_threads() == 2


def test_items_are_done_once_and_errors_come_back(two_threads):
    done, names = [], set()

    def job(items):
        names.add(threading.get_ident())
        for item in items:
            assert torch.get_num_threads() == 1
            assert not torch.is_grad_enabled()
            done.append(item)

    with torch.no_grad():
        share_out(job, range(200), CPU)
    assert sorted(done) == list(range(200))
    assert torch.get_num_threads() == 2

    def fails(items):
        for item in items:
            if item == 7:
                raise KeyError(item)

    for _ in range(3):
        with pytest.raises(KeyError), torch.no_grad():
            share_out(fails, range(50), CPU)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("options", [{}, {"folds": 2}])
def test_sums_do_not_depend_on_threads(options, two_threads):
    J, n = 300, 1024 * (SHARED_RUNS * 3) + 77
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, J, generator=generator).clamp(-7, 7), torch.arange(n) % 3
    weight = torch.arange(n) % 4
    ids = range(n) if "folds" in options else None
    digests = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        head = LSSVMHead(J, 3, grid=FixedPoint(8.0), **options)
        head.add(x, y, weight, ids)
        head.add(x[:50], y[:50], None, ids[:50] if ids else None)
        head.remove(x[100:8000], y[100:8000], weight[100:8000], ids[100:8000] if ids else None)
        digests.add(head.digest())
    assert len(digests) == 1
    q = np.rint(x.numpy().astype(np.float64) / head.grid.resolution).astype(np.int64)
    times = weight.clone()
    times[:50] += 1
    times[100:8000] = 0
    exact = (q * times.numpy()[:, None]).T[:5] @ q  # integers of NumPy
    M = head.statistics.M.sum(0) if head.statistics.per_class else head.statistics.M
    assert np.array_equal(M[:5, :J].numpy(), exact)


def test_large_values_are_carried_before_they_round(two_threads):
    """Rows at the end of the grid: each thread's float64 sums are full after a few products."""
    J, n = 400, 6000
    x, y = torch.full((n, J), 8.0), torch.arange(n) % 2
    x[::2] = -8.0 + 2.0**-17
    head = LSSVMHead(J, 2, grid=FixedPoint(8.0, bits=24)).add(x, y)
    q = [round(v / head.grid.resolution) for v in (-8.0 + 2.0**-17, 8.0)]
    assert int(head.statistics.M[0, 0]) == n // 2 * (q[0] ** 2 + q[1] ** 2)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer that interrupts")
def test_an_interrupt_does_not_leave_threads_behind_that_still_write(two_threads):
    main, started, written = threading.get_ident(), threading.Event(), []

    def job(items):
        for i in items:
            if threading.get_ident() != main:
                started.set()
                time.sleep(0.5)
                written.append(i)
            elif started.wait(10):
                signal.setitimer(signal.ITIMER_REAL, 0.1)  # this thread is waiting for the other one by then

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            share_out(job, range(5), CPU)
        at_return = list(written)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    time.sleep(0.6)
    assert written == at_return
    assert len(written) == 1
