"""Locks: a head's methods run one at a time, even when several threads call them."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
Self_ = TypeVar("Self_")

_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def give_lock(owner: Any) -> None:
    """Give an object a lock of its own, as ``_lock``. A child process that is forked later gets a new lock."""
    owner._lock = threading.RLock()
    _owners.add(owner)


def _after_fork() -> None:
    """Replace all locks in a forked child, where no other thread is left that could release them."""
    for owner in list(_owners):
        owner._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Keeper(Protocol):
    """The store that a head belongs to."""

    def catch_up(self) -> None:
        """Bring the head up to date with changes that other processes have made to the store."""


def catch_up(owner: Any) -> None:
    """Let the store that a head belongs to, if any, bring it up to date before the head is used.

    The call does nothing in compiled code, or while this thread holds the head's lock, that is, in the middle of another call.
    """
    if torch.compiler.is_compiling():
        return
    keeper = getattr(owner, "_keeper", None)
    if keeper is not None and not owner._lock._is_owned():
        keeper.catch_up()


def exclusive(method: Callable[Concatenate[Self_, P], R]) -> Callable[Concatenate[Self_, P], R]:
    """Run a method alone on its object's lock, without autograd and outside inference mode."""

    @functools.wraps(method)
    def wrapped(self: Self_, /, *args: P.args, **kwargs: P.kwargs) -> R:
        catch_up(self)
        with self._lock, torch.inference_mode(False), torch.no_grad():  # type: ignore[attr-defined]
            return method(self, *args, **kwargs)

    return wrapped
