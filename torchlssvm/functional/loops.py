"""Loops over host arrays, compiled: numba's, where it is installed (the extra ``fast``).

A small operation on a few hundred numbers takes less time than calling it. What is done many times over therefore exists twice:
as operations on tensors, on any device and without further packages, and as a loop that does a whole step in one call.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import Any, TypeVar, cast

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
REORDER = {"reassoc", "contract", "arcp", "nsz"}
"""Sums may be taken in another order, by several at a time; infinities and nan keep their meaning."""

PATH = ("svm_kernel_loops", "svm_loops", "svm_run_loops")
"""What a path of the SVM takes: loaded at once, so that it waits at its start and not in the middle."""


@cache
def load(name: str) -> ModuleType | None:
    """The module of compiled loops of this name in ``torchlssvm.functional``; None where numba is missing or does not work."""
    log.info("loading %s; the first time on a machine it is compiled, which takes some seconds", name)
    try:
        modules = [importlib.import_module(f"torchlssvm.functional.{part}") for part in PATH if name in PATH]
        return modules[PATH.index(name)] if modules else importlib.import_module(f"torchlssvm.functional.{name}")
    except ModuleNotFoundError as error:
        if error.name == "numba":
            return None
        if (error.name or "").startswith("torchlssvm"):
            raise
        log.warning("numba cannot be used, small steps will be slower: %s", error)
    except Exception as error:  # versions that do not go together fail in many ways, and it works without
        log.warning("numba cannot be used, small steps will be slower: %s", error)
    return None


@cache
def _fingerprint() -> str:
    """Of all sources: a compiled function contains those it calls, and the constants it reads, from whichever file."""
    sources = [Path(__file__), *sorted(Path(__file__).parent.glob("svm_*.py"))]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def _marked(function: F) -> F:
    """The same function with a closure that holds the fingerprint: numba takes code it has kept only if that is the same."""
    code = function.__code__.replace(co_freevars=("fingerprint",))
    cell = (CellType(_fingerprint()),)
    out = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cell)
    out.__doc__, out.__module__, out.__qualname__ = function.__doc__, function.__module__, function.__qualname__
    return cast(F, out)


def compiled(signature: str) -> Callable[[F], F]:
    """Compile a function for these types, once for each machine: the code is kept on disk where that is possible."""
    import numba

    def compile_it(function: F) -> F:
        options: dict[str, Any] = {"fastmath": REORDER, "error_model": "numpy", "nogil": True}
        try:
            out: Any = numba.njit(signature, cache=True, **options)(_marked(function))
        except (RuntimeError, OSError):  # no folder to keep it in, or no room
            out = numba.njit(signature, **options)(function)
        return cast(F, out)

    return compile_it
