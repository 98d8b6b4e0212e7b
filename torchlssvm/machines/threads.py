"""One thread for work that is too small for two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def single_thread(active: bool) -> Iterator[None]:
    """Within the block torch computes on one thread, if ``active``; the caller's setting comes back in any case.

    Vectors of a few thousand numbers take longer on two threads than on one.
    """
    threads = torch.get_num_threads()
    if not active or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
