"""Running state updates outside of whatever autograd mode the caller is in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

F = TypeVar("F", bound=Callable[..., object])


def exactly(function: F) -> F:
    """Run without autograd, and outside inference mode: a tensor made in there could not be updated later."""
    return torch.inference_mode(False)(torch.no_grad()(function))
