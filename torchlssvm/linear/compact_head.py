r"""``CompactLSSVMHead``: the paper's own form of the head, which keeps only w and C.

The notation is that of Lee et al.: :math:`A = \rho I + \sum \phi \phi^T`, :math:`C = I - \rho A^{-1}`. Theorem 1 and its
corollaries update w and C when samples are added or removed. :mod:`torchlssvm.functional.theorem1` explains the update, and why
it factors the symmetric matrix T instead of the paper's S.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from torchlssvm.errors import NotFittedError
from torchlssvm.functional import checks, cost
from torchlssvm.functional.approximate import Approximation, approximation
from torchlssvm.functional.modes import atomically
from torchlssvm.functional.module_state import device_after
from torchlssvm.linear.checkpoint import FORMAT
from torchlssvm.linear.locking import exclusive, give_lock
from torchlssvm.linear.row_scale import RowScale
from torchlssvm.linear.solution import Solution, TooInaccurate
from torchlssvm.linear.solvers import real_targets
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.batch import SampleBatch, signed_samples
from torchlssvm.statistics.statistics import RELATIVE_ROUNDING


class CompactLSSVMHead(nn.Module):
    r"""Least-squares SVM that keeps only w and C: exact updates by Theorem 1, without old data and without statistics.

    Minimizes :math:`\rho |w_k|^2 + \sum_n (w_k^T \phi_n + b_k - y_{nk})^2` for each output k. The head has no digest, and it
    cannot check that a removed sample was held. It refuses a removal only if no set of samples could give the result. Rounding
    errors add up over the calls. :class:`~torchlssvm.LSSVMHead` has none of these limits. Use this class for models as small as
    in the paper.

    Args:
        in_features: J, the number of features.
        num_classes: K, the number of classes or of float targets.
        rho: the regularization. Setting it later is exact and costs one eigendecomposition of C.
        intercept: ``"free"``, ``"penalized"`` (a constant feature; C is then (J+1, J+1)) or ``"none"``, as in the paper.
        device: device of the weights and C.

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
        """The number of samples (their total weight)."""
        return float(self.total)

    @property
    def P(self) -> Tensor:
        """P = I - C = rho A^-1, of shape (J, J), or (J+1, J+1) with a penalized intercept."""
        return torch.eye(len(self.C), dtype=torch.float64, device=self.device) - self.C

    @property
    def rho(self) -> float:
        """The regularization. With P = Q diag(p) Q^T, A has the eigenvalues rho / p, and A + (rho' - rho) I follows."""
        return self._rho

    @rho.setter
    @exclusive
    def rho(self, value: float) -> None:
        value = checks.positive(value, "rho")
        s, before = self._solution(), self._rho
        p, Q = torch.linalg.eigh(s.inverse())
        p = p.clamp(min=torch.finfo(p.dtype).tiny)  # A has the eigenvalues rho / p
        shrunk = before / (before + (value - before) * p)
        root = (value / before) ** 0.5
        w, P = Q @ (shrunk[:, None] * (Q.mT @ s.w)) * root, (Q * (p * shrunk * (value / before))) @ Q.mT
        s.set_base(w, s.beta, s.mu / root, s.n, P=P)
        self._swap(s, self.counts, self.total, value)

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, K)
        """Scores x @ w + b, float64; differentiable in x."""
        with self._lock:
            w, b, empty = self.w.clone(), self.b.clone(), not checks.is_fake(self.w) and not self.n
        if empty:
            raise NotFittedError("the head holds no samples: call add(x, y) first")
        return checks.scored_features(x, self.in_features, self.device) @ w + b

    def predict(self, x: Tensor) -> Tensor:  # (B, J) -> (B,)
        """Return the class with the highest score (B,). Raises ValueError for a row with NaN or inf, and for float targets."""
        scores = checks.finite_scores(self(x))
        if not torch.compiler.is_compiling() and not checks.is_fake(scores) and not bool(self.counts.any()):
            raise ValueError("this head has learned float targets (B, K), not classes: use its scores, head(x)")
        return scores.argmax(1)

    @exclusive
    def leave_one_out(self, x: Any, y: Any, weight: Any = None) -> Tensor:
        """Return leave-one-out scores (B, K): y - (y - f(x)) / (1 - h). Pass the samples as they were added."""
        if not self.n:
            raise NotFittedError("the head holds no samples: call add(x, y) first")
        batch = self._check(x, y, weight)
        targets = real_targets(batch, self.num_classes)
        return (
            targets - (targets - (batch.x.to(torch.float64) @ self.w + self.b)) / (1 - self._leverages(batch))[:, None]
        )

    # -- changing ------------------------------------------------------------------------------------------------------

    @exclusive
    def add(self, x: Any, y: Any, weight: Any = None) -> Self:
        """Learn samples (Corollaries 1 and 3). x: (B, J); y: (B,) labels or (B, K) targets; weight: (B,)."""
        return self._change([(self._check(x, y, weight), 1)])

    @exclusive
    def remove(self, x: Any, y: Any, weight: Any = None) -> Self:
        """Unlearn samples (Corollaries 2 and 4)."""
        return self._change([(self._check(x, y, weight), -1)])

    @exclusive
    def update(self, add: tuple[Any, ...] | None = None, remove: tuple[Any, ...] | None = None) -> Self:
        """Add and remove jointly (Theorem 1). Each argument is (x, y) or (x, y, weight)."""
        return self._change([(self._check(*samples), sign) for samples, sign in signed_samples(add, remove, ids=False)])

    @exclusive
    def relabel(self, x: Any, y_old: Any, y_new: Any, weight: Any = None) -> Self:
        """Give samples new labels or targets. C does not change, and w changes by A^-1 sum phi (y_new - y_old)."""
        old, new = self._check(x, y_old, weight), self._check(x, y_new, weight)
        counts, s, d = self._counts_after([(old, -1), (new, 1)]), self._solution(), _weights(old)[:, None]
        dy = d * (real_targets(new, self.num_classes) - real_targets(old, self.num_classes))
        s.shift_targets(self._scale.rows(old.x), dy)
        self._swap(s, counts, self.total)
        return self

    @exclusive
    def replace(self, x_old: Any, y_old: Any, x_new: Any, y_new: Any) -> Self:
        """Replace samples with others."""
        return self.update(add=(x_new, y_new), remove=(x_old, y_old))

    @exclusive
    def clear(self) -> None:
        """Forget all samples, so that the head equals a new one."""
        self._swap(self._empty(), torch.zeros_like(self.counts), torch.zeros_like(self.total))

    @exclusive
    def remove_approximate(self, x: Any, y: Any, weight: Any = None) -> Approximation:
        """Unlearn samples that you know only approximately. Returns error bounds as ``LSSVMHead.remove_approximate`` does."""
        batch = self._check(x, y, weight)
        if batch.size >= self.n:
            raise ValueError(f"all {self.n:g} samples would be removed: there is nothing left to estimate, use remove")
        self._change([(batch, -1)])
        mean, total = (self.mean, self.n) if self.intercept == "free" else (None, None)
        y = real_targets(batch, self.num_classes)
        return approximation(self.P, self.rho, self.w, self.b, batch.x.double(), y, _weights(batch), mean, total)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _check(self, x: Any, y: Any, weight: Any = None) -> SampleBatch:
        """A checked batch."""
        return Statistics(self.in_features, self.num_classes, grid=None, device=self.device).check(x, y, weight)

    @property
    def _scale(self) -> RowScale:
        """The coordinates of a :class:`Solution`."""
        return RowScale(1.0, self._rho, self.intercept)

    def _leverages(self, batch: SampleBatch) -> Tensor:
        """d (phi^T A^-1 phi + 1/n) (B,), which is 1 at most for current samples."""
        rows, free = self._scale.rows(batch.x), self.intercept == "free"
        rows = rows - self.mean / self._scale.root if free else rows
        return _weights(batch) * ((rows @ self.P * rows).sum(1) + (1 / self.n if free else 0.0))

    def _counts_after(self, changes: list[tuple[SampleBatch, int]]) -> Tensor:
        counts = self.counts
        for batch, sign in sorted(changes, key=lambda change: change[1]):  # removals first: only earlier samples
            if batch.labels is not None:
                counts = counts.index_add(0, batch.labels, _weights(batch), alpha=sign)
            least = checks.to_host(counts.amin())
            if least[0][0] < -RELATIVE_ROUNDING:
                raise checks.removal_error(f"a count would fall to {least[0][0]:g}")
        return counts

    def _change(self, changes: list[tuple[SampleBatch, int]]) -> Self:
        """Apply Theorem 1 to a copy of the state, in blocks of rows, and take that over if every block could be."""
        changes = sorted([(b, s) for b, s in changes if b.size], key=lambda change: -change[1])  # additions first
        if not changes:
            return self
        n = self.n + sum(batch.size * sign for batch, sign in changes)
        removes = any(sign < 0 for _, sign in changes)
        if removes and (not self.n or n < -RELATIVE_ROUNDING):
            raise checks.removal_error(f"only {self.n:g} samples are held")
        counts, solution, size = self._counts_after(changes), self._solution(), cost.batch_size(self.in_features)
        if (
            removes and abs(n) < RELATIVE_ROUNDING
        ):  # without samples there is no mean to update, so only the leverage reveals other samples
            if len(changes) == 1 and bool(self._leverages(changes[0][0]).amax() > 1 + 1e-6):
                raise checks.removal_error("the last remaining samples are others")
            solution, n = self._empty(), 0.0
        else:
            for batch, sign in changes:
                y, d = real_targets(batch, self.num_classes), sign * _weights(batch)
                rows = self._scale.rows(batch.x)
                if solution.empty and not removes and len(rows) > size:
                    solution.train(rows, y, d)
                    continue
                for part in zip(rows.split(size), y.split(size), d.split(size), strict=True):
                    if solution.pending + len(part[0]) > size:
                        self._take_in(solution)
                    solution.append(*part, sign)
            self._take_in(solution)
        self._swap(solution, counts, self.total.new_tensor(n))
        return self

    def _take_in(self, solution: Solution) -> None:
        """Take in the rows that are pending."""
        try:
            solution.take_in()
        except TooInaccurate as error:
            raise checks.removal_error("without these samples the system would not be positive definite") from error
        solution.inverse()

    def _empty(self) -> Solution:
        """The solution without samples."""
        return Solution(len(self.C), self.num_classes, self.intercept == "free", self.device)

    def _solution(self) -> Solution:
        """The state as a solution, which Theorem 1 changes: a penalized intercept is the last row of w."""
        out, w = self._empty(), self._scale.point(self.w, self.b)
        if not self.n:
            return out
        if self.intercept == "penalized":
            out.set_base(w, out.beta, out.mu, 1.0, P=self.P)
        else:
            target, n = self.b + self.mean @ self.w, self.n if self.intercept == "free" else 1.0
            out.set_base(w, target, self.mean / self._scale.root, n, P=self.P)
        return out

    @atomically
    def _swap(self, s: Solution, counts: Tensor, total: Tensor, rho: float | None = None) -> None:
        """Take over a state that was built aside."""
        self._rho = self._rho if rho is None else rho
        w, b = self._scale.weights(s.w, s.beta, s.mu)
        mean = s.mu[: self.in_features] * self._scale.root
        C = torch.eye(s.D, dtype=torch.float64, device=self.device) - s.inverse()
        new = {"w": w, "b": b, "C": C, "mean": mean, "counts": counts, "total": total}
        for name, value in new.items():
            self._buffers[name].copy_(value)  # type: ignore[union-attr]  # in place: others may hold the buffer

    # -- nn.Module -----------------------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move to another device with the module; the dtype stays float64 whatever ``.half()`` asks for."""
        device = device_after(fn, self.device)
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

    @exclusive
    def __getstate__(self) -> dict[str, Any]:
        """State for pickling and copying: everything except the lock, of one moment."""
        kept = {name: value for name, value in self.__dict__.items() if name != "_lock"}
        return kept | {"_buffers": {name: value.clone() for name, value in kept["_buffers"].items()}}

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
