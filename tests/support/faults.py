"""Faults planted in the package: the one place where a test puts another function in the place of one of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Put ``make(function)`` in the place of a function of a module or class."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, make(getattr(owner, name)))
        yield


class Failing:
    """Makes a function that raises an error at one of its calls, before its work is done or after it (``late``).

    Attributes:
        calls: the number of times it was called.
    """

    def __init__(self, error: BaseException, at: int = 1, late: bool = False):
        self.error, self.at, self.late, self.calls = error, at, late, 0

    def __call__(self, real: Any) -> Any:
        def planted(*args: Any, **options: Any) -> Any:
            self.calls += 1
            now = self.calls == self.at
            if now and not self.late:
                raise self.error
            result = real(*args, **options)
            if now:
                raise self.error
            return result

        return planted
