"""Compilation of numeric steps by numba, where it is installed (the extra ``fast``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
FASTMATH_FLAGS = {"reassoc", "contract", "arcp", "nsz"}
"""LLVM flags that let the compiler reorder sums; infinities and NaN keep their meaning."""


def _numba() -> Any:
    """Numba, or None where it is missing or does not work: the same functions then run as NumPy."""
    try:
        import numba
        import scipy.linalg.cython_blas  # noqa: F401  (compiled matrix products call it)
    except ModuleNotFoundError as error:
        if error.name not in ("numba", "scipy"):
            log.warning("numba cannot be used, small steps will be slower: %s", error)
        return None
    except Exception as error:  # versions that do not go together fail in many ways, and it works without
        log.warning("numba cannot be used, small steps will be slower: %s", error)
        return None
    return numba


numba = _numba()


def compiled(function: F) -> F:
    """Compile a function at its first call, once for each machine: the code is kept on disk where that is possible.

    Numba compares a file's own time with that of the code it kept. Functions that call each other therefore share one file.
    """
    if numba is None:
        return function
    options: dict[str, Any] = {"fastmath": FASTMATH_FLAGS, "error_model": "numpy", "nogil": True}
    try:
        return cast(F, numba.njit(cache=True, **options)(function))
    except (RuntimeError, OSError):  # no folder to keep it in
        return cast(F, numba.njit(**options)(function))
