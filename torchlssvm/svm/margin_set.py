r"""The margin set S: coefficients, A, its inverse R, rows of Q, and the samples that a walk watches.

Many margin vectors enter and leave at once, by the block forms of (13) and (14). With the columns H = [y_c; Q_Sc] of k samples
c that enter, and V = -R H,

    Gamma = Q_cc + H^T V                                                                                          (12)
    R <- [[R + V G V^T, V G], [G V^T, G]],  G = Gamma^-1                                                           (13)
    R <- R - R_:l R_ll^-1 R_l:                                                                                     (14)

Gamma is the Gram matrix of the parts of the k samples outside the span of S. Its Cholesky factor shows which of them lie in
the span of S and of those before, as copies do, or all beyond J + 1 of a linear kernel: they are left out.

To start from a set S, A is factored, which costs a third of its inverse. R of a large S is computed when an event needs it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchlssvm.svm import steps
from torchlssvm.svm.kernel_rows import index_of
from torchlssvm.svm.samples import Array, Samples
from torchlssvm.svm.steps import DEPENDENT_SHARE, Margin, Watch

BLOCK_DEPENDENT_SHARE = 10 * DEPENDENT_SHARE
"""Share of its terms below which a pivot of Gamma means a sample in the span of those before. Ten times the share for a single
sample, as a pivot of a block carries the roundings of the pivots before it."""
MAX_BLOCK_UPDATE_RESIDUAL = 1e-9
"""Relative residual of R up to which a block update keeps enough digits; beyond, A is factored again."""
MIN_SAMPLES_FOR_WATCH = 400
"""Samples held from which a walk watches only a part of them: with fewer there is little to save."""
MIN_WATCHED, SAMPLES_PER_WATCHED = 64, 8
"""Reserve and error vectors that are watched: the nearest eighth, and not fewer than 64. Few others move to the margin, and
those are found where the walk ends."""
SPARE_WATCH_COLUMNS = 48
"""Columns of W beyond those in use, for margin vectors that leave S during the walk."""
MAX_SOLVE_RESIDUAL = 1e-13
"""Residual, as a share of its terms, up to which a system with A is solved: three digits above rounding."""
MAX_MARGIN_FOR_PROMPT_R = 1024
"""Margin vectors up to which R is computed with the factor of A; beyond, it costs more than the rest of a fit."""
COLUMNS_PER_PANEL = 48
"""Columns factored one at a time before one product applies them to the others: a panel that stays in the processor's cache."""


NO_SLOTS = np.zeros(0, dtype=np.int64)


