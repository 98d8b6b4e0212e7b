"""Threads chosen by the work: small work on one thread, large work on as many as torch may use.

A parallel loop of torch ends when its last thread has ended. Beside another busy process that thread may have to wait for a
core for milliseconds, so that work of microseconds takes as long; on one thread it does not. The choice is made from shapes
alone: the same work is always done the same way.

``torch.set_num_threads`` holds for the calling thread, and is the number with which threads begin that use torch for the first
time. So a thread that does its first work with torch while another one is in :func:`threads_for` begins with one thread;
threads that have used torch before keep theirs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TypeVar

import torch

T = TypeVar("T")

SMALL_WORK = 2**28
"""Floating point operations (about 10 ms of one core) below which work is small."""

PASS_WORK = 16
"""Operations that a number counts for in work that is bound by memory: a check, a conversion, a copy."""


class _Local(threading.local):
    full = 0  # the number of threads outside of small work; 0 where there is none


_local = _Local()


def threads_for(work: float) -> AbstractContextManager[None]:
    """A context in which torch uses one thread if the work, in floating point operations, is small, and else all it may.

    Large work inside small work has all threads again. It does nothing where the number of threads is right already.
    """
    now = torch.get_num_threads()
    wanted = (_local.full or now) if work >= SMALL_WORK else 1
    return nullcontext() if wanted == now else _Threads(wanted)


class _Threads:
    """A context in which torch uses a number of threads, and knows how many there are outside of small work."""

    def __init__(self, wanted: int):
        self.wanted = wanted

    def __enter__(self) -> None:
        self.before, self.outer = torch.get_num_threads(), _local.full
        if not self.outer:
            _local.full = self.before
        torch.set_num_threads(self.wanted)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _local.full = self.outer
        torch.set_num_threads(self.before)


class _Items(Iterator[T]):
    """Items that several threads take, each once; none is left after :meth:`clear`."""

    def __init__(self, items: Sequence[T]):
        self.left = list(reversed(items))

    def __next__(self) -> T:
        try:
            return self.left.pop()
        except IndexError:
            raise StopIteration from None

    def clear(self) -> None:
        """Let no thread take another one."""
        self.left.clear()


_pools: dict[int, ThreadPoolExecutor] = {}
_pools_lock = threading.Lock()


def _after_fork() -> None:
    """In a forked child the threads of the pools are gone."""
    global _pools_lock
    _pools.clear()
    _pools_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _pool(workers: int) -> ThreadPoolExecutor:
    with _pools_lock:
        if workers not in _pools:
            _pools[workers] = ThreadPoolExecutor(workers, "torchlssvm", initializer=lambda: torch.set_num_threads(1))
        return _pools[workers]


ITEMS_PER_THREAD = 2
"""Items that each thread must have: with fewer, threads that are done wait for the last, and torch's own do better."""


def share_out(job: Callable[[Iterator[T]], None], items: Sequence[T], device: torch.device) -> None:
    """Run ``job`` on several threads, each with one thread of torch; each takes the next item when it is done with one.

    A thread that has to wait for a core takes fewer items. With one thread, inside small work, with few items, or for tensors
    that are not on the host, ``job`` runs here alone. An error ends all of them, and is raised.
    """
    count = torch.get_num_threads() if device.type == "cpu" else 1
    todo = _Items(items)
    if count < 2 or len(items) < ITEMS_PER_THREAD * count:
        job(todo)
        return

    def helper() -> None:
        with torch.no_grad():
            job(todo)

    with threads_for(0):
        futures = [_pool(count - 1).submit(helper) for _ in range(count - 1)]
        try:
            job(todo)
        finally:
            if todo.left:
                todo.clear()
            _wait(futures)
    for future in futures:
        future.result()


def _wait(futures: list[Future[None]]) -> None:
    """Wait until all are done, also after an interrupt, which is raised then: they write into memory of the caller."""
    interrupt = None
    while not all(future.done() for future in futures):
        try:
            wait(futures)
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
