"""The samples of an attached classifier, kept in a store that updates the classifier's head."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor

from torchlssvm.backbone_hash import fingerprint
from torchlssvm.events import Add, Relabel, Remove
from torchlssvm.features.description import describe_network
from torchlssvm.files import DATABASE_FILE
from torchlssvm.functional.conformal import misfit
from torchlssvm.linear.attach import AttachedClassifier
from torchlssvm.linear.checkpoint import arguments
from torchlssvm.linear.kinds import HEAD_KINDS
from torchlssvm.store.database import (
    ADAPTED_NOTE,
    DEFAULT_WEIGHTS,
    NETWORK_NOTE,
    NOTE_PREFIX,
    SETTINGS_NOTE,
    Database,
)
from torchlssvm.store.erasure.requests import name_list
from torchlssvm.store.head_adapter import SETTABLE_OPTIONS
from torchlssvm.store.sample_store import CALIBRATE_RECORD, SampleStore
from torchlssvm.store.transaction import EventResult


class AttachedSamples:
    """Samples of an :class:`~torchlssvm.AttachedClassifier`, with ids and subjects. The store updates the classifier's head.

    Args:
        store: a folder, or an open store of the classifier's own head.
        classifier: an ``AttachedClassifier``. A store that is given as a folder is bound to the hash of the backbone.
        given: names of the options to take from the head. All other options come from the store. None takes all options from
            the head.
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
                how = classifier.network_options
                named = how.feature_map is None and all(isinstance(view, str) for view in how.views)
                if classifier.source is not None and named:
                    self.store.set_note(SETTINGS_NOTE, {"backbone": classifier.source, "network": how.saved()})
            if given is not None:
                self.store.live.take_options([name for name in SETTABLE_OPTIONS if name not in given])
            self.store.keeps_calibration = True
        else:
            raise ValueError(f"store must be a folder or a SampleStore, got {type(store).__name__}")
        self._misfits: tuple[Any, Tensor] | None = None

    def follow(self) -> None:
        """Update the head with the changes that other processes have written."""
        if not self.store.closed:
            _ = self.store.head

    def left_out_misfits(self, groups: Any) -> Tensor:
        """Leave-one-out misfits (n,) of the samples' own labels, cached until the head changes."""
        with self.store.view():
            head = self.store._linear("predict_set")
            _ = head.rho  # a rho that is still to be chosen changes the head
            now = (head._state_version, dict(groups) if isinstance(groups, Mapping) else groups)
            if self._misfits is None or self._misfits[0] != now:
                _, scores, labels = self.store.leave_one_out(groups=groups)
                if labels.ndim != 1:
                    raise ValueError(
                        "prediction sets are sets of classes, one of which is right: this head holds several labels or numbers "
                        "for each sample"
                    )
                self._misfits = (now, misfit(scores).gather(1, labels[:, None])[:, 0])
            return self._misfits[1]

    def add(self, x: Tensor, y: Tensor, ids: Any, subjects: Any, more: bool = False) -> int:
        """Add samples x (B, J) with labels y (B,) in one event; return the number of samples added.

        Samples that the store already holds are compared with their stored rows and skipped, see
        :meth:`SampleStore.without_held`. Set ``more`` if further batches follow, so that the calibration is renewed only after
        the last one.
        """
        if ids is None:
            raise ValueError(
                "the store needs an id for each sample, by which it can be removed later: batches (x, y, ids) or (x, y, ids, "
                "subjects), dicts with 'ids', or clf.add(images, y, ids=ids); torchlssvm.lightning.Indexed(dataset) numbers "
                "a dataset. Nothing was learned from this batch."
            )
        event = self.store.without_held(Add(ids=ids, x=x, y=y, subject=subjects))
        return 0 if event is None else self.store.apply(event, recalibrate=not more).samples

    def copy(self, source: SampleStore, columns: Tensor, head: Any) -> None:
        """Copy all samples of a store with some columns (k,) of their features, and the grid and choices of ``head``.

        The copy uses the suppression list of the store, knows the samples that the network was trained on, and keeps a
        calibration if the store does.
        """
        listed, known = self.store.suppression, source.suppression
        listed.choice, listed._given = known.choice, known._given
        if head.statistics.exact:
            grids = head.statistics.choices
            self.store.head.statistics.decide(grids.kind, grids.grid, grids.target_grid)
        with source.view():
            if known.path is not None:
                self.store.use_suppression_list(known.path)
            adapted, calibrated = source.note(ADAPTED_NOTE), source._db.get(CALIBRATE_RECORD, None)
            if adapted is not None:
                self.store.set_note(ADAPTED_NOTE, adapted)
            for rows in source.batches():
                self.add(rows.x[:, columns], rows.y, rows.ids, rows.subjects, more=True)
            if source.classes:
                self.store.name_classes(source.classes)

        def take_choices(mine: Any) -> None:
            mine._choices.made.update(head._choices.made)
            self.store._db.put(CALIBRATE_RECORD, calibrated)

        self.store._set_option(take_choices, choose_rho=False)

    def remove(self, ids: Any, subject: Any, receipt: Any = None) -> EventResult | list[EventResult]:
        """Remove samples by id, or all samples of one or more subjects. If a receipt is requested, it is written first."""
        if (ids is None) == (subject is None):
            raise ValueError("remove takes ids=[...] or subject=..., one of both")
        several = not isinstance(subject, str | int) and subject is not None
        subjects = [] if subject is None else name_list(subject, "subject")
        named = [] if ids is None else name_list(ids, "an id")
        if not subjects and not named:
            raise ValueError(f"{'ids' if subject is None else 'subject'} is empty: name at least one")
        if receipt is not None:
            results = self.store.erase(subjects, named, receipt=receipt).results
        else:
            events = [Remove(subject=s) for s in subjects] + ([Remove(ids=named)] if named else [])
            results = self.store.apply(events)
        return results if several else results[0]

    def relabel(self, ids: Any, y: Any) -> EventResult:
        """Change the labels of samples to y (B,)."""
        return self.store.apply(Relabel(ids=name_list(ids, "an id"), y=y))


