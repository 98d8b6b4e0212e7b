"""Progress of a long fit, shown by a bar or passed to a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    if callable(wanted):
        furthest = 0.0

        def pass_on(share: float) -> None:
            nonlocal furthest
            furthest = max(furthest, share)  # a fit may need a second start
            wanted(furthest)

        yield pass_on
        return
    with progress_bar("fit", 100, forced=wanted is True, delay=0.0 if wanted else 2.0) as count:
        percent = 0

        def report(share: float) -> None:
            nonlocal percent
            count(max(0, int(100 * share) - percent))
            percent = max(percent, int(100 * share))

        yield report
