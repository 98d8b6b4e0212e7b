"""Merge history of a head, used to refuse counting a delta twice."""

from __future__ import annotations

import copy
import hashlib
import os
import weakref
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from torchlssvm.functional import checks
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.statistics.batch import SampleBatch

if TYPE_CHECKING:
    from torchlssvm.statistics import Statistics


@dataclass
class MergeHistory:
    """Merge history, used to refuse counting a delta twice.

    ``epoch`` and ``agreed``: how often ranks agreed, and the digest they agreed on (None: follows from the statistics);
    ``sink``: the rank that all changes were sent to, if that is what was done. ``origins``: deltas, copies and files that
    pending changes came from or went to. ``merged``: the ids of all deltas merged or handed over, with their origins.
    ``turn`` counts every change of what is pending: agreements and deltas taken.

    Of samples changed since the last agreement, in the memory of this process only: ``keys``, those whose ids were given,
    with their net count; ``ids``, the net weight under each id. No hash in there is ever saved, pickled or sent
    as it is. ``taken``: deltas that hold pending changes and have not been handed over.
    """

    epoch: int = 0
    agreed: str | None = ""
    sink: int | None = None
    origins: set[str] = field(default_factory=set)
    merged: set[str] = field(default_factory=set)
    keys: dict[bytes, int] = field(default_factory=dict)
    ids: dict[bytes, int] = field(default_factory=dict)
    taken: list[weakref.ref[Any]] = field(default_factory=list)
    turn: int = 0

    def note(self, batch: SampleBatch, sign: int, grid: FixedPoint | None) -> None:
        """Count samples that have ids."""
        add_to(self.keys, Counter(keys_of(batch, grid)), sign)
        add_to(self.ids, weights_by_id(batch), sign)

    @property
    def deltas(self) -> set[str]:
        """The ids of deltas that are pending."""
        return self.origins & self.merged

    def agreed_digest(self, statistics: Statistics) -> str:
        """The digest that was agreed on; empty if it is that of nothing."""
        if self.agreed is None:
            agreed = statistics.agreed()
            self.agreed = "" if agreed.empty else agreed.digest()
        return self.agreed

    def commit(self, epoch: int, agreed: str | None, merged: set[str], sink: int | None = None) -> None:
        """Record an agreement: nothing is pending any more."""
        self.epoch, self.agreed, self.sink, self.merged = epoch, agreed, sink, merged
        self.origins, self.keys, self.ids, self.taken = set(), {}, {}, []
        self.turn += 1

    def forget(self) -> None:
        """Forget what changed, after the statistics were replaced."""
        self.keys, self.ids, self.taken, self.agreed = {}, {}, [], None
        self.turn += 1

    def refuse_twice(self, merged: set[str]) -> None:
        """ValueError if any of these deltas, or of what is in them, was merged before."""
        twice = sorted(self.merged & merged)
        if not twice:
            return
        if ":" in twice[0]:
            raise ValueError(
                "the changes of this delta, or some of them, have been merged already, by way of a copy or a saved file of the "
                "head that they come from: they would count twice. If all of them were merged, agree(head) where they come "
                "from says so."
            )
        raise ValueError(f"the delta {twice[0]} has been merged already: its samples would count twice")

    def combine(self, other: MergeHistory, sign: int) -> None:
        """Add, or take away again, the merges of another head."""
        if sign < 0:
            self.merged -= other.merged
        else:
            self.merged |= other.merged
            self.origins |= other.origins

    # -- deltas taken --------------------------------------------------------------------------------------------------

    def outstanding(self) -> list[Any]:
        """Deltas that hold pending changes; one that was dropped without being handed over holds them no longer."""
        self.taken = [ref for ref in self.taken if ref() is not None]
        return [ref() for ref in self.taken]

    def lend(self, delta: Any) -> None:
        """Record that a delta holds pending changes."""
        self.taken.append(weakref.ref(delta))

    def give_back(self, delta: Any) -> None:
        """Record that a delta no longer holds them; its changes are still pending."""
        self.taken = [ref for ref in self.taken if ref() not in (None, delta)]

    def copied(self) -> None:
        """Give pending changes a mark before they are copied, so that a sync or merge of both copies is noticed."""
        if not any(o.startswith("copy:") for o in self.origins):
            self.origins.add("copy:" + os.urandom(16).hex())

    def _elsewhere(self) -> set[str]:
        """Ids of deltas that hold changes of the original: a copy has merged them, since what they hold is in it."""
        return {delta.id for delta in self.outstanding()}

    # -- saving --------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Saved part: no key of a sample, no digest of an earlier state, nothing by which a copy differs from its original."""
        taken = self._elsewhere()
        sets = {"origins": sorted(self.deltas | taken), "merged": sorted(self.merged | taken)}
        return {"epoch": self.epoch, "sink": self.sink} | sets

    @classmethod
    def from_json(cls, saved: dict[str, Any] | None) -> MergeHistory:
        """History from what :meth:`to_json` returned."""
        if saved is None:
            return cls(agreed=None)
        sink = saved["sink"]
        return cls(
            int(saved["epoch"]), None, None if sink is None else int(sink),
            set(map(str, saved["origins"])), set(map(str, saved["merged"])),
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: neither hashes of samples nor the digest of an earlier state leave the process."""
        return vars(replace(copy.deepcopy(self), agreed=None, keys={}, ids={}))

    def __deepcopy__(self, memo: Any) -> MergeHistory:
        """Copy everything but deltas taken, which belong to the original."""
        taken = self._elsewhere()
        return replace(
            self, origins=self.origins | taken, merged=self.merged | taken, taken=[], keys=dict(self.keys),
            ids=dict(self.ids),
        )  # fmt: skip


def add_to(counts: dict[bytes, int], other: dict[bytes, int], sign: int = 1) -> None:
    """counts += sign * other; what becomes zero is dropped."""
    for key, n in other.items():
        counts[key] = counts.get(key, 0) + sign * n
        if counts[key] == 0:
            del counts[key]


def as_loaded(origin: str) -> str:
    """The name that a saved file has where it is loaded."""
    return origin.replace("saved:", "file:", 1)


def keys_of(batch: SampleBatch, grid: FixedPoint | None) -> list[bytes]:
    """A hash of id, target and gridded features of each sample; none without ids, or with weights (parts of a sample)."""
    if batch.ids is None or batch.mult is not None or grid is None or checks.is_fake(batch.x):
        return []
    target = batch.labels[:, None] if batch.labels is not None else batch.targets
    assert target is not None
    x = batch.x.to_dense() if batch.x.is_sparse else batch.x
    rows = torch.cat([target.to(torch.float64), grid.quantize(x)], 1).cpu().numpy().astype("<f8", copy=False)
    return [
        hashlib.blake2b(str(i).encode() + b"\0" + row.tobytes(), digest_size=16).digest()
        for i, row in zip(batch.ids, rows, strict=True)
    ]


def weights_by_id(batch: SampleBatch) -> dict[bytes, int]:
    """The total weight of the samples under each id, by a hash of the id; nothing without ids."""
    if batch.ids is None or checks.is_fake(batch.x):
        return {}
    weights = [1] * len(batch) if batch.mult is None else [int(m) for m in batch.mult.tolist()]
    out: dict[bytes, int] = {}
    for i, weight in zip(batch.ids, weights, strict=True):
        key = hashlib.blake2b(str(i).encode(), digest_size=16).digest()
        out[key] = out.get(key, 0) + weight
    return out
