"""The samples of an attached classifier in a store, which drives its head."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from torch import Tensor

from torchlssvm.backbone_hash import fingerprint
from torchlssvm.events import Add, Relabel, Remove, as_list, check_text
from torchlssvm.features.description import describe_network
from torchlssvm.linear.attach import AttachedClassifier
from torchlssvm.store.database import NETWORK_NOTE
from torchlssvm.store.head_adapter import SETTABLE_OPTIONS
from torchlssvm.store.sample_store import SampleStore
from torchlssvm.store.transaction import EventResult


class AttachedSamples:
    """Samples under ids and subjects, for :class:`~torchlssvm.AttachedClassifier`: it asks, the store changes the head.

    Args:
        store: a folder, or an open store of the classifier's own head.
        classifier: an ``AttachedClassifier``; a folder is bound to the hash of its backbone.
        given: names of the head's options that count; others that may change are those of the store. None: all count.
    """

    def __init__(self, store: Any, classifier: AttachedClassifier, given: Collection[str] | None = None):
        if isinstance(store, SampleStore):
            if store.head is not classifier.head:
                raise ValueError("the store drives another head: open it with SampleStore(path, head=clf.head)")
            self.store = store
        elif isinstance(store, str | os.PathLike):
            source = fingerprint(classifier.backbone, classifier.preprocess)
            self.store = SampleStore(store, classifier.head, fingerprint=source)
            if self.store.note(NETWORK_NOTE) is None and not self.store.readonly:
                self.store.set_note(NETWORK_NOTE, describe_network(classifier.backbone))
            if given is not None:
                self.store.live.take_options([name for name in SETTABLE_OPTIONS if name not in given])
        else:
            raise ValueError(f"store must be a folder or a SampleStore, got {type(store).__name__}")

    def follow(self) -> None:
        """Bring the head up to date with what other processes have written."""
        if not self.store.closed:
            _ = self.store.head

    def add(self, x: Tensor, y: Tensor, ids: Any, subjects: Any, again: bool = False) -> int:
        """Add samples x (B, J), y (B,), in one event; returns their number.

        ``again``: samples that are held are passed over; ValueError if one has another label or subject there.
        """
        if ids is None:
            raise ValueError(
                "the store needs an id for each sample, by which it can be removed later: batches (x, y, ids) or (x, y, ids, "
                "subjects), dicts with 'ids', or clf.add(images, y, ids=ids); torchlssvm.lightning.Indexed(dataset) numbers "
                "a dataset. Nothing was learned from this batch."
            )
        event = Add(ids=ids, x=x, y=y, subject=subjects)
        held = [k for k, name in enumerate(event.ids) if name in self.store] if again else []
        if held:
            self._compare(event, held)
            new = [k for k in range(len(event.ids)) if k not in set(held)]
            if not new:
                return 0
            event = Add([event.ids[k] for k in new], event.x[new], event.y[new], [event.subjects[k] for k in new])
        return self.store.apply(event).samples

    def _compare(self, event: Add, held: list[int]) -> None:
        """ValueError if a sample that is held has another label or subject than in the event."""
        rows = self.store.get([event.ids[k] for k in held])
        for at, k in enumerate(held):
            same_label = rows.y[at].tolist() == event.y[k].tolist()
            if not same_label or rows.subjects[at] != event.subjects[k]:
                what = "subject" if same_label else "label"
                raise ValueError(
                    f"the id {event.ids[k]!r} is in the store already, with another {what}: relabel or remove it, or give the "
                    "new sample another id"
                )

    def remove(self, ids: Any, subject: str | None) -> EventResult:
        """Remove samples by their ids, or all of a subject."""
        if (ids is None) == (subject is None):
            raise ValueError("remove takes ids=[...] or subject=..., one of both")
        if subject is None and isinstance(ids, str):
            ids = [ids]
        return self.store.apply(Remove(ids=ids) if subject is None else Remove(subject=check_text(subject, "subject")))

    def relabel(self, ids: Any, y: Any) -> EventResult:
        """Give samples the labels y (B,)."""
        return self.store.apply(Relabel(ids=as_list(ids) or [ids], y=y))
