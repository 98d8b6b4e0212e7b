"""Running state updates outside of whatever autograd mode the caller is in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def exactly(function: Callable[P, R]) -> Callable[P, R]:
    """Run without autograd, and outside inference mode: a tensor made in there could not be updated later."""

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
