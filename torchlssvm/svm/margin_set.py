r"""The margin set S: coefficients, A, its inverse R, rows of Q, and the samples that a path watches.

The letters are those of Cauwenberghs and Poggio. Slot 0 belongs to b, the others to margin vectors. Let a = [b; alpha_S],
A = [[0, y_S^T], [y_S, Q_SS]] and R = A^-1 (7). With h = [y_i; Q_Si] for a sample i that enters,

    beta_i = -R h                                          the rates of a for a unit of alpha_i                    (10)
    gamma_i = Q_ii + h^T beta_i                            the rate of its own g_i                                 (12)
    i enters S:  R <- R + v v^T / gamma_i, v = [beta_i; 1]                                                         (13)
    k leaves S:  R <- R - R_:k R_k: / R_kk                                                                         (14)

Many margin vectors enter and leave at once by block forms. For k samples c that enter, with H = [y_c; Q_Sc] and V = -R H,

    Gamma = Q_cc + H^T V                                                                                          (12)
    R <- [[R + V G V^T, V G], [G V^T, G]],  G = Gamma^-1                                                           (13)
    R <- R - R_:l R_ll^-1 R_l:                                                                                     (14)

The Cholesky factor of Gamma shows which samples lie in the span of S and of earlier samples; these are left out. Examples are
copies, and with a linear kernel all samples beyond J + 1.

To save time, R is stored as R + V^T diag(f) V, with a row of V for each pending event, and pending events are added to R a few
at a time. To start from a set S, A is factored, in a third of the time of its inverse, and R of a large S is computed when an
event needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchlssvm.kernels.gram_rows import index_of
from torchlssvm.svm.samples import Array, Samples

DEPENDENT_SHARE = 1e-12
"""If gamma_i is below this share of its terms, sample i lies in the span of S and cannot enter. The share is four digits above
rounding, because a badly conditioned A costs that many."""
BLOCK_DEPENDENT_SHARE = 10 * DEPENDENT_SHARE
"""The same share for a pivot of Gamma, which includes the rounding errors of earlier pivots."""
MIN_SAMPLES_FOR_WATCH = 400
"""From this many samples on, a walk watches only a part of them."""
MIN_WATCHED, SAMPLES_PER_WATCHED = 64, 8
"""Reserve and error vectors that are watched: the nearest eighth, and at least 64. The end of a walk checks all."""
SPARE_WATCH_COLUMNS = 48
"""Columns of W beyond those in use, for margin vectors that leave S during the walk."""
MAX_SOLVE_RESIDUAL = 1e-13
"""Residual, as a share of its terms, up to which a system with A is solved: three digits above rounding."""
MAX_PENDING_EVENTS = 16
"""Events not yet added to R, and events after which a walk refines beta. Sixteen columns cost little more than one."""

NO_SLOTS = np.zeros(0, dtype=np.int64)


@dataclass
class Watch:
    """The samples that a walk watches: all, or the samples outside S that are near the margin. Columns are those of W."""

    at: Array  # (columns,) int64 positions
    column_of: Array  # (capacity,) int64 column of each position, or -1
    slack: Array  # (columns,) side * g
    sign: Array  # (columns,) side; 0 where the column is free, or the sample in S
    root: Array  # (columns,)
    count: int  # columns in use
    chosen: int  # columns in use at the start


class MarginSet:
    """The arrays of S. Slot 0 is for b, the others are for margin vectors. A free slot is zero in all arrays."""

    _R: Array  # (slots, slots) without the pending events
    _V: Array  # (MAX_PENDING_EVENTS, slots)
    A: Array  # (slots, slots)
    QS: Array  # (slots, capacity) rows of Q; row 0 is y
    W: Array  # (slots, columns) the columns of QS that are watched, or QS itself
    at: Array  # (slots,) int64 position of the sample
    used: Array  # (slots,) 1.0, or 0.0 if the slot is free
    a: Array  # (slots,) b and the coefficients
    lower: Array  # (slots,) their bounds; -inf and inf for b and free slots
    upper: Array
    top: int  # all slots in use lie below it
    count: int  # of margin vectors

    def __init__(self, samples: Samples):
        self.samples = samples
        self.clear()

    # -- memory --------------------------------------------------------------------------------------------------------

    def clear(self, slots: int = 8, b: float = 0.0) -> None:
        """Start without margin vectors, with this number of slots."""
        self.top, self.count = 1, 0
        self.watched: Watch | None = None  # None: to be chosen
        self._R_is_made = False  # all of R is zero otherwise, and its memory untouched
        self._factored: tuple[Array, BorderedFactor] | None = None  # slots and factor of A, until R is made
        self._pending, self._f = 0, np.zeros(MAX_PENDING_EVENTS)  # events that R lacks: how many, and their factors
        self._allocate(slots)
        self.a[0], self.used[0] = b, 1.0

    def _allocate(self, slots: int, keep: bool = False) -> None:
        """Allocate arrays with this number of slots. keep: copy the contents of the old arrays."""
        QS = np.zeros((slots, self.samples.capacity))
        part = keep and self.watched is not None and self.W is not self.QS
        arrays = {
            "_R": np.zeros((slots, slots)),
            "_V": np.zeros((MAX_PENDING_EVENTS, slots)),
            "A": np.zeros((slots, slots)),
            "QS": QS,
            "W": np.zeros((slots, self.W.shape[1])) if part else QS,
            "at": np.zeros(slots, dtype=np.int64),
            "used": np.zeros(slots),
            "a": np.zeros(slots),
            "lower": np.full(slots, -np.inf),
            "upper": np.full(slots, np.inf),
        }
        for name, new in arrays.items() if keep else ():
            if name != "W" or part:
                old = getattr(self, name)
                new[tuple(slice(0, size) for size in old.shape)] = old
        self.__dict__.update(arrays)
        QS[0] = self.samples.y

    def fit_capacity(self) -> None:
        """Lengthen the rows of Q when the samples' vectors have become longer."""
        self.watched = None
        self._allocate(len(self.a), keep=True)

    # -- reading -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.count

    @property
    def b(self) -> float:
        """The offset of f."""
        return float(self.a[0])

    @property
    def R(self) -> Array:  # (slots, slots)
        """The inverse of A, with all events applied."""
        self.ensure_R()
        self._apply_pending()
        return self._R

    def _apply_pending(self) -> None:
        """Add the pending events to R."""
        if self._pending:
            V = _tensor(self._V[: self._pending, : self.top])
            R = _tensor(self._R)[: self.top, : self.top]
            R.addmm_((V * _tensor(self._f)[: self._pending, None]).T, V)
            self._pending = 0

    def ensure_R(self) -> None:
        """Compute R from the factor of A, if there is only a factor."""
        self._R_is_made = True
        if self._factored is not None:
            used, factor = self._factored
            self._R[np.ix_(used, used)], self._factored = factor.inverse().numpy(), None

    def slots(self) -> Array:  # -> (s,) int64
        """Return the slots in use, without slot 0."""
        return self.used.nonzero()[0][1:]

    def positions(self) -> Array:  # -> (s,) int64
        """Return the positions of the margin vectors, in the order of their slots."""
        return self.at[self.slots()]

    def alpha_outside(self) -> Array:  # -> (capacity,)
        """Return alpha with zeros for the margin vectors."""
        alpha: Array = self.samples.alpha.copy()
        alpha[self.positions()] = 0.0
        return alpha

    def write_alpha(self) -> None:
        """Copy the coefficients to the samples' alpha."""
        slots = self.slots()
        self.samples.alpha[self.at[slots]] = self.a[slots]

    def compute_g(self) -> None:
        """Compute every g from rest and the margin vectors: g = rest + Q_:S alpha_S + y b - 1."""
        s, k = self.samples, self.top
        np.add(self.a[:k] @ self.QS[:k], s.rest, out=s.g)
        s.g -= np.abs(s.y)  # 1, or 0 in a free position

    # -- samples that come and go --------------------------------------------------------------------------------------

    def add_columns(self, at: Array, Q: Array) -> None:  # (B,), (B, capacity)
        """Set the entries of QS for new samples, whose rows of Q these are."""
        k, index = self.top, index_of(at)
        self.QS[:k, index] = (Q[:, self.at[:k]] * self.used[:k]).T
        self.QS[0, index] = self.samples.y[index]
        if self.W is self.QS:
            self.watched = None

    def erase_columns(self, at: Array) -> None:  # (k,)
        """Set the entries of samples outside S to zero."""
        w = self.watched
        self.QS[: self.top, index_of(at)] = 0.0
        if w is None:
            return
        if self.W is not self.QS:
            columns = w.column_of[at]
            columns = columns[columns >= 0]
            self.W[:, columns], w.at[columns] = 0.0, 0
        w.column_of[at] = -1

    # -- the samples that a walk watches -------------------------------------------------------------------------------

    def watch(self, everything: bool, driven: Array) -> Watch:  # (k,) positions
        """Return the samples that a walk watches: all samples, or those near the margin and the driven ones.

        At the end of the walk, samples on the wrong side that were not watched are learned. A margin vector is watched from the
        moment it leaves S.
        """
        self.ensure_R()
        s, w = self.samples, self.watched
        if w is not None and self.W is not self.QS and w.count > 2 * w.chosen:
            w = None
        whole = everything or s.n < MIN_SAMPLES_FOR_WATCH
        if not whole and w is None:
            count = max(MIN_WATCHED, (s.n - len(self)) // SAMPLES_PER_WATCHED)
            whole = 2 * count + SPARE_WATCH_COLUMNS >= s.n
            if not whole:
                slack = np.where(s.side != 0, s.side * s.g, np.inf)
                w = self._start_watch(np.argpartition(slack, count - 1)[:count], count + SPARE_WATCH_COLUMNS)
        if w is None or (whole and self.W is not self.QS):
            w = self._start_watch(np.arange(s.capacity), s.capacity)
        for i in driven[(w.column_of[driven] < 0) & (s.side[driven] != 0)].tolist():
            self.watch_one(w, i)
        w.sign[:] = np.where(w.column_of[w.at] == np.arange(len(w.at)), s.side[w.at], 0.0)
        w.slack[:] = w.sign * s.g[w.at]
        w.root[:] = s.root[w.at]
        return w

    def _start_watch(self, chosen: Array, columns: int) -> Watch:
        """Watch the samples in these positions. W is QS itself if there is a column for every position."""
        k = len(chosen)
        at, column_of = np.zeros(columns, dtype=np.int64), np.full(self.samples.capacity, -1, dtype=np.int64)
        at[:k], column_of[chosen] = chosen, np.arange(k)
        self.W = self.QS
        if columns < self.samples.capacity:
            self.W = np.zeros((len(self.a), columns))
            self.W[: self.top, :k] = self.QS[: self.top, chosen]
        slack, sign, root = np.zeros((3, columns))
        self.watched = Watch(at, column_of, slack, sign, root, k, k)
        return self.watched

    def watch_one(self, w: Watch, i: int) -> int:
        """Watch sample i too, and return its column."""
        c = w.count
        if c == len(w.at):
            more = SPARE_WATCH_COLUMNS + c // 8
            for name in ("at", "slack", "sign", "root"):
                old = getattr(w, name)
                setattr(w, name, np.concatenate([old, np.zeros(more, old.dtype)]))
            self.W = np.concatenate([self.W, np.zeros((len(self.W), more))], 1)
        self.W[:, c] = self.QS[:, i]
        w.at[c], w.column_of[i], w.root[c], w.count = i, c, self.samples.root[i], c + 1
        return c

    # -- one at a time -------------------------------------------------------------------------------------------------

    def beta_and_gamma(self, i: int, row: Array) -> tuple[Array, float, float]:  # (capacity,) -> (top,)
        """Return beta_i (10), gamma_i (12), and the size of the terms of gamma_i."""
        k, own = self.top, float(row[i])
        h = row[self.at[:k]] * self.used[:k]
        h[0] = self.samples.y[i]
        beta = -self.times_R(h)
        terms = h * beta
        gamma, size = own + float(terms.sum()), abs(own) + float(np.abs(terms).sum())
        if gamma < 1e-6 * size:  # six digits are lost: once more, with a refined beta
            beta -= self.times_R(h + self.A[:k, :k] @ beta)
            terms = h * beta
            gamma, size = own + float(terms.sum()), abs(own) + float(np.abs(terms).sum())
        return beta, gamma, size

    def _free_slot(self) -> int:
        """Return the first free slot, below ``top`` if there is one."""
        k = int(self.used[: self.top].argmin())
        slot = self.top if self.used[k] else k
        if slot == len(self.a):
            self._allocate(_slots(len(self.a)), keep=True)
        return slot

    def _write_slots(self, slots: Array | int, at: Array | int, a: Array | float) -> None:
        """Use slots for the samples in positions ``at``, with coefficients a."""
        self.at[slots], self.used[slots], self.a[slots] = at, 1.0, a
        self.lower[slots], self.upper[slots] = 0.0, self.samples.u[at]

    def enter(self, i: int, row: Array, beta: Array, gamma: float) -> int:  # (capacity,), (top,)
        """Make sample i a margin vector by (13), with its coefficient, which is subtracted from rest; returns its slot."""
        self.ensure_R()
        s, slot, old = self.samples, self._free_slot(), self.top
        y, own = s.y[i], row[i]
        self.top = k = max(old, slot + 1)
        if old == 1:  # the first margin vector
            self._pending = 0
            self._R[0, 0], self._R[0, slot], self._R[slot, 0] = -own, y, y
        else:
            v = np.zeros(k)
            v[:old] = beta[:old]
            v[slot] = 1.0
            self._add_to_R(v, 1.0 / gamma)
        h = row[self.at[:k]] * self.used[:k]
        h[0], h[slot] = y, own
        self.A[slot, :k] = self.A[:k, slot] = h
        self.QS[slot] = row
        if self.W is not self.QS:
            assert self.watched is not None
            self.W[slot] = row[self.watched.at]
        self._write_slots(slot, i, s.alpha[i])
        s.side[i] = 0.0
        self.count += 1
        if s.alpha[i] != 0.0:
            s.rest -= s.alpha[i] * row
        return slot

    def leave(self, slot: int, alpha: float, side: float) -> None:
        """Take the margin vector in this slot out of S by (14), to the set ``side``, with this coefficient."""
        s, i, k = self.samples, int(self.at[slot]), self.top
        s.alpha[i], s.side[i] = alpha, side
        if alpha != 0.0:
            s.rest += alpha * self.QS[slot]
        R_k, last = self.row_of_R(slot), len(self) == 1
        if last:
            self._R[:k, :k] = 0.0
            self._pending = 0
        elif R_k[slot] > 0:
            self._add_to_R(R_k, -1.0 / R_k[slot])
        self._free_slots(slot)
        if not last and not R_k[slot] > 0:  # 1 / R_kk is a squared distance: only rounding makes it negative
            self.invert_A()

    def _add_to_R(self, v: Array, factor: float) -> None:  # (top,)
        """R += factor v v^T."""
        if self._pending == MAX_PENDING_EVENTS:
            self._apply_pending()
        e, k = self._pending, len(v)
        self._V[e, :k], self._V[e, k:], self._f[e] = v, 0.0, factor
        self._pending = e + 1

    def row_of_R(self, slot: int) -> Array:  # -> (top,)
        """Return row ``slot`` of R."""
        self.ensure_R()
        k, V = self.top, self._V[: self._pending, : self.top]
        return self._R[slot, :k] + (self._f[: self._pending] * V[:, slot]) @ V

    def set_members(self, positions: Array, a: Array, b: float, rows: Array) -> None:  # (k,), (k,), (), (k, capacity)
        """Make these samples the margin vectors, with these coefficients. R is unusable if the samples are dependent."""
        self.clear(_slots(len(positions)), b)
        if len(positions):
            self.a[self._fill_slots(positions, rows)] = a
            self.factor_A(keep_dependent=True)

    # -- many at a time ------------------------------------------------------------------------------------------------

    def exchange(self, out: Array, into: Array, rows: Array) -> Array:  # (k,), (l,), (l, capacity) -> (r,)
        """Remove positions ``out`` from S, add ``into``, and update R; alpha, side and rest do not change.

        Returns the positions that lie in the span of the others, of ``into`` if possible. They are not in S.
        """
        self.watched = None
        self._apply_pending()
        left = len(self) - len(out)
        update = left > 0 and len(out) + 2 * len(into) < left + len(into) and self._factored is None
        update = update and self.residual() <= 1e-9  # beyond, a block update loses too many digits
        if len(out):
            slots = self.slots()
            slots = slots[np.isin(self.at[slots], out)]
            update = update and self._downdate(slots)
            self._free_slots(slots)
        new = self._fill_slots(into, rows) if len(into) else NO_SLOTS
        if not update:
            return self.factor_A(late=new)
        if not len(into):
            return into
        k = self.top
        R, H = _tensor(self._R[:k, :k]), _tensor(self.A[:k, new])
        H[torch.from_numpy(new)] = 0.0
        Q = _tensor(self.A[np.ix_(new, new)])
        V = torch.mm(R, H).neg_()
        size = Q.diagonal().abs() + (H * V).abs().sum(0)
        kept, L = independent(torch.addmm(Q, H.T, V), BLOCK_DEPENDENT_SHARE * size)
        rejected = np.delete(np.arange(len(new)), kept)
        positions = self.at[new[rejected]]
        if len(kept):
            G = torch.cholesky_inverse(L)
            VG = V[:, kept] @ G
            R.addmm_(VG, V[:, kept].T)
            at = new[kept]
            self._R[:k, at] = VG.numpy()
            self._R[at, :k] = VG.numpy().T
            self._R[np.ix_(at, at)] = G.numpy()
        self._free_slots(new[rejected])
        return positions

    def _fill_slots(self, into: Array, rows: Array) -> Array:
        """Give each position a slot, with its row of Q and of A, and coefficient 0. R does not change."""
        s = self.samples
        while len(self.a) - len(self) - 1 < len(into):
            self._allocate(_slots(len(self) + len(into)), keep=True)
        old, new = np.flatnonzero(self.used), np.flatnonzero(self.used == 0)[: len(into)]
        self._write_slots(new, into, 0.0)
        at = index_of(new)
        self.QS[at] = rows
        together = isinstance(at, slice)
        border = np.take(rows, self.at, 1, out=self.A[at] if together else None, mode="clip")  # clip: straight into A
        border[:, self.used == 0] = 0.0
        border[:, 0] = s.y[into]
        if not together:
            self.A[at] = border
        self.A[np.ix_(old, new)] = border[:, old].T
        self.top, self.count = max(self.top, int(new[-1]) + 1), self.count + len(new)
        return new

    def _downdate(self, slots: Array) -> bool:  # (l,)
        """Apply (14) for several slots. Returns False if rounding errors make that impossible."""
        k = self.top
        columns = _tensor(self._R[:k, slots])
        L, info = torch.linalg.cholesky_ex(_tensor(self._R[np.ix_(slots, slots)]))
        if int(info):
            return False
        W = torch.linalg.solve_triangular(L, columns.T, upper=False)
        _tensor(self._R[:k, :k]).addmm_(W.T, W, alpha=-1.0)
        return True

    def _free_slots(self, slots: Array | int) -> None:
        """Set everything in these slots to zero. R of the other slots does not change."""
        self._V[:, slots] = 0.0
        for array in (self._R, self.A) if self._R_is_made else (self.A,):
            array[slots] = 0.0
            array[:, slots] = 0.0
        self.QS[slots] = 0.0
        if self.W is not self.QS:
            self.W[slots] = 0.0
        self.at[slots], self.used[slots], self.a[slots] = 0, 0.0, 0.0
        self.lower[slots], self.upper[slots] = -np.inf, np.inf
        used = self.used.nonzero()[0]
        self.top, self.count = int(used[-1]) + 1, len(used) - 1

    def factor_A(self, late: Array = NO_SLOTS, keep_dependent: bool = False) -> Array:  # (k,) slots -> (r,) positions
        """Factor A, and drop samples that lie in the span of the others, preferably samples in slots ``late``.

        Returns the dropped positions. keep_dependent: drop no sample; if one would have to be dropped, A is not factored.
        """
        if self._R_is_made:
            self._R[:] = 0.0
        self._R_is_made, self._factored, self._pending = False, None, 0
        slots = self.slots()
        if not len(slots):
            return slots
        if len(late):
            slots = np.concatenate([slots[~np.isin(slots, late)], late])
        own = self.A[slots, slots]
        first = int(own.argmin())
        if own[0] > 2.0 * own[first]:  # terms of different size cost the fewest digits when the first is the smallest
            slots[[0, first]] = slots[[first, 0]]
        at = index_of(slots)
        Q = _tensor(self.A[at, at] if isinstance(at, slice) else self.A[np.ix_(slots, slots)])
        kept, factor = factor_bordered(Q, _tensor(self.A[slots, 0]), BLOCK_DEPENDENT_SHARE)
        rejected = np.delete(slots, kept)
        positions: Array = self.at[rejected]
        if keep_dependent and len(rejected):
            return positions[:0]
        self._factored = np.concatenate([[0], slots[kept]]), factor
        if len(kept) <= 1024:  # beyond, R costs more than the rest of a fit
            self.ensure_R()
        if len(rejected):
            self._free_slots(rejected)
        return positions

    # -- linear systems with A -----------------------------------------------------------------------------------------

    def residual(self) -> float:
        """Return the relative residual of R for one right-hand side."""
        h = self.A.sum(1)
        return float(np.abs(self.A @ (self.R @ h) - h).max() / max(np.abs(h).max(), 1e-300))

    def _equilibrated(self) -> tuple[Array, Array, Array]:  # -> (k,), (k, k), (k,)
        """Return the slots in use, D A D with a unit diagonal, and D. With this scaling, outliers cost no digits."""
        used = np.flatnonzero(self.used)
        D = 1.0 / np.maximum(self.samples.root[self.at[used]], 1e-150)
        D[0] = 1.0 / D[1:].max() if len(D) > 1 else 1.0
        return used, self.A[np.ix_(used, used)] * D * D[:, None], D

    def invert_A(self) -> None:
        """Compute R from A for any margin vectors. If they are linearly dependent, R is unusable."""
        self._R[:] = 0.0
        self._R_is_made, self._factored, self._pending = True, None, 0
        used, A, D = self._equilibrated()
        try:
            self._R[np.ix_(used, used)] = np.linalg.inv(A) * D * D[:, None]
        except np.linalg.LinAlgError:
            return

    def times_R(self, r: Array) -> Array:  # (k,) -> (k,)
        """Return R r for the first k slots, which hold all in use, by the factor of A if R is not made."""
        if self._factored is None:
            self.ensure_R()
            k = len(r)
            product: Array = self._R[:k, :k] @ r
            if self._pending:
                V = self._V[: self._pending, :k]
                product += (self._f[: self._pending] * (V @ r)) @ V
            return product
        used, factor = self._factored
        out = np.zeros(len(r))
        out[used] = factor.solve(_tensor(r[used])).numpy()
        return out

    def solve(self, r: Array) -> Array:  # (slots,) -> (slots,)
        """Return delta with A delta = -r, refined. If R is unusable, a backward stable method solves for it."""
        for attempt in range(2):
            delta = self.times_R(-r)
            for _ in range(2):
                delta -= self.times_R(self.A @ delta + r)
            Ad = self.A @ delta
            off, least = np.abs(Ad + r), np.maximum(np.abs(Ad), np.abs(r))  # of the terms added up by size
            if bool((off <= MAX_SOLVE_RESIDUAL * least).all()):
                return delta
            if bool((off <= MAX_SOLVE_RESIDUAL * (np.abs(self.A) @ np.abs(delta) + np.abs(r))).all()):
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
    """Return the number of slots to allocate for this many margin vectors: only a few more, as events pass over all slots."""
    return 16 + count + count // 16


def _tensor(values: Array) -> Tensor:
    return torch.from_numpy(values)


def independent(Gamma: Tensor, floor: Tensor) -> tuple[Array, Tensor]:  # (k, k), (k,) -> (r,), (r, r)
    """Find the columns that are not in the span of earlier columns (a pivot above ``floor``), and their Cholesky factor.

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
    panel = 48  # columns factored one at a time before one product applies them to the others: they stay in the cache
    for start in range(0, k, panel):
        stop, r = min(k, start + panel), len(kept)
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
    """A of b and margin vectors, factored: R of b and the first vector, and (13) for the others in one block."""

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
    """Find the samples that are not in the span of earlier samples, to ``share`` of their terms, and the factor of their A.

    The first sample gives S = {0}, R = [[-Q_00, y_0], [y_0, 0]].

    Example:
        >>> y = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
        >>> X = y * torch.tensor([2.0, 2.0, -1.0], dtype=torch.float64)  # on a line, the first two the same
        >>> kept, factor = factor_bordered(torch.outer(X, X), y, 1e-12)
        >>> kept.tolist(), [[round(v, 6) + 0.0 for v in row] for row in factor.inverse().tolist()]
        ([0, 2], [[0.0, 0.333333, -0.666667], [0.333333, 0.111111, 0.111111], [-0.666667, 0.111111, 0.111111]])
    """
    R = Q.new_zeros(2, 2)
    R[0, 0], R[0, 1], R[1, 0] = -Q[0, 0], y[0], y[0]
    H = torch.stack([y[1:], Q[0, 1:]])
    V = -(R @ H)
    size = Q.diagonal()[1:].abs() + (H * V).abs().sum(0)
    kept, L = independent(torch.addmm(Q[1:, 1:], H.T, V), share * size)
    return np.concatenate([[0], kept + 1]), BorderedFactor(R, V[:, kept], L)