def stored_options(store: Any, kind: str | None, given: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return the kind and the options of a new head for a store: as given, otherwise as in an existing store.

    Options that can be set later (``SETTABLE_OPTIONS``) are not among them: :class:`AttachedSamples` takes them from the store.
    """
    config = _read(store, "head")
    stored = next((name for name, made in HEAD_KINDS.items() if config and made.__name__ == config["type"]), None)
    if stored is None or kind not in (None, stored):
        return kind, given
    own = ("type", "in_features", "num_classes", *SETTABLE_OPTIONS)
    options = {name: value for name, value in arguments(config).items() if name not in own}
    return stored, options | given


def stored_weights(store: Any, name: str) -> str | None:
    """Return the weights file with which ``torchlssvm init`` loaded the network of this name for a store, or None."""
    made = _read(store, NOTE_PREFIX + SETTINGS_NOTE) or {}
    weights: str | None = made.get("weights")
    if made.get("backbone") != name or weights in (None, DEFAULT_WEIGHTS):
        return None
    if not Path(weights).exists():
        raise FileNotFoundError(
            f"the store at {store} was made with the weights {weights}, but this file does not exist. If you have moved it, "
            f"call model, preprocess = torchlssvm.backbones.load_network({name!r}, FILE), and attach(model, ..., store=store, "
            "preprocess=preprocess)"
        )
    return weights


def _read(store: Any, record: str) -> Any:
    """Return a record of a store that is given as a folder; None if there is no such store or record."""
    file = Path(store) / DATABASE_FILE if isinstance(store, str | os.PathLike) else None
    if file is None or not file.exists():
        return None
    with closing(Database(file, create=False, readonly=True)) as database:
        return database.get(record, None)
