"""Changes of a head since machines last agreed, kept as a second, smaller set of sums.

Since sums can be subtracted, the changes of a head are also a :class:`~torchlssvm.Statistics`, in which removed samples are
negative. Until a head first takes part in an agreement (``sync``, ``agree``, or a delta handed over), all its samples are
pending and no second sums are kept. A head that never exchanges anything therefore has no extra cost.
:mod:`torchlssvm.distributed` describes which changes survive a save. No hash of a sample, and no digest of an earlier state,
is ever saved or pickled.
"""

from __future__ import annotations

import copy
import uuid
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from torchlssvm.functional.sample_identity import id_hash, shared_key
from torchlssvm.linear.membership import (
    Counts,
    HeldRows,
    add_counts,
    count_negative,
    counts_from_array,
    counts_to_array,
    fewest_rows,
    sum_of_counts,
)
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.batch import SampleBatch
from torchlssvm.wording import counted


@dataclass
class Changes:
    """Changes of samples, with removals as negative samples.

    Attributes:
        statistics: their sums.
        rows: their rows, under a key; None if they are not known.
        key: None before the first row.
        weights: net weight of the samples by a keyed hash of their ids, if ids were given.
    """

    statistics: Statistics
    rows: Counts | None
    key: bytes | None = None
    weights: Counts = field(default_factory=dict)

    def plus(self, other: Changes, sign: int = 1) -> Changes:
        """Return the sum or difference. Rows with different keys cannot be compared, so the result does not know its rows."""
        theirs = other.statistics.to(self.statistics.device)
        rows, key = None, self.key or other.key
        if self.rows is not None and other.rows is not None and key == (other.key or key):
            rows = sum_of_counts(self.rows, other.rows, sign)
        weights = sum_of_counts(self.weights, other.weights, sign)
        return Changes(self.statistics + theirs if sign > 0 else self.statistics - theirs, rows, key, weights)

    @property
    def least_samples(self) -> int | None:
        """A lower bound on the number of distinct samples in the sums of any class; None if nothing changed.

        A sample counts once whatever its weight, and samples that were added and removed again do not count. If the head does
        not know its rows, or keeps sums for each of several labels, the bound is 1.
        """
        stats = self.statistics
        stats.canonicalize()
        if stats.empty:
            return None
        by_label = stats.per_class and stats.targets == "multilabel"  # rows do not tell how many have a label
        return 1 if self.rows is None or by_label else fewest_rows(self.rows)

    def check_enough(self, min_samples: int) -> None:
        """Raise ValueError if the sums to be sent may be of fewer distinct samples than ``min_samples``."""
        if isinstance(min_samples, bool) or not isinstance(min_samples, int) or min_samples < 0:
            raise ValueError(f"min_samples must be an int >= 0, got {min_samples!r}")
        least = self.least_samples
        if least is not None and least < min_samples:
            unknown = (
                "" if self.rows is not None else " (single samples are not known here: sums were merged from a file)"
            )
            raise ValueError(
                f"the changes to be sent have a class with the sums of perhaps only {counted(least, 'sample')}{unknown}, fewer "
                f"than min_samples={min_samples}: sums of few samples reveal them, whatever their weight. Wait for more, or "
                "lower min_samples."
            )


class Tracking(Enum):
    """How pending changes are known."""

    ALL = "all"
    """Nothing was agreed on yet: all that is held is pending."""

    CHANGES = "changes"
    """Since the last agreement changes are summed on their own."""

    LOST = "lost"
    """Saved while removals were pending: the changes are unknown, so the head must start from an agreed state."""


