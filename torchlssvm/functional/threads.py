"""The choice of the number of threads: small computations run on one thread, large ones on as many as torch may use.

Small work runs faster on one thread if the machine is busy. A parallel loop in torch ends only when its last thread ends, and
if other processes keep the cores busy, that thread may wait milliseconds for a core, even if its work takes only microseconds.
The number of threads depends only on the shapes of the tensors, so the same computation always runs the same way.

``torch.set_num_threads`` sets the number for the calling thread, and for every thread that uses torch for the first time
afterwards. A thread that first uses torch while another thread is in :func:`threads_for` therefore starts with one torch
thread. Threads that have used torch before keep their number.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import TypeVar

import torch

T = TypeVar("T")

SMALL_WORK = 2**28
"""Floating point operations (about 10 ms of one core) below which work is small."""

PASS_WORK = 16
"""Work counted for each number that a memory-bound pass (a check, a conversion, a copy) reads, in floating point operations."""


_local = threading.local()  # full: the number of threads outside of small work, while inside of it


def threads_for(work: float) -> AbstractContextManager[None]:
    """Return a context in which torch uses one thread if the work is small, and all available threads otherwise.

    Pass the work in floating point operations. Contexts can be nested: large work inside a context for small work uses all
    threads again. The context does nothing if the number of threads is already right.
    """
    now = torch.get_num_threads()
    wanted = (getattr(_local, "full", 0) or now) if work >= SMALL_WORK else 1
    return nullcontext() if wanted == now else _threads(wanted, now)


@contextmanager
def _threads(wanted: int, now: int) -> Iterator[None]:
    outer = getattr(_local, "full", 0)
    _local.full = outer or now
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        _local.full = outer
        torch.set_num_threads(now)


@lru_cache(maxsize=8)
def _pool(workers: int, process: int) -> ThreadPoolExecutor:
    """Return the thread pool of this process. A forked process needs its own, since it does not inherit threads."""
    del process
    return ThreadPoolExecutor(workers, "torchlssvm", initializer=lambda: torch.set_num_threads(1))


def share_out(job: Callable[[Iterator[T]], None], items: Sequence[T], device: torch.device) -> None:
    """Run ``job`` on several threads, each with one torch thread. A thread takes the next item when it has finished one.

    A thread that has to wait for a core thus takes fewer items. ``job`` runs on the calling thread alone if torch has only one
    thread (as in small work), if the tensors are not on the host, or if there are fewer than two items per thread, because most
    threads would then wait for the last one. An error ends all threads and is raised.
    """
    count = torch.get_num_threads() if device.type == "cpu" else 1
    left = list(items)
    todo = iter(left)  # each item is taken once: the interpreter takes one step at a time
    if count < 2 or len(left) < 2 * count:
        job(todo)
        return

    def helper() -> None:
        with torch.no_grad():
            job(todo)

    with threads_for(0):
        futures = [_pool(count - 1, os.getpid()).submit(helper) for _ in range(count - 1)]
        try:
            job(todo)
        finally:
            left.clear()  # after an error no thread takes another one
            _wait(futures)
    for future in futures:
        future.result()


def _wait(futures: list[Future[None]]) -> None:
    """Wait until all are done, since they write into the caller's memory. An interrupt is raised afterwards."""
    interrupt = None
    while not all(future.done() for future in futures):
        try:
            wait(futures)
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
