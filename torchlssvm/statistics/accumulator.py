"""Exact sums of q q^T and z q^T over signed samples: the machinery below :class:`~torchlssvm.Statistics`.

The sums have three levels. A full level is added to the next one. All levels are exact if there is a grid.

    tail  - up to 1,024 rows, not yet summed; a single sample costs a row copy, and is summed with the others by one product
    acc   - float64 sums of one group, exact while the bound on its entries stays below 2^53
    sums  - int64 sums per group (float64 without a grid), the canonical state

A *group* is a class, a fold, both, or everything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchlssvm.functional import checks, gram, sparse_rows
from torchlssvm.functional.device_products import require_exact_products
from torchlssvm.functional.threads import PASS_WORK, share_out, threads_for
from torchlssvm.statistics.batch import SampleBatch

PRODUCT_ROWS = 1024
"""Most rows that wait, and fewest rows in one product if it stays exact. Products of this size run at full speed."""

TAIL_ROWS = 256
"""Most rows of a change that waits in the tail. A larger change fills a product of its own."""

SHARED_RUNS = 4
"""Fewest runs of rows that threads share. Fewer runs are multiplied one after the other, each on all threads."""

DIRECT_NUMBERS = 2**24
"""Numbers (128 MiB) of a group beyond which products are added strip by strip, to avoid a second array of that size."""

_carrying = threading.Lock()  # held while a thread adds to canonical sums


def split_runs(bounds: NDArray[np.float64], chunk: int = PRODUCT_ROWS) -> list[tuple[int, int]]:
    """Split rows into runs of at most 1,024, or as given, whose products sum exactly. bounds: (B,)."""
    out: list[tuple[int, int]] = []
    stack = [(a, min(a + chunk, len(bounds))) for a in range(0, len(bounds), chunk)][::-1]
    while stack:
        a, b = stack.pop()
        if b - a > 1 and float(bounds[a:b].sum()) > gram.LARGEST_EXACT_INTEGER:
            middle = (a + b) // 2
            stack += [(middle, b), (a, middle)]
        else:
            out.append((a, b))
    return out


def bound_sums(sums: Sequence[Tensor], moments: Tensor) -> float:
    """Bound every sum, over all groups together, from the packed sums and the moments themselves."""
    tops = [torch.maximum(v.amax(), -v.amin()) for v in sums]
    host = checks.to_host(*tops, moments.abs().amax())
    return float(max(h[0] for h in host)) * max(1, sum(h[0] > 0 for h in host[:-1]))


class FloatSums:
    """The middle level: float64 sums of one group at a time, and the memory in which rows are put on the grid.

    Threads that share rows have one each. They may finish in any order, because the sums are integers.
    """

    def __init__(self, sums: Accumulator):
        """Take memory for the rows; that of the sums is taken when it is needed."""
        self.sums = sums
        self.rows = torch.empty(sums.chunk, sums.J + sums.R, dtype=torch.float64, device=sums.device)
        self.scratch = torch.empty(sums.chunk, sums.J, dtype=torch.float32, device=sums.device)
        self.packed: Tensor | None = None
        self.group, self.bound = 0, 0.0

    def open(self, group: int, bound: float) -> Tensor:
        """Return the sums of a group with room for ``bound``."""
        if self.packed is None:
            size = gram.packed_size(self.sums.J, self.sums.R, product=True)
            self.packed = torch.zeros(size, dtype=torch.float64, device=self.sums.device)
        if group != self.group or self.bound + bound > gram.LARGEST_EXACT_INTEGER:
            self.carry()
        self.group = group
        self.bound += bound
        self.sums.incomplete = True
        self.sums.touched.add(group)
        return self.packed

    def add(self, group: int, rows: Tensor, mult: Tensor | None, alpha: float, bound: float) -> None:
        """Add the products of rows (b, J + R), times alpha and their multiplicities (b,)."""
        scaled = None if mult is None else rows * mult[:, None]
        if self.sums.direct:
            gram.add_products_(self.sums.canonical(group), rows, self.sums.J, scaled, alpha)
        else:
            gram.accumulate_(self.open(group, bound), rows, self.sums.J, scaled, alpha)

    def carry(self) -> None:
        """Move the sums into the canonical ones. Changes no value."""
        if self.packed is None or self.bound == 0.0:
            return
        s = self.sums
        with _carrying:
            s.sums[self.group] = gram.carry_(s.sums.get(self.group), self.packed, s.J, s.R, s.dtype)
        self.packed.zero_()
        self.bound = 0.0


class Accumulator:
    """Sums of [q; z] q^T per group. ``quantize(x, out, scratch)`` writes the float64 rows to sum.

    The side columns z are [1, targets] or one-hot labels, or 1 if each class or label has sums of its own.
    """

    def __init__(
        self,
        J: int,
        R: int,
        groups: int,
        per_class: bool,
        exact: bool,
        device: torch.device,
        quantize: Callable[[Tensor, Tensor, Tensor | None], object],
    ):
        """Start at zero. J features, R side columns; ``exact``: rows are integers."""
        self.J, self.R, self.groups, self.per_class = J, R, groups, per_class
        self.exact, self.device, self.quantize = exact, device, quantize
        self.dtype = torch.int64 if exact else torch.float64
        if exact and device.type not in ("cpu", "meta"):
            require_exact_products(device)
        self.direct = gram.packed_size(J, R) > DIRECT_NUMBERS
        # 2**17: numbers of the rows of one product among many; 1 MB of float64 stays in the cache
        self.chunk = max(PRODUCT_ROWS, 2**17 // (J + R))
        self.sums: dict[int, Tensor] = {}
        self.touched: set[int] = set()  # groups whose sums changed since this was last cleared
        self._floats: FloatSums | None = None
        self._length, self._tail_bound = 0, 0.0
        self.incomplete = False
        """True while rows wait, or float64 sums are not yet carried."""

    # -- in ------------------------------------------------------------------------------------------------------------

    def write_side(self, batch: SampleBatch, pick: slice | Tensor, out: Tensor) -> None:
        """Write the side columns of some rows. out: (b, R)."""
        if self.per_class:
            out.fill_(1.0)
        elif batch.targets is not None:
            out[:, 0] = 1.0
            out[:, 1:] = batch.targets[pick]
        else:
            assert batch.labels is not None
            out.zero_().scatter_(1, batch.labels[pick][:, None], 1.0)

    def append(self, changes: list[tuple[SampleBatch, int]]) -> list[Tensor] | None:
        """Put a few rows into the tail and return views of their features. For more rows, do nothing and return None."""
        rows = sum(len(batch) for batch, _ in changes)
        bound = sum(batch.gross for batch, _ in changes) if self.exact else float(rows)
        if rows > TAIL_ROWS or bound > gram.LARGEST_EXACT_INTEGER or any(batch.x.is_sparse for batch, _ in changes):
            return None
        if self._length + rows > PRODUCT_ROWS or self._tail_bound + bound > gram.LARGEST_EXACT_INTEGER:
            self.flush()
        buffer, views = self._room().rows, []
        for batch, sign in changes:
            start, stop = self._length, self._length + len(batch)
            q, codes = buffer[start:stop, : self.J], batch.codes(self.per_class)
            self.quantize(batch.x, q, None)
            if batch.observer is not None:
                batch.observer(slice(None), q)
            self.write_side(batch, slice(None), buffer[start:stop, self.J :])
            self._factors[start:stop] = sign if batch.mult is None else batch.mult * sign
            if codes is not None:
                self._codes[start:stop] = codes
            self._length = stop
            views.append(q)
        self._tail_bound += bound
        self.incomplete = True
        return views

    def push(self, batch: SampleBatch, sign: int) -> None:
        """Sum many rows at once, in chunks that stay exact."""
        self.flush()
        if batch.x.is_sparse:
            self._push_sparse(batch, sign)
            return
        codes = batch.codes(self.per_class)
        with threads_for(2.0 * len(batch) * self.J**2):
            if codes is None:
                self._push_group(0, batch, sign, None, batch.bounds)
            else:
                for group, index, place in self._by_group(codes):
                    self._push_group(group, batch, sign, index, batch.bounds[place])
            if self._floats is not None:
                for used in (self._floats.rows, self._floats.scratch):
                    used[: len(batch)].zero_()

    def _push_sparse(self, batch: SampleBatch, sign: int) -> None:
        """Sum sparse rows directly into the canonical sums. Rows with many entries become dense, one block at a time."""
        x, values = batch.x, batch.x.values()
        if values.numel() > x.numel() / 32:  # dense products are faster (measured: from 0.03)
            for some, part in sparse_rows.dense_parts(x, PRODUCT_ROWS):
                self.push(batch.pick(np.arange(some.start, some.stop), part), sign)
            return
        q = torch.empty(values.shape, dtype=torch.float64, device=self.device)
        self.quantize(values, q, None)
        if batch.observer is not None:
            batch.observer(slice(None), sparse_rows.with_values(x, q))
        index, columns = x.indices()
        scaled = q * (sign if batch.mult is None else (batch.mult * sign)[index])
        z = batch.labels
        if z is None or self.per_class:
            z = torch.empty(len(batch), self.R, dtype=torch.float64, device=self.device)
            self.write_side(batch, slice(None), z)
        codes = batch.codes(self.per_class)
        places = None if codes is None else torch.from_numpy(codes).to(self.device, non_blocking=True)[index]
        for group in [0] if codes is None else np.unique(codes).tolist():
            own = slice(None) if places is None else places == group
            entries = (index[own], columns[own], q[own], scaled[own])
            sparse_rows.add_products_(self.canonical(group), *entries, z, self.J, self.R)

    def _by_group(self, codes: NDArray[np.int64]) -> Iterator[tuple[int, Tensor | None, NDArray[np.int64] | slice]]:
        """The row numbers of each group that has rows, on the device (None: all rows) and on the host.

        The rows of a group are summed together.
        """
        sizes = np.bincount(codes, minlength=self.groups)
        present = sizes.nonzero()[0].tolist()
        if len(present) == 1:
            yield present[0], None, slice(None)
            return
        order = np.argsort(codes, kind="stable")
        parts = torch.from_numpy(order).to(self.device, non_blocking=True).split(sizes[present].tolist())
        yield from zip(present, parts, np.split(order, np.cumsum(sizes[present])[:-1]), strict=True)

    def _push_group(
        self, group: int, batch: SampleBatch, sign: int, index: Tensor | None, bounds: NDArray[np.float64]
    ) -> None:
        runs, add = split_runs(bounds, self.chunk), partial(self._add_runs, group, batch, sign, index, bounds)
        if self.exact and self.device.type == "cpu" and not self.direct and len(runs) >= SHARED_RUNS:
            share_out(lambda some: add(FloatSums(self), some).carry(), runs, self.device)
        else:
            add(self._room(), iter(runs))

    def _add_runs(
        self, group: int, batch: SampleBatch, sign: int, index: Tensor | None, bounds: NDArray[np.float64],
        floats: FloatSums, runs: Iterator[tuple[int, int]],
    ) -> FloatSums:  # fmt: skip
        """Put runs of rows on the grid and add them to the group's sums. index: (n,), the rows of the group; None: all."""
        for a, b in runs:
            pick, rows = slice(a, b) if index is None else index[a:b], floats.rows[: b - a]
            part = batch.x[pick]
            with threads_for(PASS_WORK * part.numel()):
                self.quantize(part, rows[:, : self.J], floats.scratch)
                if batch.observer is not None:
                    batch.observer(pick, rows[:, : self.J])
            self.write_side(batch, pick, rows[:, self.J :])
            by = None if batch.mult is None else batch.mult[pick]
            floats.add(group, rows, by, float(sign), float(bounds[a:b].sum()))
        return floats

    def _room(self) -> FloatSums:
        if self._floats is None:
            self._floats = FloatSums(self)
            self._factors = torch.empty(PRODUCT_ROWS, dtype=torch.float64, device=self.device)
            self._codes = np.zeros(PRODUCT_ROWS, dtype=np.int64)
        return self._floats

    def move_side(
        self, x: Tensor, old: Tensor, new: Tensor, mult: Tensor | None, bounds: NDArray[np.float64]
    ) -> Tensor:
        """Move rows from class ``old`` to ``new``, for one group and one-hot sides. M does not change. Returns the rows."""
        q = torch.empty(x.shape, dtype=torch.float64, device=self.device)
        self.quantize(x, q, None)
        moved = q if mult is None else q * mult[:, None]
        if self.direct:
            side = gram.side_view(self.canonical(0), self.J, self.R)
            side.index_add_(0, new, moved.to(self.dtype)).index_add_(0, old, moved.to(self.dtype), alpha=-1)
            return q
        for a, b in split_runs(bounds):
            side = gram.side_view(self._room().open(0, float(bounds[a:b].sum())), self.J, self.R, product=True)
            side.index_add_(0, new[a:b], moved[a:b])
            side.index_add_(0, old[a:b], moved[a:b], alpha=-1)
        return q

    # -- between the levels --------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Sum the rows that wait in the tail."""
        length, self._length = self._length, 0
        if not length:
            return
        bound, self._tail_bound = self._tail_bound, 0.0
        floats, factors = self._room(), self._factors[:length]
        rows = floats.rows[:length]
        with threads_for(2.0 * length * self.J**2):
            for group, index, _ in self._by_group(self._codes[:length]):
                pick = slice(None) if index is None else index
                floats.add(group, rows[pick], factors[pick], 1.0, bound)
        rows.zero_()  # a row removed later must not stay in memory

    def canonical(self, group: int) -> Tensor:
        """Return the canonical sums of a group, to be changed in place."""
        if group not in self.sums:
            self.sums[group] = self._zeros()
        self.touched.add(group)
        self.incomplete = True
        return self.sums[group]

    def complete(self) -> None:
        """Bring every row into the canonical sums."""
        self.flush()
        if self._floats is not None:
            self._floats.carry()
        self.incomplete = False
        if self.direct:
            self._floats = None  # as large as a strip; the next rows reallocate it

    def total(self, group: int) -> Tensor:
        """Return the canonical packed sums of a group (zeros if it has none). The sums must be complete."""
        return self.sums[group] if group in self.sums else self._zeros()

    def _zeros(self) -> Tensor:
        return torch.zeros(gram.packed_size(self.J, self.R), dtype=self.dtype, device=self.device)

    @property
    def diag(self) -> Tensor:
        """The diagonal of each group's M (groups, J). The sums must be complete."""
        none = torch.zeros(self.J, dtype=self.dtype, device=self.device)
        known = {group: gram.diagonal(sums, self.J) for group, sums in self.sums.items()}
        return torch.stack([known.get(group, none) for group in range(self.groups)])

    def replace_sums(self, sums: dict[int, Tensor]) -> None:
        """Replace the sums held by other packed sums (the tensors themselves, not copies)."""
        self.complete()
        self.sums = sums
        self.touched.update(range(self.groups))
