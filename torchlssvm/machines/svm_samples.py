"""What the incremental SVM keeps of each sample, by position, and the kernel rows it computes from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.functional.loops import load
from torchlssvm.kernels import RBF, Kernel
from torchlssvm.machines.svm_rows import RowCache

VECTORS = ("y", "weight", "u", "alpha", "sign", "slack")
"""Per sample: label -1 or +1, weight of C, upper bound u = weight C, coefficient, the side that g must keep to (+1: g >= 0,
the reserve set; -1: g <= 0, the error set; 0: a margin vector), and the slack sign * g, infinite for a margin vector."""


def _numpy(t: Tensor) -> Any:
    return t.numpy() if type(t) is Tensor else t  # a subclass has no memory here: a fake tensor


def _same(t: Tensor) -> Any:
    return t


def places(where: Any) -> Any:  # (n,) -> (k,)
    """The indices at which a host array is not zero."""
    found = where.nonzero()
    return found[0] if isinstance(found, tuple) else found[:, 0]


def as_tensor(values: Any) -> Tensor:
    """A host array, or a tensor, as a tensor on the same memory."""
    return values if isinstance(values, Tensor) else torch.from_numpy(values)


ALL = np.empty(0, dtype=np.int64)
WIDE = 30.0
"""gamma |x|^2 beyond which RBF is computed from differences."""


def _per_sample(name: str) -> Any:
    """One of VECTORS as a tensor (n,)."""
    return property(lambda self: self.vectors[name][: self.n])


class Samples:
    """Samples in positions 0..n-1 of buffers that double; a removal moves the last sample into the gap.

    Rows of Q are computed on demand and kept, up to ``cache_bytes``, for the next time. ``host(t)`` is the same memory as a
    NumPy array where it is on the CPU (an operation on a few hundred numbers costs a fifth of what a tensor's does), else t;
    attributes that begin with h are such views.
    """

    y: Tensor = _per_sample("y")
    weight: Tensor = _per_sample("weight")
    u: Tensor = _per_sample("u")
    alpha: Tensor = _per_sample("alpha")
    sign: Tensor = _per_sample("sign")
    slack: Tensor = _per_sample("slack")

    def __init__(self, kernel: Kernel | None, device: torch.device, cache_bytes: int):
        self.kernel, self.device, self.cache_bytes = kernel, device, cache_bytes
        self.host = _numpy if device.type == "cpu" else _same
        self.n, self.capacity = 0, 0
        self.scale = 1.0  # the largest K(x, x) seen: what rounding is measured by
        self.ids: list[int] = []
        self.where: dict[int, int] = {}  # id -> position
        self._set_x(self._new(0, 0), self._new(0, 0))
        self._centre: Any = None
        self.wide = False
        self._set_vectors(self._new(len(VECTORS), 0))
        self.forget_rows()

    def _new(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64, device=self.device)

    def zeros(self) -> Any:  # -> (n,)
        """On the host."""
        return np.zeros(self.n) if isinstance(self._whole, np.ndarray) else self._new(self.n)

    def _set_vectors(self, whole: Tensor) -> None:  # (6, capacity)
        self.vectors = dict(zip(VECTORS, whole, strict=True))
        self._whole = self.host(whole)
        self._set_n(self.n)

    def _set_n(self, n: int) -> None:
        self.n = n
        self.hy, self.hweight, self.hu, self.halpha, self.hsign, self.hslack = self._whole[:, :n]

    @property
    def loops(self) -> Any:
        """Compiled rows of Q, where the memory is the host's and they are installed."""
        return load("svm_kernel_loops") if isinstance(self._whole, np.ndarray) else None

    def _set_x(self, x: Tensor, lift: Tensor) -> None:  # (capacity, J), (capacity, J + 2)
        """Prepared rows, or the Gram matrix itself; and for RBF the rows of :meth:`_lifted`."""
        self.x, self._lift = x, lift
        self.hx, self.hlift = self.host(x), self.host(lift)

    @property
    def g(self) -> Tensor:
        """g (n,): zero for margin vectors."""
        return torch.where(self.sign == 0, 0.0, self.slack * self.sign)

    @property
    def lifted(self) -> bool:
        """Whether rows of Q come from the rows of :meth:`_lifted`."""
        return type(self.kernel) is RBF and not self.wide

    @property
    def precomputed(self) -> bool:
        """Whether x is the Gram matrix."""
        return self.kernel is None

    # -- appending and deleting ----------------------------------------------------------------------------------------

    def snapshot(self, n: int) -> Any:  # (4, n)
        """A copy of u, alpha, sign and slack of the first n."""
        copy = self._whole[2:, :n]
        return copy.clone() if isinstance(copy, Tensor) else copy.copy()

    def put_back(self, snapshot: Any) -> None:
        """u, alpha, sign and slack as they were."""
        self._whole[2:, : snapshot.shape[1]] = snapshot

    def append(self, x: Tensor, ids: list[int], **vectors: Tensor) -> range:  # (B, J), or (B, n + B) if precomputed
        """Take over samples; returns their positions. Cached rows are to be extended, or forgotten, by the caller."""
        old, n = self.n, self.n + len(ids)
        self._reserve(n, x.shape[1])
        if self.precomputed:
            self.x[old:n, :n] = x
            self.x[:old, old:n] = x[:, :old].T
        else:
            self.hx[old:n] = self.host(x)
        new = self._whole[:, old:n]
        new[:] = 0.0
        for name, value in vectors.items():
            new[VECTORS.index(name)] = self.host(value)
        self.ids += ids
        self.where.update(zip(ids, range(old, n), strict=True))
        self._set_n(n)
        self._lifted(old, n)
        self._measure(old, n)
        return range(old, n)

    def delete(self, positions: Iterable[int]) -> list[tuple[int, int]]:
        """Drop samples; returns the moves (from, to) by which the last samples filled the gaps, in order.

        Where the last sample itself is dropped, from and to are the same.
        """
        moves = []
        for i in sorted(positions, reverse=True):
            last = self.n - 1
            del self.where[self.ids[i]]
            moves.append((last, i))
            if i != last:
                self._whole[:, i] = self._whole[:, last]
                x, lift = self.hx, self.hlift
                x[i] = x[last]
                if self.precomputed:
                    x[:, i] = x[:, last]
                if len(lift):
                    lift[i] = lift[last]
                self.ids[i] = self.ids[last]
                self.where[self.ids[i]] = i
            self.ids.pop()
            self.rows.move(last, i)
            self._set_n(last)
        return moves

    def rename(self, names: dict[int, int]) -> None:
        """Give samples other ids."""
        for old, new in names.items():
            i = self.where.pop(old)
            self.ids[i], self.where[new] = new, i

    def truncate(self, n: int) -> None:
        """Drop everything from position n on: what was appended last, and failed."""
        while self.n > n:
            self.delete([self.n - 1])

    def _reserve(self, n: int, J: int) -> None:
        if n <= self.capacity and (self.precomputed or self.x.shape[1] == J):
            return
        capacity = max(16, self.capacity)
        while capacity < n:
            capacity *= 2
        x = self._new(capacity, capacity if self.precomputed else J)
        if self.n:
            x[: self.n, : self.x.shape[1]] = self.x[: self.n]
        lift = self._new(0, 0)
        if type(self.kernel) is RBF:
            lift = self._new(capacity, J + 2)
            if self.n:
                lift[: self.n] = self._lift[: self.n]
        self._set_x(x, lift)
        vectors = self._new(len(VECTORS), capacity)
        for new, old in zip(vectors, self.vectors.values(), strict=True):
            new[: self.n] = old[: self.n]
        self._set_vectors(vectors)
        self.capacity = capacity
        self.forget_rows()

    def change_kernel(self, kernel: Kernel | None, x: Tensor | None) -> None:
        """Another kernel, on other rows x (n, J) where they are not the same: the Gram matrix (n, n), if precomputed."""
        self.kernel, n, capacity = kernel, self.n, self.capacity
        rows = self.x
        if x is not None:
            rows = self._new(capacity, capacity if kernel is None else x.shape[1])
            rows[: len(x), : x.shape[1]] = x
        self._set_x(rows, self._new(capacity, rows.shape[1] + 2) if type(kernel) is RBF else self._new(0, 0))
        self.forget_rows()
        self.scale, self.wide = 1.0, False
        self._lifted(0, n)
        self._measure(0, n)

    # -- rows of the kernel --------------------------------------------------------------------------------------------

    def _measure(self, start: int, stop: int) -> None:
        if type(self.kernel) is not RBF and stop > start and not checks.is_fake(self.x):
            if start == 0:
                self.scale = torch.finfo(torch.float64).tiny
            self.scale = max(self.scale, float(self.diagonal(start).amax()))

    def _lifted(self, start: int, stop: int) -> None:
        """Rows P_i = [x_i, |x_i|^2, 1] of RBF, for which -gamma |x - z|^2 = P_x . [2 gamma z, -gamma, -gamma |z|^2].

        One product and one exp make a row; centred on the first batch, a common offset costs no digits. Where gamma |x|^2 is
        large the product would cost some, and differences are taken instead.
        """
        if not len(self.hlift) or start == stop:
            return
        whole = self.hx
        if self._centre is None or start == 0:
            self._centre = whole[start:stop].mean(0)
        if (loops := self.loops) is not None:
            largest = loops.lift(whole, self._centre, self.hlift, start, stop)
        else:
            x, lift = whole[start:stop] - self._centre, self.hlift[start:stop]
            squares = (x * x).sum(1)
            lift[:, :-2] = x
            lift[:, -2] = squares
            lift[:, -1] = 1.0
            largest = 0.0 if checks.is_fake(self.x) else float(squares.max())
        if not self.wide:
            assert isinstance(self.kernel, RBF)
            self.wide = largest * self.kernel.gamma > WIDE
            if self.wide:
                self.forget_rows()

    def q(self, i: int, keep: bool = True) -> Tensor:  # -> (n,)
        """Q_i: = y_i y K(x_i, X), from the cache if it is there, and then there if ``keep``. Not to be written to."""
        row = self.rows.get(i, self.n)
        if row is None:
            row = self.compute(i)
            if keep:
                self.rows.put(i, self.host(row), self.n)
        return row

    def compute(self, i: int, at: Any = None) -> Tensor:  # (k,) on the host -> (n,) or (k,)
        """Q_i:, not from the cache; ``at``: with the samples in these positions only."""
        if not self.lifted:
            return self.block(torch.tensor([i], device=self.device), None if at is None else as_tensor(at))[
                0
            ].contiguous()
        assert isinstance(self.kernel, RBF)
        lift = self.hlift
        if (loops := self.loops) is not None:
            out = np.empty(self.n if at is None else len(at))
            loops.gaussian(lift, i, self.kernel.gamma, self.hy, ALL if at is None else at, out)
            return torch.from_numpy(out)
        z = lift[i] * (2 * self.kernel.gamma)
        z[-1] = z[-2] * -0.5
        z[-2] = -self.kernel.gamma
        rows, y = (self._lift[: self.n], self.hy) if at is None else (as_tensor(lift[at]), self.hy[at])
        row = torch.mv(rows, as_tensor(z)).clamp_(max=0.0).exp_()
        h = self.host(row)
        h *= y
        if self.hy[i] < 0:
            h *= -1.0
        return row

    def block(self, i: Tensor, j: Tensor | None = None) -> Tensor:  # (k,), (l,) -> (k, l)
        """Q_ij for positions i and j (all of them by default)."""
        if self.precomputed:
            K = self.x[i][:, : self.n] if j is None else self.x[i][:, j]
        elif type(self.kernel) is RBF:
            K = self._between(self._lift[i], self._lift[: self.n] if j is None else self._lift[j])
        else:
            assert self.kernel is not None
            K = self.kernel.tiled(self.x[i], self.x[: self.n] if j is None else self.x[j]).to(torch.float64)
        return K * self.y[i][:, None] * (self.y if j is None else self.y[j])

    def _between(self, p: Tensor, other: Tensor) -> Tensor:
        assert isinstance(self.kernel, RBF)
        if self.wide:
            rows = max(1, 2**20 // max(1, other[:, :-2].numel()))
            parts = [(a[:, None, :-2] - other[None, :, :-2]).square().sum(-1) for a in p.split(rows)]
            return torch.cat(parts).mul_(-self.kernel.gamma).exp_()
        z = torch.cat([p[:, :-2] * 2, -torch.ones_like(p[:, :1]), -p[:, -2:-1]], 1) * self.kernel.gamma
        return torch.mm(z, other.T).clamp_(max=0.0).exp_()

    def product(self, v: Tensor) -> Tensor:  # (n,) -> (n,)
        """Q v, using only the columns where v is not zero, a few thousand kernel values at a time."""
        out = torch.zeros_like(v)
        used = v.nonzero()[:, 0]
        for part in used.split(max(1, 2**22 // max(1, self.n))):
            out.addmv_(self.block(part).T, v[part])
        return out

    def diagonal(self, start: int = 0) -> Tensor:  # -> (n - start,)
        """K(x_i, x_i) from position ``start`` on."""
        if self.precomputed:
            return self.x.diagonal()[start : self.n].clone()
        assert self.kernel is not None
        if type(self.kernel) is RBF:
            return torch.ones_like(self.y[start:])
        if not self.kernel.deep:
            return self.kernel.diag(self.x[start : self.n]).to(torch.float64)
        at = torch.arange(start, self.n, device=self.device)  # x holds rows that are prepared already
        return torch.cat([self.block(i, i).diagonal() for i in at.split(64)])

    def forget_rows(self) -> None:
        """Empty the cache: the kernel or the buffers have changed."""
        self.rows = RowCache(self.capacity, self.cache_bytes, self.device, self.host)