class Pending:
    """Changes that other machines have not seen, and the ids of deltas that must not be counted again.

    Attributes:
        held: the sums of the head.
        held_rows: the rows of the head.
        tracking: how the changes are known.
        statistics: the sums of the changes with :attr:`Tracking.CHANGES`; otherwise None.
        id: a random id of these changes, made when they first leave the head (in a delta, a copy or a file). A head
            that has already counted this id refuses the changes.
        epoch: the number of agreements so far.
        merged: ids of all deltas that were merged here or handed over from here.
        carried: the merged ids that are part of the pending changes.
        weights: as for :class:`Changes`.
        shrunk: True if something was removed since the last agreement.
    """

    def __init__(self, held: Statistics, held_rows: HeldRows) -> None:
        self.held, self.held_rows = held, held_rows
        self.epoch, self.merged = 0, set[str]()
        self.forget()

    def forget(self) -> None:
        """Forget the agreed state after the sums were replaced, so that all current samples are pending."""
        self.tracking = Tracking.ALL
        self.statistics: Statistics | None = None
        self.id: str | None = None
        self._agreed: str | None = None  # the digest agreed on, if it was computed
        self.carried, self.weights, self.shrunk = set[str](), Counts(), False
        self.held_rows.changed = None

    # -- reading ---------------------------------------------------------------------------------------------------------

    @property
    def some(self) -> bool:
        """True if anything is pending."""
        sums = self.sums
        sums.canonicalize()
        return self.tracking is Tracking.LOST or not sums.empty

    def named(self) -> str | None:
        """Return the id of the pending changes, created on first use; None if nothing is pending."""
        if not self.some:
            return None
        self.id = self.id or uuid.uuid4().hex
        return self.id

    @property
    def sums(self) -> Statistics:
        """Return the sums of the pending changes, which are valid until the next change. Do not write to them."""
        return self.held if self.statistics is None else self.statistics

    @property
    def rows(self) -> Counts | None:
        """Return the rows of the pending changes; None if they are not known."""
        held = self.held_rows.known()
        return held if self.tracking is Tracking.ALL else self.held_rows.changed

    def changes(self) -> Changes:
        """Return the pending changes, not a copy. Raises ValueError if they were lost."""
        if self.tracking is Tracking.LOST:
            raise ValueError(
                "this head was saved or pickled while removals were pending, and the agreed state is not saved in this case, "
                "because it would reveal the removed samples. The samples of the head are right, but nobody knows what has "
                "changed since the last agreement. If the other ranks have the same samples (the removals reached them, or all "
                "ranks loaded this file), call agree(head). Otherwise load a checkpoint that was saved after a sync and repeat "
                "the removals."
            )
        self.sums.canonicalize()
        return Changes(self.sums, self.rows, self.held_rows.key, self.weights)

    def agreed_sums(self) -> Statistics:
        """Return the sums that were agreed on."""
        return self.held.zero() if self.statistics is None else self.held - self.statistics

    def agreed_rows(self) -> Counts | None:
        """Return the rows that were agreed on; None if they are not known."""
        held, changed = self.held_rows.known(), self.rows
        return None if held is None or changed is None else sum_of_counts(held, changed, -1)

    def agreed_digest(self) -> str:
        """Return the digest of the agreed state, "" if it is empty."""
        if self._agreed is None:
            self._agreed = _digest(self.agreed_sums())
        return self._agreed

    # -- changes ---------------------------------------------------------------------------------------------------------

    def change(self, changes: list[tuple[SampleBatch, int]]) -> None:
        """Take in changes of samples. A process group compares ids, so there the samples are counted by their ids."""
        self.shrunk = self.shrunk or any(sign < 0 for _, sign in changes)
        if self.statistics is not None:
            self.statistics.change([(replace(batch, observer=None), sign) for batch, sign in changes])
        if self.statistics is not None or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            for batch, sign in changes:
                add_weights(self.weights, batch, sign)

    def merge(self, changes: Changes, sign: int, shrinks: bool) -> None:
        """Take in, or (sign -1) take away, changes given as sums. ``shrinks``: the changes may remove samples."""
        self.shrunk = self.shrunk or shrinks
        if self.statistics is not None:
            self.statistics.merge(changes.statistics, sign)
        if self.held_rows.changed is not None and changes.rows is not None:
            add_counts(self.held_rows.changed, changes.rows, sign)
        add_counts(self.weights, changes.weights, sign)

    def restart(self, digest: str | None, epoch: int) -> None:
        """Start from an agreement on the current samples, with nothing pending. ``digest``: None if it was not computed."""
        nothing = Changes(self.held.zero(), None if self.held_rows.known() is None else {})
        self._restart(nothing, digest, epoch)

    def agree(self) -> None:
        """Start from an agreement on what is held."""
        self.restart(_digest(self.held), self.epoch)

    def hand_over(self, part: Changes, name: str) -> None:
        """Treat named changes that are now held elsewhere as agreed on. The rest stays pending."""
        self._restart(self.changes().plus(part, -1), None, self.epoch)
        self.merged = self.merged | {name}  # its samples are here: it must not come back

    def _restart(self, rest: Changes, digest: str | None, epoch: int) -> None:
        self.forget()
        self.tracking, self.statistics, self.held_rows.changed = Tracking.CHANGES, rest.statistics, rest.rows
        self.epoch, self._agreed = epoch, digest
        self.weights, self.shrunk = rest.weights, not rest.statistics.empty

    def refuse_twice(self, ids: set[str]) -> None:
        """Raise ValueError if a delta with one of these ids is already counted here."""
        twice = sorted(self.merged & ids)
        if twice:
            raise ValueError(f"the delta {twice[0]} has been merged already: its samples would count twice")

    def count_ids(self, ids: set[str], sign: int = 1) -> None:
        """Remember deltas whose samples are pending here, or (sign -1) forget them again."""
        if sign < 0:
            self.merged, self.carried = self.merged - ids, self.carried - ids
        else:
            self.merged, self.carried = self.merged | ids, self.carried | ids

    # -- saving ----------------------------------------------------------------------------------------------------------

    def to(self, held: Statistics, held_rows: HeldRows) -> Pending:
        """Return an independent copy for a copy of the head, perhaps on another device.

        Both copies have the same id, so that their changes are not counted twice.
        """
        sums = None if self.statistics is None else self.statistics.copy().to(held.device)
        changed = None if self.held_rows.changed is None else dict(self.held_rows.changed)
        out = Pending(held, held_rows)
        out.__dict__.update(vars(self) | {"held": held, "held_rows": held_rows, "statistics": sums})
        out.merged, out.carried, out.weights = set(self.merged), set(self.carried), dict(self.weights)
        held_rows.changed = changed
        return out

    def save(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return JSON fields and tensors, with an id from now on. Changes that include removals are omitted."""
        some, rows = self.named() is not None, self.rows
        if self.statistics is not None and rows is not None:
            self.shrunk = count_negative(rows) > 0
        lost = self.statistics is not None and self.shrunk and some
        meta = {
            "tracking": (Tracking.LOST if lost else self.tracking).value, "epoch": self.epoch, "id": self.id,
            "merged": sorted(self.merged), "carried": sorted(self.carried),
        }  # fmt: skip
        if self.statistics is None or lost:
            return meta, {}
        return meta, self.statistics.state() | (
            {} if rows is None else {"rows": torch.from_numpy(counts_to_array(rows))}
        )

    @classmethod
    def load(cls, meta: dict[str, Any], tensors: dict[str, Tensor], held: Statistics, held_rows: HeldRows) -> Pending:
        """Restore what :meth:`save` returned. Raises ValueError, KeyError or TypeError if it does not fit the head."""
        out = cls(held, held_rows)
        out.tracking, out.epoch = Tracking(meta["tracking"]), int(meta["epoch"])
        out.id = None if meta["id"] is None else str(meta["id"])
        out.merged, out.carried = set(map(str, meta["merged"])), set(map(str, meta["carried"]))
        if out.tracking is Tracking.CHANGES:
            out.statistics = held.zero()
            out.statistics.load(tensors)
            if "rows" in tensors and held_rows.unchecked is None:
                held_rows.changed = counts_from_array(tensors["rows"].cpu().numpy())
        return out

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling, as in :meth:`save`."""
        meta, tensors = self.save()
        return {"meta": meta, "tensors": tensors, "held": self.held, "held_rows": self.held_rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`__getstate__` returned."""
        self.__dict__.update(vars(Pending.load(**state)))

    def __deepcopy__(self, memo: Any) -> Pending:
        """Copy within the process. The agreed state stays known, even if samples were removed since."""
        self.named()  # the copy has the same id
        return self.to(copy.deepcopy(self.held, memo), copy.deepcopy(self.held_rows, memo))


def _digest(sums: Statistics) -> str:
    sums.canonicalize()
    return "" if sums.empty else sums.digest()


def add_weights(weights: Counts, batch: SampleBatch, sign: int) -> None:
    """Add the weights of samples under the hashes of their ids, where they have ids."""
    if batch.ids is None:
        return
    key = shared_key()
    counts = [1] * len(batch) if batch.mult is None else [int(m) for m in batch.mult.tolist()]
    for sample_id, count in zip(batch.ids, counts, strict=True):
        add_counts(weights, {id_hash(sample_id, key): count}, sign)
