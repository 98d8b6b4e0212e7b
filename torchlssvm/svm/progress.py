"""Progress of a long fit, shown by a bar or passed to a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_of(wanted: bool | Callable[[float], None] | None) -> Iterator[Callable[[float], None] | None]:
    """Return a function that takes the completed share, between 0 and 1, or None if no progress is shown.

    wanted: a function of the caller; True for a tqdm bar; None for a bar if tqdm is installed, stderr is a terminal and the
    fit takes some seconds; False for no progress.
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
    try:
        from tqdm.auto import tqdm
    except ImportError:
        if wanted:
            raise ImportError(
                "progress=True needs tqdm: pip install tqdm, or give a function of the share done"
            ) from None
        yield None
        return
    # A fit that is over by then shows no bar.
    options = {"delay": 2.0, "disable": None} if wanted is None else {}
    with tqdm(total=100, desc="fit", unit="%", leave=False, **options) as bar:

        def report(share: float) -> None:
            bar.update(max(0, int(100 * share) - bar.n))

        yield report
