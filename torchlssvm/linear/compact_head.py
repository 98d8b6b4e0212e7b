r"""``CompactLSSVMHead``: the paper's own form of the head, which keeps only w and C.

The notation is that of Lee et al.: :math:`A = \rho I + \sum \phi \phi^T`, :math:`C = I - \rho A^{-1}`. Theorem 1 and its
corollaries update w and C by the samples that come and go; see :mod:`torchlssvm.functional.theorem1`, which also says why the
matrix that is factored is the symmetric T and not the paper's S.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from torchlssvm.errors import NotFittedError
from torchlssvm.functional import checks, cost, theorem1
from torchlssvm.functional.approximate import Approximation, approximation
from torchlssvm.functional.modes import atomically
from torchlssvm.functional.system import factor_
from torchlssvm.linear.locking import exclusive, give_lock
from torchlssvm.linear.solvers import real_targets
from torchlssvm.statistics.batch import BatchRules, SampleBatch, check_batch, joint_changes

FORMAT = 1
"""Format of a saved head; files with another number are refused."""

_SAME_COUNT = 1e-9  # a sum of weights of about 1 that is below this is rounding


class _State(NamedTuple):
    """w (D, K), the mean row (D,) and mean target (K,) for a free intercept, C (D, D), and the total weight n."""

    w: Tensor
    mean: Tensor
    target: Tensor
    C: Tensor
    n: Tensor


class CompactLSSVMHead(nn.Module):
    r"""Least-squares SVM that keeps only w and C: exact updates by Theorem 1, without old data and without statistics.

    Minimizes :math:`\rho |w_k|^2 + \sum_n (w_k^T \phi_n + b_k - y_{nk})^2` for each output k. It has no digest, and it cannot
    check that a removed sample was held: it refuses a removal only if no set of samples could give the result. Rounding errors
    add up over the calls. :class:`~torchlssvm.LSSVMHead` has neither limit; this class is for models as small as in the paper.

    Args:
        in_features: J, the number of features.
        num_classes: K, the number of classes or of float targets.
        rho: the regularization. Setting it later costs one eigendecomposition of C, and is exact.
        intercept: ``"free"``, ``"penalized"`` (a constant feature; C is then (J+1, J+1)) or ``"none"``, as in the paper.
        device: where the state lives.

    Attributes:
        w: (J, K); b: (K,); C: (J, J). Buffers, as are ``mean`` (J,), the mean of the features for a free intercept,
            ``counts`` (K,) and ``total``, the weight of all samples.

    Example:
        >>> import torch
        >>> x, y = torch.randn(60, 4), torch.arange(60) % 3
        >>> head, rest = CompactLSSVMHead(4, 3).add(x, y), CompactLSSVMHead(4, 3).add(x[5:], y[5:])
        >>> torch.allclose(head.remove(x[:5], y[:5]).w, rest.w)
        True
    """

    _lock: Any
    w: Tensor
    b: Tensor
    C: Tensor
    mean: Tensor
    counts: Tensor
    total: Tensor

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        rho: float = 1.0,
        intercept: str = "free",
        device: torch.device | str | None = None,
    ):
        super().__init__()
        give_lock(self)
        checks.one_of(intercept, "intercept", ("free", "penalized", "none"))
        for name, size in (("in_features", in_features), ("num_classes", num_classes)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be an int >= 1, got {size!r}")
        self.in_features, self.num_classes = in_features, num_classes
        self.intercept, self._rho = intercept, checks.positive(rho, "rho")
        J, K, D = in_features, num_classes, in_features + (intercept == "penalized")
        sizes = {"w": (J, K), "b": (K,), "C": (D, D), "mean": (J,), "counts": (K,), "total": ()}
        for name, shape in sizes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64, device=device))

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Device of the state."""
        return self.w.device

    @property
    def n(self) -> float:
        """The number of samples held (their total weight)."""
        return float(self.total)

    @property
    def P(self) -> Tensor:
        """P = I - C = rho A^-1, (J, J); (J+1, J+1) when penalized."""
        return torch.eye(len(self.C), dtype=torch.float64, device=self.device) - self.C

    @property
    def rho(self) -> float:
        """The regularization. With P = Q diag(p) Q^T, A has the eigenvalues rho / p, and A + (rho' - rho) I follows."""
        return self._rho

    @rho.setter
    @exclusive
    def rho(self, value: float) -> None:
        value = checks.positive(value, "rho")
        s = self._state()
        c, Q = torch.linalg.eigh(s.C)
        a = self._rho / (1 - c).clamp(min=torch.finfo(c.dtype).tiny)  # eigenvalues of A
        moved = a - self._rho + value
        w = Q @ ((a / moved)[:, None] * (Q.mT @ s.w))
        self._swap(s._replace(w=w, C=(Q * (1 - value / moved)) @ Q.mT), self.counts, value)

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, K)
        """Scores x @ w + b, float64; differentiable in x."""
        with self._lock:
            w, b, empty = self.w.clone(), self.b.clone(), not checks.is_fake(self.w) and not self.n
        if empty:
            raise NotFittedError("the head holds no samples: call add(x, y) first")
        return checks.scored_features(x, self.in_features, self.device) @ w + b

    def predict(self, x: Tensor) -> Tensor:  # (B, J) -> (B,)
        """Return the class with the highest score; ValueError for a row that holds NaN or inf."""
        return checks.finite_scores(self(x)).argmax(1)

    @exclusive
    def leave_one_out(self, x: Any, y: Any, weight: Any = None) -> Tensor:
        """Scores (B, K) of samples held, each by the head that never saw it: y - (y - f(x)) / (1 - h). Arguments as added."""
        batch = self._check(x, y, weight)
        rows, targets, d, s = self._rows(batch), real_targets(batch, self.num_classes), _weights(batch), self._state()
        centred = rows - s.mean
        h = d * ((centred @ self.P * centred).sum(1) / self.rho + (1 / self.n if self.intercept == "free" else 0.0))
        return targets - (targets - (centred @ s.w + s.target)) / (1 - h)[:, None]

    # -- changing ------------------------------------------------------------------------------------------------------

    @exclusive
    def add(self, x: Any, y: Any, weight: Any = None) -> Self:
        """Learn samples (Corollaries 1 and 3). x: (B, J); y: (B,) labels or (B, K) targets; weight: (B,)."""
        return self._change([(self._check(x, y, weight), 1)])

    @exclusive
    def remove(self, x: Any, y: Any, weight: Any = None) -> Self:
        """Unlearn samples held (Corollaries 2 and 4)."""
        return self._change([(self._check(x, y, weight), -1)])

    @exclusive
    def update(self, add: tuple[Any, ...] | None = None, remove: tuple[Any, ...] | None = None) -> Self:
        """Add and remove jointly (Theorem 1). Each argument is (x, y) or (x, y, weight)."""
        return self._change(joint_changes(self._check, add, remove))

    @exclusive
    def relabel(self, x: Any, y_old: Any, y_new: Any, weight: Any = None) -> Self:
        """Give samples held new labels or targets: C stays, and w moves by A^-1 sum phi (y_new - y_old)."""
        old, new = self._check(x, y_old, weight), self._check(x, y_new, weight)
        counts = self._counts_after([(old, -1), (new, 1)])
        s, d = self._state(), _weights(old)[:, None]
        dy = d * (real_targets(new, self.num_classes) - real_targets(old, self.num_classes))
        w = s.w + self.P @ ((self._rows(old) - s.mean).mT @ dy) / self.rho
        target = s.target + dy.sum(0) / self.n if self.intercept == "free" else s.target
        self._swap(s._replace(w=w, target=target), counts)
        return self

    @exclusive
    def replace(self, x_old: Any, y_old: Any, x_new: Any, y_new: Any) -> Self:
        """Exchange samples held for others."""
        return self.update(add=(x_new, y_new), remove=(x_old, y_old))

    @exclusive
    def clear(self) -> None:
        """Forget all samples: the head is as new."""
        self._swap(_State(*(torch.zeros_like(part) for part in self._state())), torch.zeros_like(self.counts))

    @exclusive
    def remove_approximate(self, x: Any, y: Any, weight: Any = None) -> Approximation:
        """Unlearn samples that are only roughly known; returns bounds of the error, see ``LSSVMHead.remove_approximate``."""
        batch = self._check(x, y, weight)
        if batch.size >= self.n:
            raise ValueError(f"all {self.n:g} samples would be removed: there is nothing left to estimate, use remove")
        self._change([(batch, -1)])
        mean, total = (self.mean, self.n) if self.intercept == "free" else (None, None)
        y = real_targets(batch, self.num_classes)
        return approximation(self.P, self.rho, self.w, self.b, batch.x.double(), y, _weights(batch), mean, total)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _check(self, x: Any, y: Any, weight: Any = None, ids: Any = None, like: Any = None) -> Any:
        """A checked batch; ``ids`` and ``like`` are for heads with statistics."""
        del ids, like
        rules = BatchRules(self.in_features, self.num_classes, self.device, exact=False)
        return check_batch(rules, x, y, weight)

    def _rows(self, batch: SampleBatch) -> Tensor:
        """Rows (B, D): features, with a constant one for a penalized intercept."""
        pad = (0, 1) if self.intercept == "penalized" else (0, 0)
        return nn.functional.pad(batch.x.to(torch.float64), pad, value=1.0)

    def _counts_after(self, changes: list[tuple[SampleBatch, int]]) -> Tensor:
        counts = self.counts
        for batch, sign in sorted(changes, key=lambda change: change[1]):  # removals first: they must have been held
            if batch.labels is not None:
                counts = counts.index_add(0, batch.labels, _weights(batch), alpha=sign)
            least = checks.to_host(counts.amin())
            if least[0][0] < -_SAME_COUNT:
                raise checks.removal_error(f"a count would fall to {least[0][0]:g}")
        return counts

    def _change(self, changes: list[tuple[SampleBatch, int]]) -> Self:
        """Apply Theorem 1 to a copy of the state, in blocks of rows, and take that over if every block could be."""
        changes = sorted([(b, s) for b, s in changes if b.size], key=lambda change: -change[1])  # additions first
        if not changes:
            return self
        n = self.n + sum(batch.size * sign for batch, sign in changes)
        removes = any(sign < 0 for _, sign in changes)
        if removes and (not self.n or n < -_SAME_COUNT):
            raise checks.removal_error(f"only {self.n:g} samples are held")
        counts, state, rows = self._counts_after(changes), self._state(), cost.batch_size(self.in_features)
        parts = [(self._rows(b), real_targets(b, self.num_classes), sign * _weights(b)) for b, sign in changes]
        last = removes and abs(n) < _SAME_COUNT
        if last:  # without samples there is no mean to update: their leverage alone tells whether they can be the last
            state = self._without_last(state, parts)
        elif not self.n and not removes and len(parts[0][0]) > rows:
            state = _trained(self._rho, self.intercept == "free", *parts[0])
        elif sum(len(d) for _, _, d in parts) <= rows:
            state = self._updated(state, *(torch.cat(column) for column in zip(*parts, strict=True)))
        else:
            for part in parts:
                for at in range(0, len(part[2]), rows):
                    state = self._updated(state, *(column[at : at + rows] for column in part))
        self._swap(state, counts)
        return self

    def _updated(self, s: _State, x: Tensor, y: Tensor, d: Tensor) -> _State:
        """Theorem 1. x: (L, D); y: (L, K); d: (L,) signed weights, additions first."""
        free, n = self.intercept == "free", float(s.n)
        mean, target = (d @ x / d.sum(), d @ y / d.sum()) if free and not n else (s.mean, s.target)
        X = x - mean
        U = (X - X @ s.C) / self._rho  # A^-1 phi = P phi / rho
        G = X @ U.mT + (1 / n if free and n else 0.0)
        change = theorem1.factor_change(G, d, int((d > 0).sum()))
        if bool(change.info != 0):
            raise checks.removal_error("without these samples the system would not be positive definite")
        (Za, Zr), (ra, rr) = theorem1.halves(change, U), theorem1.halves(change, X @ s.w + target - y)
        w = s.w - Za.mT @ ra + Zr.mT @ rr
        if free and n:  # the intercept is one more coordinate, with the matrix n and the column of ones
            one, minus_one = theorem1.halves(change, torch.ones_like(d)[:, None])
            step = d @ X / (n + d.sum())
            target = target - (ra.mT @ one - rr.mT @ minus_one)[:, 0] / n + step @ w
            mean = mean + step
        return _State(w, mean, target, s.C + self._rho * (Za.mT @ Za - Zr.mT @ Zr), s.n + d.sum())

    def _without_last(self, s: _State, parts: list[tuple[Tensor, Tensor, Tensor]]) -> _State:
        """The empty state; RemovalError if one of the last samples has a leverage above one, which no sample held can have."""
        for x, _, d in parts:
            X = (x - s.mean) * d.abs().sqrt()[:, None]
            if len(parts) == 1 and bool(((X - X @ s.C) * X).sum(1).amax() > self._rho * (1 + 1e-6)):
                raise checks.removal_error("the last samples held are others")
        return _State(*(torch.zeros_like(part) for part in s))

    def _state(self) -> _State:
        """The state in the coordinates of Theorem 1: a penalized intercept is the last row of w."""
        if self.intercept == "penalized":
            w = torch.cat([self.w, self.b[None]])
            return _State(w, w.new_zeros(len(w)), torch.zeros_like(self.b), self.C, self.total)
        return _State(self.w, self.mean, self.b + self.mean @ self.w, self.C, self.total)

    @atomically
    def _swap(self, s: _State, counts: Tensor, rho: float | None = None) -> None:
        """Take over a state that was built aside."""
        w, b = s.w, s.target - s.mean @ s.w
        if self.intercept == "penalized":
            w, b = s.w[:-1], s.w[-1]
        self._rho = self._rho if rho is None else rho
        new = {"w": w, "b": b, "C": s.C, "mean": s.mean[: self.in_features], "counts": counts, "total": s.n}
        for name, value in new.items():
            self._buffers[name].copy_(value)  # type: ignore[union-attr]  # in place: others may hold the buffer

    # -- nn.Module -----------------------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move to another device with the module; the dtype stays float64 whatever ``.half()`` asks for."""
        device = fn(torch.empty(0, device=self.device)).device
        super()._apply(lambda tensor: tensor.to(device), recurse)  # type: ignore[no-untyped-call]
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """The options, which a saved state has beside the buffers."""
        return {"format": FORMAT, "rho": self._rho, "intercept": self.intercept}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over rho from a saved state."""
        self._rho = float(state["rho"])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.get(prefix + "_extra_state")
        if saved is not None and (saved.get("format"), saved.get("intercept")) != (FORMAT, self.intercept):
            rest[-1].append(
                f"CompactLSSVMHead: format {saved.get('format')!r} and intercept {saved.get('intercept')!r} in the saved head, "
                f"{FORMAT} and {self.intercept!r} here"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: all but the lock."""
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`__getstate__` returned."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        give_lock(self)

    def extra_repr(self) -> str:
        """Shape, options and count."""
        shape = f"in_features={self.in_features}, num_classes={self.num_classes}"
        return f"{shape}, n={self.n:g}, rho={self.rho:g}, intercept={self.intercept!r}"


def _weights(batch: SampleBatch) -> Tensor:
    """Weights (B,) of a batch, 1 unless given."""
    return torch.ones(len(batch), dtype=torch.float64, device=batch.x.device) if batch.mult is None else batch.mult


def _trained(rho: float, free: bool, x: Tensor, y: Tensor, d: Tensor) -> _State:
    """The initial training: one solve. x: (n, D); y: (n, K); d: (n,)."""
    mean, target = (d @ x / d.sum(), d @ y / d.sum()) if free else (torch.zeros_like(x[0]), torch.zeros_like(y[0]))
    weighted = (x - mean) * d[:, None]
    A = weighted.mT @ (x - mean)
    A.diagonal().add_(rho)
    factor = factor_(A, len(A))
    w = factor.solve((y - target).mT @ weighted).mT
    C = factor.inverse().mul_(-rho)
    C.diagonal().add_(1.0)
    return _State(w, mean, target, C, d.sum())
