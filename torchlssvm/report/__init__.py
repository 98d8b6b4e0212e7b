"""``torchlssvm report``: one HTML page about a store and its head. The page is a single file and loads no other files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torchlssvm.audit.documents import write_private
from torchlssvm.report import pictures
from torchlssvm.report.findings import PASSES, Findings, gather
from torchlssvm.report.page import class_names, page, shown_samples
from torchlssvm.store import SampleStore
from torchlssvm.store.journal import now

__all__ = ["PASSES", "Findings", "gather", "write_report"]


def write_report(
    store: SampleStore, path: str | os.PathLike[str], *, images: Any = None, classes: Sequence[str] | None = None,
    certificates: Any = None, title: str | None = None, count: int = 24, groups: Any = None,
) -> Findings:  # fmt: skip
    """Write the page and return its findings.

    Args:
        store: a store with labels, and an :class:`~torchlssvm.LSSVMHead` or a :class:`~torchlssvm.MarginHead`.
        path: the file to write. The page names samples and subjects, so only the owner of the file can read it.
        images: images of the samples, as a folder, an array or a function (see :func:`torchlssvm.report.pictures.source`).
            Without images, the page shows the features whose values are most unusual.
        classes: the names of the classes. Default: the names in the store.
        certificates: a folder with certificate files (*.json) to list.
        title: the title of the page.
        count: the number of samples in each list.
        groups: groups of samples to leave out together, as in :meth:`torchlssvm.store.SampleStore.leave_one_out`. Use
            ``"subject"`` if several rows belong to one person or image.

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
    source = None if images is None else pictures.source(images)
    found = gather(store, certificates, groups)
    rows = {i for part in shown_samples(found, count) for i in part} if source is None else set()
    shown = [(found.labels.ids or [])[i] for i in rows]
    values = dict(zip(shown, store.get(shown).x.double(), strict=True)) if shown else {}
    names = class_names(classes or store.classes, found.labels.scores.shape[1])
    text = page(found, source, values, names, title or f"Report on {store.path.name}", now(), count)
    write_private(path, text.encode(), overwrite=True)  # it names people
    return found
