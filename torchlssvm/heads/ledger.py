"""Where a head's samples came from, as far as that shows when something would be counted twice."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.statistics.batch import Batch


@dataclass
class Ledger:
    """What a head knows of its exchange with others.

    ``epoch`` and ``agreed``: how often ranks agreed, and the digest they agreed on; ``sink``: the rank that all changes were
    sent to, if that is what was done. ``origins``: copies and files that pending changes came from. ``merged``: the ids of
    all deltas merged. ``keys``: samples changed since the last agreement whose ids were given, with their net count.
    """

    epoch: int = 0
    agreed: str = ""
    sink: int | None = None
    origins: set[str] = field(default_factory=set)
    merged: set[str] = field(default_factory=set)
    keys: dict[bytes, int] = field(default_factory=dict)

    def note(self, batch: Batch, sign: int, grid: FixedPoint | None) -> None:
        """Count samples that have ids."""
        for key in keys_of(batch, grid):
            self.keys[key] = self.keys.get(key, 0) + sign
            if self.keys[key] == 0:
                del self.keys[key]

    @property
    def deltas(self) -> set[str]:
        """The ids of deltas that are pending."""
        return self.origins & self.merged

    def commit(self, epoch: int, agreed: str, merged: set[str], sink: int | None = None) -> None:
        """Nothing is pending any more."""
        self.epoch, self.agreed, self.sink, self.merged = epoch, agreed, sink, merged
        self.origins, self.keys = set(), {}

    def refuse_twice(self, merged: set[str]) -> None:
        """ValueError if any of these deltas was merged before."""
        twice = sorted(self.merged & merged)
        if twice:
            raise ValueError(f"the delta {twice[0]} has been merged already: its samples would count twice")

    def combine(self, other: Ledger, sign: int) -> None:
        """Take over, or give back, what another head merged."""
        if sign < 0:
            self.merged -= other.merged
        else:
            self.merged |= other.merged
            self.origins |= other.origins

    def copied(self) -> None:
        """A copy is about to be made of pending changes: if two ranks bring it to a sync, it shows."""
        if not any(o.startswith("copy:") for o in self.origins):
            self.origins.add("copy:" + os.urandom(16).hex())

    def to_json(self) -> dict[str, Any]:
        """What is saved: no key of a sample."""
        sets = {"origins": sorted(self.origins), "merged": sorted(self.merged)}
        return {"epoch": self.epoch, "agreed": self.agreed, "sink": self.sink} | sets

    @classmethod
    def from_json(cls, saved: dict[str, Any] | None) -> Ledger:
        """Undo :meth:`to_json`."""
        if saved is None:
            return cls()
        sink = saved["sink"]
        return cls(
            int(saved["epoch"]), str(saved["agreed"]), None if sink is None else int(sink),
            set(map(str, saved["origins"])), set(map(str, saved["merged"])),
        )  # fmt: skip


def keys_of(batch: Batch, grid: FixedPoint | None) -> list[bytes]:
    """A hash of id, target and gridded features of each sample; none without ids, or with weights (parts of a sample)."""
    if batch.ids is None or batch.mult is not None or grid is None or checks.is_fake(batch.x):
        return []
    target = batch.labels[:, None] if batch.labels is not None else batch.targets
    assert target is not None
    rows = torch.cat([target.to(torch.float64), grid.quantize(batch.x)], 1).cpu().numpy().astype("<f8", copy=False)
    return [
        hashlib.blake2b(str(i).encode() + b"\0" + row.tobytes(), digest_size=16).digest()
        for i, row in zip(batch.ids, rows, strict=True)
    ]


def pending(statistics: Any) -> bool:
    """Whether there is anything that has not been agreed on. statistics: a Statistics; rows that wait count."""
    base = statistics._base
    if base is None:
        return not statistics.empty
    if statistics.empty:
        return base.choices.kind is not None
    statistics._sums.settle()
    return bool(base.sums) or not _same(statistics._side, base.side)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)
