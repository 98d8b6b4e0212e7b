"""``torchlssvm report``: one HTML page about a store and its head, to look at and to hand around. It fetches nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchlssvm.report import pictures
from torchlssvm.report.findings import Findings, gather
from torchlssvm.report.page import class_names, page
from torchlssvm.store import SampleStore
from torchlssvm.store.journal import now

__all__ = ["Findings", "gather", "write_report"]


def write_report(
    store: SampleStore, path: str | os.PathLike[str], *, images: Any = None, classes: Sequence[str] | None = None,
    certificates: Any = None, title: str | None = None, count: int = 24,
) -> Findings:  # fmt: skip
    """Write the page and return its findings.

    Args:
        store: with an :class:`~torchlssvm.LSSVMHead` that holds labels, or a :class:`~torchlssvm.MarginHead`.
        path: of the page.
        images: a folder, an array, or a function; see :func:`torchlssvm.report.pictures.source`.
        classes: their names.
        certificates: a folder with certificate files (*.json) to list.
        title: of the page.
        count: how many samples each list shows.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from torchlssvm import LSSVMHead
    >>> from torchlssvm.events import Add
    >>> folder = Path(tempfile.mkdtemp())
    >>> x, y = torch.randn(40, 4), torch.arange(40) % 2
    >>> with SampleStore(folder / "store", head=LSSVMHead(4, 2)) as store:
    ...     _ = store.apply(Add(ids=range(40), x=x, y=y))
    ...     found = write_report(store, folder / "report.html")
    >>> 0 <= found.accuracy <= 1 and (folder / "report.html").stat().st_size > 10_000
    True
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"count must be an int >= 0, got {count!r}")
    source = pictures.source(images)
    found = gather(store, certificates)
    names = class_names(classes, found.scores_width)
    text = page(found, source, names, title or f"Report on {store.path.name}", now(), count)
    Path(path).write_text(text, encoding="utf-8")
    return found
