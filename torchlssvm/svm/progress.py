"""Progress of a long fit, shown by a bar or passed to a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torchlssvm.progress_bar import progress_bar


@contextmanager
def progress_of(wanted: bool | Callable[[float], None] | None) -> Iterator[Callable[[float], None] | None]:
    """Return a function that takes the completed share, between 0 and 1, or None if no progress is shown.

    wanted: a function of the caller; True for a bar; None for a bar on a terminal if the fit takes some seconds; False for no
    progress.
    """
    if wanted is False:
        yield None
        return
    bar: Any = nullcontext()
    if not callable(wanted):
        bar = progress_bar("fit", 100, forced=wanted is True, delay=0.0 if wanted else 2.0)
    furthest = 0.0
    with bar as count:

        def report(share: float) -> None:
            nonlocal furthest
            before, furthest = furthest, max(furthest, share)  # a fit may need a second start
            if callable(wanted):
                wanted(furthest)
            else:
                count(int(100 * furthest) - int(100 * before))

        yield report
