"""The progress bar of fits and commands."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any


@contextmanager
def progress_bar(
    what: str, total: int | None = None, *, forced: bool = False, delay: float = 0.0
) -> Iterator[Callable[[int], Any]]:
    """Show a bar on standard error if that is a terminal or a notebook and tqdm is installed.

    Yields a function that counts what is done.

    Args:
        what: the deed, shown before the bar.
        total: the number to count to, if known.
        forced: show the bar anywhere; ImportError without tqdm.
        delay: seconds after which the bar appears. Work that is over by then shows none.
    """
    notebook = "ipykernel" in sys.modules
    visible = notebook or (sys.stderr is not None and sys.stderr.isatty())
    if find_spec("tqdm") is None or not (visible or forced):
        if forced:
            raise ImportError("progress=True needs tqdm: pip install tqdm, or give a function of the share done")
        yield lambda _: None
        return
    from tqdm.auto import tqdm

    layout = "{desc} ... {elapsed}"
    if total is not None:
        layout = "{desc} {percentage:3.0f}% |{bar}| {n_fmt} of {total_fmt}, {remaining} left"
    width, height = shutil.get_terminal_size()  # tqdm shows nothing if the terminal does not report its size
    size = {} if notebook else {"ncols": width - 1, "nrows": height}
    with tqdm(desc=what, total=total, leave=False, delay=delay, bar_format=layout, **size) as bar:
        yield bar.update
