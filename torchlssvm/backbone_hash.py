"""One hash of network, preprocessing and feature map, which reveals features that were computed in another way."""

from __future__ import annotations

import hashlib
import sys
from functools import partial
from operator import attrgetter
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, nn

from torchlssvm.canonical_json import canonical

__all__ = ["fingerprint"]


def fingerprint(
    backbone: nn.Module | None = None, preprocessing: Any = None, feature_map: nn.Module | None = None
) -> str:
    """SHA-256 of everything that determines the features: the weights, the preprocessing and the feature map.

    Functions are part of it by name (:func:`describe`). A function without a name that other processes know is a ValueError.

    >>> a, b = nn.Linear(4, 2), nn.Linear(4, 2)
    >>> fingerprint(a) == fingerprint(a), fingerprint(a) == fingerprint(b)
    (True, False)
    """
    parts: dict[str, Any] = {"preprocessing": None if preprocessing is None else describe(preprocessing)}
    for name, module in (("backbone", backbone), ("feature_map", feature_map)):
        for part in () if module is None else module.modules():
            check = getattr(part, "check_described", None)
            if check is not None:
                check()
        parts[name] = None if module is None else module_hash(module)
    return hashlib.sha256(canonical(parts)).hexdigest()


def module_hash(module: nn.Module) -> str:
    """SHA-256 of a module's structure (its repr) and of every tensor of its state, in the order of their names."""
    total = hashlib.sha256(repr(module).encode())
    for name, value in sorted(module.state_dict().items()):
        if isinstance(value, Tensor):
            total.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
            total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            total.update(f"{name} {value!r};".encode())
    return total.hexdigest()


def describe(function: Any) -> str:
    """Describe a callable such that its description is the same in each process, and differs for another callable.

    A function is described by its module and name, a ``functools.partial`` by its function and arguments, and a module by its
    repr and weights. Any other object is described by its repr, if its class defines one. Raises ValueError for anything else,
    such as a lambda or a local function.

    >>> describe(partial(torch.roll, shifts=1, dims=-1))
    "partial(torch.roll, (), {'dims': -1, 'shifts': 1})"
    """
    if isinstance(function, partial):
        if _is_primitive([function.args, *function.keywords.values()]):
            options = dict(sorted(function.keywords.items()))
            return f"partial({describe(function.func)}, {function.args!r}, {options!r})"
    elif isinstance(function, nn.Module):
        return f"{function!r} {module_hash(function)}" if function.state_dict() else repr(function)
    elif hasattr(function, "__qualname__"):
        name = function.__name__ if isinstance(function, BuiltinFunctionType) else function.__qualname__
        if _is_found(name, function):
            return f"{function.__module__}.{name}"
    elif type(function).__repr__ is not object.__repr__:  # type: ignore[comparison-overlap]
        return repr(function)
    raise ValueError(
        f"{function!r} cannot be recognised in another process, so a store could not tell whether features are computed in the "
        "same way. Pass a function that is defined at the top level of a module, a functools.partial of such a function with "
        "texts and numbers as arguments, an nn.Module, or an object whose class defines __repr__"
    )


def _is_primitive(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_primitive, value))
    return value is None or isinstance(value, str | bytes | int | float)


def _is_found(name: str, function: Any) -> bool:
    """True if a function has this name in its module."""
    try:
        found = attrgetter(name)(sys.modules[function.__module__])
    except (AttributeError, KeyError):
        return False
    return bool(found == function)