class MarginSet:
    """The arrays ``m`` of S: slot 0 is for b, the others for margin vectors. Slots in use lie below ``top``."""

    def __init__(self, samples: Samples):
        self.samples = samples
        self.clear()

    # -- memory --------------------------------------------------------------------------------------------------------

    def clear(self, slots: int = 8, b: float = 0.0) -> None:
        """Start without margin vectors, with so many slots."""
        self.top = 1
        self.watched: Watch | None = None  # None: to be chosen
        self._R_is_made = False  # all of R is zero otherwise, and its memory untouched
        self._factored: tuple[Array, BorderedFactor] | None = None  # slots and factor of A, until R is made
        self._allocate(slots)
        self.m.a[0], self.m.used[0] = b, 1.0

    def _allocate(self, slots: int, old: Margin | None = None) -> None:
        """Allocate arrays of so many slots, with the contents of the old ones."""
        square, pending = (slots, slots), steps.MAX_PENDING_EVENTS
        QS = np.zeros((slots, self.samples.capacity))
        self.m = Margin(
            R=np.zeros(square),
            V=np.zeros((pending, slots)),
            f=np.zeros(pending),
            pending=np.zeros(1, dtype=np.int64),
            A=np.zeros(square),
            QS=QS,
            W=QS if self.watched is None or old is None or old.W is old.QS else np.zeros((slots, old.W.shape[1])),
            at=np.zeros(slots, dtype=np.int64),
            used=np.zeros(slots),
            a=np.zeros(slots),
            lower=np.full(slots, -np.inf),
            upper=np.full(slots, np.inf),
        )
        if old is not None:
            steps.apply_pending(old)
            for name, new, part in zip(Margin._fields, self.m, old, strict=True):
                if name != "W" or new is not QS:
                    new[tuple(slice(0, size) for size in part.shape)] = part
        QS[0] = self.samples.y

    def grow(self) -> None:
        """Make room for more margin vectors."""
        self._allocate(_slots(len(self.m.a)), self.m)

    def fit_capacity(self) -> None:
        """Lengthen the rows of Q when the samples' vectors have become longer."""
        self.watched = None
        self._allocate(len(self.m.a), self.m)

    # -- reading -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return int(self.m.used.sum()) - 1

    @property
    def b(self) -> float:
        """The offset of f."""
        return float(self.m.a[0])

    @property
    def R(self) -> Array:  # (slots, slots)
        """The inverse of A, with all events applied."""
        self.ensure_R()
        steps.apply_pending(self.m)
        return self.m.R

    def ensure_R(self) -> None:
        """Compute R from the factor of A, if there is only that. Events, which update R, need it."""
        self._R_is_made = True
        if self._factored is not None:
            used, factor = self._factored
            self.m.R[np.ix_(used, used)], self._factored = factor.inverse().numpy(), None

    def slots(self) -> Array:  # -> (s,) int64
        """Return the slots in use, without slot 0."""
        return self.m.used.nonzero()[0][1:]

    def positions(self) -> Array:  # -> (s,) int64
        """Return the positions of the margin vectors, in the order of their slots."""
        return self.m.at[self.slots()]

    def alpha_outside(self) -> Array:  # -> (capacity,)
        """Return alpha with zeros for the margin vectors."""
        alpha: Array = self.samples.alpha.copy()
        alpha[self.positions()] = 0.0
        return alpha

    def write_alpha(self) -> None:
        """Copy the coefficients to the samples' alpha."""
        slots = self.slots()
        self.samples.alpha[self.m.at[slots]] = self.m.a[slots]

    # -- samples that come and go --------------------------------------------------------------------------------------

    def add_columns(self, at: Array, Q: Array) -> None:  # (B,), (B, capacity)
        """Set the entries of QS for new samples, whose rows of Q these are."""
        m, k, index = self.m, self.top, index_of(at)
        m.QS[:k, index] = (Q[:, m.at[:k]] * m.used[:k]).T
        m.QS[0, index] = self.samples.y[index]
        if m.W is m.QS:
            self.watched = None

    def erase_columns(self, at: Array) -> None:  # (k,)
        """Set the entries of samples outside S to zero."""
        w = self.watched
        self.m.QS[: self.top, index_of(at)] = 0.0
        if w is None:
            return
        if self.m.W is not self.m.QS:
            columns = w.column_of[at]
            columns = columns[columns >= 0]
            self.m.W[:, columns], w.at[columns] = 0.0, 0
        w.column_of[at] = -1

    # -- the samples that a walk watches -------------------------------------------------------------------------------

    def watch(self, everything: bool, driven: Array) -> Watch:  # (k,) positions
        """Prepare a walk: return the samples that it watches, all of them or those near the margin and the driven ones.

        Where the walk ends, every g is computed, and samples on the wrong side that were not watched are learned then. A margin
        vector is watched from the moment it leaves S.
        """
        self.ensure_R()
        s, m, w = self.samples, self.m, self.watched
        if w is not None and m.W is not m.QS and int(w.count[0]) > 2 * self._chosen:
            w = None
        whole = everything or s.n < MIN_SAMPLES_FOR_WATCH
        if not whole and w is None:
            count = max(MIN_WATCHED, (s.n - len(self)) // SAMPLES_PER_WATCHED)
            whole = 2 * count + SPARE_WATCH_COLUMNS >= s.n
            if not whole:
                slack = np.where(s.side != 0, s.side * s.g, np.inf)
                w = self._start_watch(np.argpartition(slack, count - 1)[:count], count + SPARE_WATCH_COLUMNS)
        if w is None or (whole and m.W is not m.QS):
            w = self._start_watch(np.arange(s.capacity), s.capacity)
        for i in driven[(w.column_of[driven] < 0) & (s.side[driven] != 0)].tolist():
            w = self.add_watch_columns() if int(w.count[0]) == len(w.at) else w
            c = int(w.count[0])
            self.m.W[:, c] = m.QS[:, i]
            w.at[c], w.column_of[i], w.count[0] = i, c, c + 1
        w.sign[:] = np.where(w.column_of[w.at] == np.arange(len(w.at)), s.side[w.at], 0.0)
        w.slack[:] = w.sign * s.g[w.at]
        w.root[:] = s.root[w.at]
        return w

    def _start_watch(self, chosen: Array, columns: int) -> Watch:
        """Watch the samples in these positions; W is QS itself if there is a column for every position."""
        m, k = self.m, len(chosen)
        at, column_of = np.zeros(columns, dtype=np.int64), np.full(self.samples.capacity, -1, dtype=np.int64)
        at[:k], column_of[chosen] = chosen, np.arange(k)
        W = m.QS
        if columns < self.samples.capacity:
            W = np.zeros((len(m.a), columns))
            W[: self.top, :k] = m.QS[: self.top, chosen]
        self.m, self._chosen = m._replace(W=W), k
        slack, sign, root = np.zeros((3, columns))
        self.watched = Watch(at, column_of, slack, sign, root, np.array([k]))
        return self.watched

    def add_watch_columns(self) -> Watch:
        """Make room for more watched samples."""
        w, m = self.watched, self.m
        assert w is not None
        more = SPARE_WATCH_COLUMNS + len(w.at) // 8
        at, slack, sign, root = (np.concatenate([v, np.zeros(more, v.dtype)]) for v in (w.at, *w[2:5]))
        self.m = m._replace(W=np.concatenate([m.W, np.zeros((len(m.W), more))], 1))
        self.watched = Watch(at, w.column_of, slack, sign, root, w.count)
        return self.watched

    # -- one at a time -------------------------------------------------------------------------------------------------

    def admit(self, i: int, row: Array, beta: Array, gamma: float) -> None:  # (capacity,), (slots,)
        """Make sample i a margin vector, with the coefficient it has. beta, gamma: its own (10), (12). All are watched."""
        self.ensure_R()
        s = self.samples
        if len(self) + 1 == len(self.m.a):
            self.grow()
            beta = np.concatenate([beta, np.zeros(len(self.m.a) - len(beta))])
        every = np.arange(s.capacity)
        slot = steps.enter(self.m, self.top, every, row, s.y[i], s.u[i], s.alpha[i], i, beta, gamma)
        self.top, s.side[i] = max(self.top, slot + 1), 0.0
        s.rest -= s.alpha[i] * row

    def leave(self, slot: int, alpha: float, side: float) -> None:
        """Take the margin vector in this slot out of S, to the set ``side``, with this coefficient."""
        self.ensure_R()
        s, m = self.samples, self.m
        i = int(m.at[slot])
        s.rest += alpha * m.QS[slot]
        s.alpha[i], s.side[i] = alpha, side
        R_k = steps.row_of_R(m, slot)
        if len(self) == 1 or R_k[slot] > 0:
            steps.leave(m, self.top, slot, R_k)
            self._trim()
        else:  # 1 / R_kk is a squared distance: only rounding makes it negative
            self._free_slots(np.array([slot]))
            self.invert_A()

    def set_members(self, positions: Array, a: Array, b: float, rows: Array) -> None:  # (k,), (k,), (), (k, capacity)
        """Make these samples the margin vectors, with these coefficients; R is of no use where they are dependent."""
        self.clear(_slots(len(positions)), b)
        if len(positions):
            self.m.a[self._fill_slots(positions, rows)] = a
            self.factor_A(keep_dependent=True)

    def copy_arrays(self) -> Margin:
        """Copy all arrays, for :meth:`set_arrays`."""
        self.ensure_R()
        return Margin(*(array.copy() for array in self.m))

    def set_arrays(self, arrays: Margin) -> None:
        """Take over arrays of :meth:`copy_arrays`."""
        self.m, self.watched, self._R_is_made, self._factored = arrays._replace(W=arrays.QS), None, True, None
        self._trim()

    # -- many at a time ------------------------------------------------------------------------------------------------

    def exchange(self, out: Array, into: Array, rows: Array) -> Array:  # (k,), (l,), (l, capacity) -> (r,)
        """Take positions ``out`` out of S and ``into`` into it, and update R; alpha, side and rest do not change.

        Returns the positions, of ``into`` if possible, that lie in the span of the others: they do not become margin vectors.
        """
        self.watched = None
        steps.apply_pending(self.m)
        left = len(self) - len(out)
        update = left > 0 and len(out) + 2 * len(into) < left + len(into) and self._factored is None
        update = update and self.residual() <= MAX_BLOCK_UPDATE_RESIDUAL
        if len(out):
            slots = self.slots()
            slots = slots[np.isin(self.m.at[slots], out)]
            update = update and self._downdate(slots)
            self._free_slots(slots)
        new = self._fill_slots(into, rows) if len(into) else NO_SLOTS
        if not update:
            return self.factor_A(late=new)
        if not len(into):
            return into
        m, k = self.m, self.top
        R, H = _tensor(m.R[:k, :k]), _tensor(m.A[:k, new])
        H[torch.from_numpy(new)] = 0.0
        Q = _tensor(m.A[np.ix_(new, new)])
        V = torch.mm(R, H).neg_()
        size = Q.diagonal().abs() + (H * V).abs().sum(0)
        kept, L = independent(torch.addmm(Q, H.T, V), BLOCK_DEPENDENT_SHARE * size)
        rejected = np.delete(np.arange(len(new)), kept)
        positions = m.at[new[rejected]]
        if len(kept):
            G = torch.cholesky_inverse(L)
            VG = V[:, kept] @ G
            R.addmm_(VG, V[:, kept].T)
            at = new[kept]
            m.R[:k, at] = VG.numpy()
            m.R[at, :k] = VG.numpy().T
            m.R[np.ix_(at, at)] = G.numpy()
        self._free_slots(new[rejected])
        return positions

    def _fill_slots(self, into: Array, rows: Array) -> Array:
        """Give each position a slot, with its row of Q and of A, and coefficient 0; R does not change."""
        s = self.samples
        while len(self.m.a) - len(self) - 1 < len(into):
            self._allocate(_slots(len(self) + len(into)), self.m)
        m = self.m
        old, new = np.flatnonzero(m.used), np.flatnonzero(m.used == 0)[: len(into)]
        m.at[new], m.used[new], m.a[new], m.lower[new], m.upper[new] = into, 1.0, 0.0, 0.0, s.u[into]
        at = index_of(new)
        m.QS[at] = rows
        together = isinstance(at, slice)
        border = np.take(rows, m.at, 1, out=m.A[at] if together else None, mode="clip")  # clip: straight into A
        border[:, m.used == 0] = 0.0
        border[:, 0] = s.y[into]
        if not together:
            m.A[at] = border
        m.A[np.ix_(old, new)] = border[:, old].T
        self.top = max(self.top, int(new[-1]) + 1)
        return new

    def _downdate(self, slots: Array) -> bool:  # (l,)
        """Apply (14) for several slots; False if rounding errors make that impossible."""
        m, k = self.m, self.top
        columns = _tensor(m.R[:k, slots])
        L, info = torch.linalg.cholesky_ex(_tensor(m.R[np.ix_(slots, slots)]))
        if int(info):
            return False
        W = torch.linalg.solve_triangular(L, columns.T, upper=False)
        _tensor(m.R[:k, :k]).addmm_(W.T, W, alpha=-1.0)
        return True

    def _free_slots(self, slots: Array) -> None:
        """Set everything in these slots to zero; R of the others does not change."""
        m = self.m
        steps.apply_pending(m)
        for array in (m.R, m.A) if self._R_is_made else (m.A,):
            array[slots] = 0.0
            array[:, slots] = 0.0
        m.QS[slots] = 0.0
        if m.W is not m.QS:
            m.W[slots] = 0.0
        m.at[slots], m.used[slots], m.a[slots], m.lower[slots], m.upper[slots] = 0, 0.0, 0.0, -np.inf, np.inf
        self._trim()

    def _trim(self) -> None:
        """Set ``top`` behind the last slot in use."""
        self.top = int(self.m.used.nonzero()[0][-1]) + 1

    def factor_A(self, late: Array = NO_SLOTS, keep_dependent: bool = False) -> Array:  # (k,) slots -> (r,) positions
        """Factor A, and drop samples that lie in the span of the others, of those in slots ``late`` if possible.

        Returns the positions dropped. keep_dependent: drop none; where there would be any, A is not factored.
        """
        m = self.m
        if self._R_is_made:
            m.R[:] = 0.0
        m.pending[0], self._R_is_made, self._factored = 0, False, None
        slots = self.slots()
        if not len(slots):
            return slots
        if len(late):
            slots = np.concatenate([slots[~np.isin(slots, late)], late])
        own = m.A[slots, slots]
        first = int(own.argmin())
        if own[0] > 2.0 * own[first]:  # terms of different size cost the fewest digits when the first is the smallest
            slots[[0, first]] = slots[[first, 0]]
        at = index_of(slots)
        Q = _tensor(m.A[at, at] if isinstance(at, slice) else m.A[np.ix_(slots, slots)])
        kept, factor = factor_bordered(Q, _tensor(m.A[slots, 0]), BLOCK_DEPENDENT_SHARE)
        rejected = np.delete(slots, kept)
        positions: Array = m.at[rejected]
        if keep_dependent and len(rejected):
            return positions[:0]
        self._factored = np.concatenate([[0], slots[kept]]), factor
        if len(kept) <= MAX_MARGIN_FOR_PROMPT_R:
            self.ensure_R()
        if len(rejected):
            self._free_slots(rejected)
        return positions

    # -- linear systems with A -----------------------------------------------------------------------------------------

    def residual(self) -> float:
        """Return the relative residual of R for one right-hand side."""
        m = self.m
        h = m.A.sum(1)
        return float(np.abs(m.A @ (self.R @ h) - h).max() / max(np.abs(h).max(), 1e-300))

    def _equilibrated(self) -> tuple[Array, Array, Array]:  # -> (k,), (k, k), (k,)
        """Return the slots in use, D A D with a unit diagonal, and D; so scaled, outliers cost no digits."""
        m, used = self.m, np.flatnonzero(self.m.used)
        D = 1.0 / np.maximum(self.samples.root[m.at[used]], 1e-150)
        D[0] = 1.0 / D[1:].max() if len(D) > 1 else 1.0
        return used, m.A[np.ix_(used, used)] * D * D[:, None], D

    def invert_A(self) -> None:
        """Compute R from A whatever the margin vectors are; it is of no use where they are dependent."""
        m = self.m
        m.R[:] = 0.0
        m.pending[0], self._R_is_made, self._factored = 0, True, None
        used, A, D = self._equilibrated()
        try:
            m.R[np.ix_(used, used)] = np.linalg.inv(A) * D * D[:, None]
        except np.linalg.LinAlgError:
            return

    def _times_R(self, r: Array) -> Array:  # (slots,) -> (slots,)
        """Return R r, by the factor of A if R is not made."""
        if self._factored is None:
            product: Array = self.R @ r
            return product
        used, factor = self._factored
        out = np.zeros(len(r))
        out[used] = factor.solve(_tensor(r[used])).numpy()
        return out

    def solve(self, r: Array) -> Array:  # (slots,) -> (slots,)
        """Return delta with A delta = -r, refined; by a backward stable method where R is of no use."""
        m = self.m
        for attempt in range(2):
            delta = self._times_R(-r)
            for _ in range(2):
                delta -= self._times_R(m.A @ delta + r)
            Ad = m.A @ delta
            off = np.abs(Ad + r)
            if bool(
                (off <= MAX_SOLVE_RESIDUAL * np.maximum(np.abs(Ad), np.abs(r))).all()
            ):  # less than its terms, added up by size
                return delta
            if bool((off <= MAX_SOLVE_RESIDUAL * (np.abs(m.A) @ np.abs(delta) + np.abs(r))).all()):
                return delta
            if not attempt:
                self.invert_A()
        used, A, D = self._equilibrated()
        delta = np.zeros(len(r))
        try:
            delta[used] = -D * np.linalg.solve(A, D * r[used])
        except np.linalg.LinAlgError:
            delta[used] = -D * np.linalg.lstsq(A, D * r[used], rcond=None)[0]
        return delta


def _slots(count: int) -> int:
    """Return how many slots to allocate for so many margin vectors: few more, as events pass over all of them."""
    return 16 + count + count // 16


def _tensor(values: Array) -> Tensor:
    return torch.from_numpy(values)


def independent(Gamma: Tensor, floor: Tensor) -> tuple[Array, Tensor]:  # (k, k), (k,) -> (r,), (r, r)
    """The columns that are not in the span of those before them (a pivot above ``floor``), and their Cholesky factor.

    Example:
        >>> Gamma = torch.tensor([[4.0, 4.0, 2.0], [4.0, 4.0, 2.0], [2.0, 2.0, 2.0]], dtype=torch.float64)
        >>> kept, L = independent(Gamma, torch.full((3,), 1e-10, dtype=torch.float64))
        >>> kept.tolist(), L.tolist()
        ([0, 2], [[2.0, 0.0], [1.0, 1.0]])
    """
    k = len(Gamma)
    L, info = torch.linalg.cholesky_ex(Gamma)
    if not int(info) and bool((L.diagonal().square() > floor).all()):
        return np.arange(k), L
    kept: list[int] = []
    L, least = torch.zeros_like(Gamma), floor.tolist()
    for start in range(0, k, COLUMNS_PER_PANEL):
        stop, r = min(k, start + COLUMNS_PER_PANEL), len(kept)
        P = (Gamma[start:, start:stop] - L[start:, :r] @ L[start:stop, :r].T).numpy()
        columns = np.zeros((stop - start, k - start))
        for j in range(stop - start):
            pivot = float(P[j, j])
            if pivot > least[start + j]:
                column = columns[len(kept) - r, j:]
                np.divide(P[j:, j], pivot**0.5, out=column)
                P[j:, j + 1 :] -= column[:, None] * column[1 : stop - start - j]
                kept.append(start + j)
        L[start:, r : len(kept)] = torch.from_numpy(columns[: len(kept) - r].T)
    at = np.array(kept, dtype=np.int64)
    return at, L[torch.from_numpy(at), : len(kept)]


class BorderedFactor(NamedTuple):
    """A of b and margin vectors, factored: R of b and the first one, and (13) for the others in one block."""

    R: Tensor  # (2, 2)
    V: Tensor  # (2, k)
    L: Tensor  # (k, k) Cholesky factor of Gamma

    def solve(self, r: Tensor) -> Tensor:  # (k + 2,) -> (k + 2,)
        """A^-1 r."""
        z = torch.cholesky_solve((r[2:] + r[:2] @ self.V)[:, None], self.L)[:, 0]
        return torch.cat([self.R @ r[:2] + self.V @ z, z])

    def inverse(self) -> Tensor:  # -> (k + 2, k + 2)
        """A^-1."""
        G, k = torch.cholesky_inverse(self.L), len(self.L)
        VG = self.V @ G
        out = G.new_empty(k + 2, k + 2)
        out[:2, :2] = torch.addmm(self.R, VG, self.V.T)
        out[:2, 2:], out[2:, :2], out[2:, 2:] = VG, VG.T, G
        return out


def factor_bordered(Q: Tensor, y: Tensor, share: float) -> tuple[Array, BorderedFactor]:  # (k, k), (k,) -> (r,)
    """The samples that are not in the span of those before them, to ``share`` of their terms, and the factor of their A.

    The first one is S = {0}, R = [[-Q_00, y_0], [y_0, 0]].

    Example:
        >>> y = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
        >>> X = y * torch.tensor([2.0, 2.0, -1.0], dtype=torch.float64)  # on a line, the first two the same
        >>> kept, factor = factor_bordered(torch.outer(X, X), y, 1e-12)
        >>> kept.tolist(), [[round(v, 6) for v in row] for row in factor.inverse().tolist()]
        ([0, 2], [[0.0, 0.333333, -0.666667], [0.333333, 0.111111, 0.111111], [-0.666667, 0.111111, 0.111111]])
    """
    R = Q.new_zeros(2, 2)
    R[0, 0], R[0, 1], R[1, 0] = -Q[0, 0], y[0], y[0]
    H = torch.stack([y[1:], Q[0, 1:]])
    V = -(R @ H)
    size = Q.diagonal()[1:].abs() + (H * V).abs().sum(0)
    kept, L = independent(torch.addmm(Q[1:, 1:], H.T, V), share * size)
    return np.concatenate([[0], kept + 1]), BorderedFactor(R, V[:, kept], L)
