"""Progress of a long fit, shown by a bar or passed to a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchlssvm.progress_bar import progress_bar


@contextmanager
def progress_of(wanted: bool | Callable[[float], None] | None) -> Iterator[Callable[[float], None] | None]:
    """Return a function that takes the completed share, or None. wanted: True for a bar, None for a bar after some seconds."""
    furthest = 0.0  # a fit may need a second start

    def tell(share: float) -> None:
        nonlocal furthest
        before, furthest = furthest, max(furthest, share)
        wanted(furthest) if callable(wanted) else count(int(100 * furthest) - int(100 * before))

    if wanted is False or callable(wanted):
        yield None if wanted is False else tell
        return
    with progress_bar("fit", 100, forced=wanted is True, delay=0.0 if wanted else 2.0) as count:
        yield tell
