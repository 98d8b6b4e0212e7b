"""Wrappers that run state updates outside the caller's autograd mode and defer Ctrl-C to a safe point."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def exactly(function: Callable[P, R]) -> Callable[P, R]:
    """Run without autograd and outside inference mode, because a tensor made in inference mode could not be updated later."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return function(*args, **kwargs)
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return wrapped


class DeferredInterrupt:
    """Defers Ctrl-C while a state changes, until the state can be restored or the change is complete.

    :meth:`defer` does nothing outside the main thread (which alone receives signals), if Ctrl-C is already deferred, or if
    SIGINT is ignored. Long operations check at points where they can stop: ``if interrupt.arrived: interrupt.hand_over()``.

    Attributes:
        arrived: True while a Ctrl-C waits.
    """

    def __init__(self) -> None:
        self.arrived = False
        self._handler: Any = None  # that of the caller, while interrupts are deferred

    def _note(self, *_: Any) -> None:
        self.arrived = True

    def defer(self) -> bool:
        """Defer Ctrl-C. Returns True if the caller must end the deferral, False if nothing was deferred."""
        if self._handler is not None or threading.current_thread() is not threading.main_thread():
            return False
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            return False
        self.arrived = False
        signal.signal(signal.SIGINT, self._note)
        self._handler = handler
        return True

    def let_go(self) -> None:
        """End the deferral that :meth:`defer` began, and handle a Ctrl-C that has arrived."""
        handler, self._handler = self._handler, None
        signal.signal(signal.SIGINT, handler)
        if self.arrived:
            self.arrived = False
            handler(signal.SIGINT, None)

    def hand_over(self) -> None:
        """Call the handler that was replaced; Python's own raises KeyboardInterrupt. Does nothing outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            self.arrived = False
            self._handler(signal.SIGINT, None)


@contextmanager
def all_or_nothing(owner: object, put_back: Callable[[], object] | None = None) -> Iterator[None]:
    """Restore the state of an object if the block raises.

    Without ``put_back``, that state is the attributes. The block must then assign new values to attributes instead of
    modifying the old values in place, because the old values are not copied. An object that is changed in place needs a
    function ``put_back``.
    """
    before = owner.__dict__.copy() if put_back is None else {}
    try:
        yield
    except BaseException:
        if put_back is not None:
            put_back()
        else:
            owner.__dict__.clear()
            owner.__dict__.update(before)
        raise


interrupt = DeferredInterrupt()
"""The interrupt of this process."""


def atomically(function: Callable[P, R]) -> Callable[P, R]:
    """Run like :func:`exactly`, with Ctrl-C deferred. The call either completes or leaves the state unchanged."""
    inside = exactly(function)

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        deferred = interrupt.defer()
        try:
            return inside(*args, **kwargs)
        finally:
            if deferred:
                interrupt.let_go()

    return wrapped
