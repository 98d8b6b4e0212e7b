"""Changes of a head since machines last agreed, kept as a second, smaller set of sums.

Sums are a group, so what changed is a :class:`~torchlssvm.Statistics` too, with removals as negative samples. Until a head
first takes part in an agreement (``sync``, ``agree``, or a delta handed over) all it holds is pending, and no second sums are
kept: a head that never exchanges anything pays nothing.

**What survives a save.** Additions that are pending are saved beside the totals. Removals are not: totals minus pending changes
would be the sample removed. A head saved with removals pending holds the right samples, but what changed is no longer known
(:attr:`Tracking.LOST`); it has to start from an agreed state (``agree``) before the next exchange. No hash of a sample, and no
digest of an earlier state, is ever saved or pickled.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from enum import Enum
from typing import Any

from torch import Tensor

from torchlssvm.functional.sample_identity import id_hash, shared_key
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.batch import SampleBatch


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
        tracking: how the changes are known.
        statistics: their sums, with :attr:`Tracking.CHANGES`; otherwise None.
        id: a random id of these changes, made when they first leave the head (in a delta, a copy or a file). A head
            that has already counted this id refuses the changes.
        epoch: how often machines agreed.
        agreed: digest of the state agreed on, "" for an empty one; None when it was not computed.
        merged: ids of all deltas that were merged here or handed over from here.
        carried: the merged ids that are part of the pending changes.
        weights: net weight of samples changed, by a keyed hash of their ids, where ids were given.
        shrunk: something was removed since the last agreement.
    """

    def __init__(self) -> None:
        self.tracking, self.statistics = Tracking.ALL, None
        self.id: str | None = None
        self.epoch, self.agreed = 0, None
        self.merged, self.carried = set[str](), set[str]()
        self.weights: dict[bytes, int] = {}
        self.shrunk = False

    tracking: Tracking
    statistics: Statistics | None
    agreed: str | None

    def some(self, held: Statistics) -> bool:
        """True if anything is pending in a head with these sums."""
        if self.statistics is not None:
            self.statistics.canonicalize()
        return self.tracking is Tracking.LOST or not (self.statistics or held).empty

    def named(self, held: Statistics) -> str | None:
        """Return the id of the pending changes, created on first use; None if nothing is pending."""
        if self.some(held) and self.id is None:
            self.id = uuid.uuid4().hex
        return self.id if self.some(held) else None

    def sums(self, held: Statistics) -> Statistics:
        """Return the sums of the pending changes. Do not write to them; they are valid until the next change."""
        return held if self.statistics is None else self.statistics

    def agreed_sums(self, held: Statistics) -> Statistics:
        """Return the sums that were agreed on."""
        return held.zero() if self.statistics is None else held - self.statistics

    def agreed_digest(self, held: Statistics) -> str:
        """Return the digest of what was agreed on, "" for an empty state."""
        if self.agreed is None:
            agreed = self.agreed_sums(held)
            self.agreed = "" if agreed.empty else agreed.digest()
        return self.agreed

    # -- changes ---------------------------------------------------------------------------------------------------------

    def change(self, changes: list[tuple[SampleBatch, int]], shared: bool) -> None:
        """Take in changes of samples; ``shared``: there is a process group, which compares ids."""
        self.shrunk = self.shrunk or any(sign < 0 for _, sign in changes)
        if self.statistics is not None:
            self.statistics.change([(replace(batch, observer=None), sign) for batch, sign in changes])
        if shared or self.statistics is not None:
            for batch, sign in changes:
                add_weights(self.weights, batch, sign)

    def merge(self, sums: Statistics, sign: int) -> None:
        """Take in sums."""
        self.shrunk = self.shrunk or sign < 0
        if self.statistics is not None:
            self.statistics.merge(sums, sign)

    def restart(self, sums: Statistics, digest: str | None, epoch: int) -> None:
        """Start from an agreement: ``sums`` (usually empty) are the changes pending from now on."""
        self.tracking, self.statistics, self.id = Tracking.CHANGES, sums, None
        self.epoch, self.agreed = epoch, digest
        self.carried, self.weights, self.shrunk = set(), {}, not sums.empty

    def forget(self) -> None:
        """Forget what was agreed on, after the sums were replaced: all that is held is pending."""
        self.tracking, self.statistics, self.id, self.agreed = Tracking.ALL, None, None, None
        self.carried, self.weights, self.shrunk = set(), {}, False

    def refuse_twice(self, ids: set[str]) -> None:
        """ValueError if a delta with one of these ids is counted here already."""
        twice = sorted(self.merged & ids)
        if twice:
            raise ValueError(f"the delta {twice[0]} has been merged already: its samples would count twice")

    def combine(self, other: Pending, sign: int) -> None:
        """Add, or take away again, the deltas that another head merged."""
        if sign < 0:
            self.merged, self.carried = self.merged - other.merged, self.carried - other.merged
        else:
            self.merged, self.carried = self.merged | other.merged, self.carried | other.merged

    # -- saving ----------------------------------------------------------------------------------------------------------

    def copy(self) -> Pending:
        """Return an independent copy; both have the same id, so that they are not counted twice."""
        out = Pending()
        out.__dict__.update(vars(self))
        out.statistics = None if self.statistics is None else self.statistics.copy()
        out.merged, out.carried, out.weights = set(self.merged), set(self.carried), dict(self.weights)
        return out

    def to(self, device: Any) -> Pending:
        """Return the same on another device."""
        out = self.copy()
        out.statistics = None if self.statistics is None else self.statistics.to(device)
        return out

    def save(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Write as JSON fields and tensors; changes with removals among them are left out."""
        if self.statistics is not None:
            self.statistics.canonicalize()
        lost = self.statistics is not None and self.shrunk and not self.statistics.empty
        tracking = Tracking.LOST if lost else self.tracking
        meta = {
            "tracking": tracking.value, "epoch": self.epoch, "id": self.id, "merged": sorted(self.merged),
            "carried": sorted(self.carried),
        }  # fmt: skip
        return meta, {} if self.statistics is None or lost else self.statistics.state()

    @classmethod
    def load(cls, meta: dict[str, Any], tensors: dict[str, Tensor], like: Statistics) -> Pending:
        """Undo :meth:`save`; ``like``: sums of the same shape. ValueError, KeyError or TypeError when it does not fit."""
        out = cls()
        out.tracking, out.epoch = Tracking(meta["tracking"]), int(meta["epoch"])
        out.id = None if meta["id"] is None else str(meta["id"])
        out.merged, out.carried = set(map(str, meta["merged"])), set(map(str, meta["carried"]))
        if out.tracking is Tracking.CHANGES:
            out.statistics = like.zero()
            out.statistics.load(tensors)
        return out

    def __getstate__(self) -> dict[str, Any]:
        """For pickling, as :meth:`save`."""
        meta, tensors = self.save()
        return {"meta": meta, "tensors": tensors, "like": None if self.statistics is None else self.statistics.zero()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`__getstate__` returned."""
        self.__dict__.update(vars(Pending.load(state["meta"], state["tensors"], state["like"])))

    def __deepcopy__(self, memo: Any) -> Pending:
        """Copy within the process: what was agreed on stays known, whatever was removed since."""
        return self.copy()


def add_weights(weights: dict[bytes, int], batch: SampleBatch, sign: int) -> None:
    """Add the weights of samples under the hashes of their ids, where they have ids."""
    if batch.ids is None:
        return
    key = shared_key()
    counts = [1] * len(batch) if batch.mult is None else [int(m) for m in batch.mult.tolist()]
    for sample_id, count in zip(batch.ids, counts, strict=True):
        add_counts(weights, {id_hash(sample_id, key): count}, sign)


def add_counts(counts: dict[bytes, int], other: dict[bytes, int], sign: int = 1) -> None:
    """counts += sign * other; what becomes zero is dropped."""
    for key, n in other.items():
        counts[key] = counts.get(key, 0) + sign * n
        if counts[key] == 0:
            del counts[key]
