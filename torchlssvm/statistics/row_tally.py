"""The number of distinct samples in a change: what a sum gives away depends on that, and not on their weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchlssvm.functional import checks
from torchlssvm.functional.grid import FixedPoint

if TYPE_CHECKING:
    from torchlssvm.statistics.batch import Batch

MOST_ROWS = 256
"""So many rows of a class are told apart, added and removed each: a bound on memory and time; thresholds are far below."""

MOST_REMOVED = 32 * MOST_ROWS
"""A removal of more rows is not looked at row by row; the tally is incomplete from then on."""

PROCESS_KEY = os.urandom(16)
"""Row hashes are comparable within this process only, and never leave it."""


class RowTally:
    """A lower bound on the distinct rows in a signed change, for each fold and class.

    A row counts once, whatever its weight, and not at all when it was both added and removed; rows removed are subtracted from
    rows added, or the other way round. Past ``MOST_ROWS`` of a class further rows are not looked at: a surplus of rows added
    counts only if no removal went unseen, and the other way round. ``complete`` is False when there were changes that no row
    is known of.

    >>> from torchlssvm import FixedPoint, Statistics
    >>> stats, tally = Statistics(2, 2, grid=FixedPoint(8.0)), RowTally()
    >>> tally.note(stats.check(torch.ones(3, 2), torch.tensor([0, 0, 1])), 1, stats.grid)
    >>> tally.least(0, 0), tally.least(0, 1)
    (1, 1)
    """

    def __init__(self, complete: bool = True):
        """No row, or rows of which nothing is known."""
        self.complete = complete
        self.nets: dict[tuple[int, int], dict[bytes, int]] = {}
        self.unseen: dict[tuple[int, int], set[int]] = {}  # signs of rows that were not looked at
        self._closed: set[tuple[tuple[int, int], int]] = set()  # groups known to be full

    def note(self, batch: Batch, sign: int, grid: FixedPoint | None) -> None:
        """Count rows that were added (sign 1) or removed (-1)."""
        if not self.complete or not len(batch):
            return
        if grid is None or checks.is_fake(batch.x):
            self.complete = False
            return
        codes = np.zeros(len(batch), np.int64) if batch.labels is None else batch.labels.cpu().numpy()
        K = int(codes.max()) + 1
        codes = codes if batch.folds is None else batch.folds.cpu().numpy() * K + codes
        sizes = np.bincount(codes)
        looked_at, large = np.zeros(len(sizes), bool), []
        for code in np.flatnonzero(sizes).tolist():
            group = divmod(code, K)
            most = 2 * MOST_ROWS if sign > 0 or not self.nets.get(group) else MOST_REMOVED
            if self._full(group, sign):
                self.unseen.setdefault(group, set()).add(sign)
            elif sizes[code] <= most:
                looked_at[code] = True
            elif sign < 0 and most == MOST_REMOVED:
                self.lose()
                return
            else:
                self.unseen.setdefault(group, set()).add(sign)
                large.append(np.flatnonzero(codes == code)[:most])
        few = np.flatnonzero(looked_at[codes]) if looked_at.any() else np.zeros(0, np.int64)
        places = np.concatenate([few, *large])
        if len(places):
            self._count(batch, places, [divmod(code, K) for code in codes[places].tolist()], sign, grid)

    def _full(self, group: tuple[int, int], sign: int) -> bool:
        """Whether enough rows of this sign are known, so that more add nothing to the bound."""
        net = self.nets.get(group, {})
        if (group, sign) in self._closed or len(net) < MOST_ROWS:
            return len(net) >= MOST_ROWS
        same = sum(1 for n in net.values() if n * sign > 0)
        if same >= MOST_ROWS and (sign > 0 or same == len(net)):
            self._closed.add((group, sign))
            return True
        return False

    def _count(
        self, batch: Batch, places: NDArray[np.int64], groups: list[tuple[int, int]], sign: int, grid: FixedPoint
    ) -> None:
        """Count the rows at some places of a batch, each for its group."""
        pick = torch.from_numpy(places).to(batch.x.device)
        rows = grid.integers(batch.x[pick])
        if batch.targets is not None:
            rows = torch.cat([rows, batch.targets[pick].to(torch.int32)], 1)
        mult = [1] * len(groups) if batch.mult is None else batch.mult[pick].tolist()
        for group, row, m in zip(groups, rows.cpu().numpy(), mult, strict=True):
            net = self.nets.setdefault(group, {})
            key = hashlib.blake2b(row, digest_size=16, key=PROCESS_KEY).digest()
            count = net.get(key, 0) + sign * int(m)
            if count:
                net[key] = count
            else:
                del net[key]
        self._closed -= {(group, s) for group in set(groups) for s in (1, -1)}

    def lose(self) -> None:
        """There was a change that no row is known of."""
        self.__init__(complete=False)  # type: ignore[misc]

    def combine(self, other: RowTally, sign: int = 1) -> None:
        """Count what another tally counted, or take it back."""
        if not (self.complete and other.complete):
            self.lose()
            return
        self._closed.clear()
        for group, theirs in other.nets.items():
            net = self.nets.setdefault(group, {})
            for key, n in theirs.items():
                count = net.get(key, 0) + sign * n
                if count:
                    net[key] = count
                else:
                    net.pop(key, None)
        for group, signs in other.unseen.items():
            self.unseen.setdefault(group, set()).update(s * sign for s in signs)

    def copy(self) -> RowTally:
        """An independent one."""
        out = RowTally(self.complete)
        out.combine(self)
        return out

    def least(self, fold: int, label: int | None) -> int:
        """The number of distinct rows of a class (None: of all) that are known to be in the change; 0 if nothing is known."""
        if not self.complete:
            return 0
        if label is None:
            return max((self.least(*g) for g in self.nets if g[0] == fold), default=0)
        unseen = self.unseen.get((fold, label), set())
        return _counted(self.nets.get((fold, label), {}).values(), unseen)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: no hash of a row leaves the process."""
        return vars(RowTally(self.complete and not any(self.nets.values()) and not self.unseen))

    def __deepcopy__(self, memo: Any) -> RowTally:
        """In the same process the hashes stay comparable."""
        return self.copy()


def _counted(nets: Iterable[int], unseen: set[int]) -> int:
    """Rows added less rows removed, or the other way round, whatever the rows not looked at were."""
    surplus = sum(1 if n > 0 else -1 for n in nets)
    return 0 if (-1 if surplus > 0 else 1) in unseen else abs(surplus)
