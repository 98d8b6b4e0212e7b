"""``LSSVMHead``: a least-squares SVM on features, whose data can be added, removed and corrected exactly."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from torchlssvm.errors import NumericalWarning
from torchlssvm.functional import checks
from torchlssvm.functional.approximate import Approximation
from torchlssvm.functional.modes import exactly
from torchlssvm.functional.votes import votes
from torchlssvm.linear.approximate_removal import REASON, remove_approximate
from torchlssvm.linear.judging import Judging
from torchlssvm.linear.locking import exclusive
from torchlssvm.linear.solution import NotPositiveDefinite
from torchlssvm.statistics import FixedPoint, Statistics
from torchlssvm.statistics.batch import GridChoices, SampleBatch, check_batch

__all__ = ["FixedPoint", "LSSVMHead"]


class LSSVMHead(Judging):
    r"""Least-squares SVM head: one pass to learn, one exact call to add, remove, relabel or merge.

    Minimizes :math:`\rho |w_k|^2 + \sum_n (w_k^T \phi_n + b_k - y_{nk})^2` for each output k, with y = +1 for the class and
    -1 otherwise (or float targets), and keeps :math:`P = I - C = \rho A^{-1}`, :math:`A = \rho I + \sum \phi \phi^T`.

    Statistics are the truth, weights are a cache: ``add`` and ``remove`` change integer sums at once; ``w``, ``b``, ``C``
    and ``P`` are brought up to date when somebody looks, by Theorem 1 or by a solve, whichever is cheaper.

    Args:
        in_features: J, the number of features.
        num_classes: K, the number of classes (or of float targets; 1 for plain regression).
        rho: the regularization, settable at any time.
        intercept: ``"free"``, ``"penalized"`` (a constant feature, LPSVM) or ``"none"``.
        class_weight: None, ``"balanced"`` (n / (K n_k)), ``"complement"`` ((n - n_k) / n), or a tensor (K,). Settable.
        multiclass: ``"ovr"`` (one matrix for all classes) or ``"ovo"`` (one system per pair i < j; ``w`` is then (J, pairs),
            ``b`` (pairs,), ``C`` and ``P`` (pairs, J, J), in the order (0,1), (0,2), ...; scores are votes, ties broken by
            margins).
        grid: a :class:`FixedPoint`, ``"auto"`` (a power of two from the first batch), or None for float64 sums.
        target_grid: the same for float targets.
        statistics: False keeps w and P only, the paper's compact form; features are then used as given unless ``grid`` is
            a :class:`FixedPoint`.
        per_class: keep sums per class; None means when ``class_weight`` or ``"ovo"`` needs it. ``forget_class`` needs it.
        folds: keep sums for so many folds, chosen by a hash of the sample's id.
        device: where the state lives.

    Example:
        >>> import torch
        >>> x, y = torch.randn(200, 16), torch.arange(200) % 3
        >>> x[:, 0] += 4 * y
        >>> head = LSSVMHead(16, 3, grid=FixedPoint(limit=32.0)).add(x, y)
        >>> bool((head.predict(x) == y).float().mean() > 0.6)
        True
        >>> rest = LSSVMHead(16, 3, grid=FixedPoint(limit=32.0)).add(x[50:], y[50:])
        >>> head.remove(x[:50], y[:50]).digest() == rest.digest()
        True
    """

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, K)
        """Scores x @ w + b (votes for ovo), float64; differentiable in x."""
        self._fitted()
        usable = isinstance(x, Tensor) and x.device == self.device and not x.is_complex()
        if not usable or x.ndim != 2 or x.shape[1] != self.in_features:
            x = checks.features(x, self.in_features, self.device)  # takes arrays, and says what is wrong with the rest
        weights = self._published or self._current()[:2]  # one read: another thread may be changing the head
        w, b = weights
        scores = x.to(torch.float64) @ w + b
        return votes(scores, self.num_classes) if self.multiclass == "ovo" else scores

    def predict(self, x: Tensor) -> Tensor:  # (B, J) -> (B,)
        """The class with the highest score."""
        scores: Tensor = self(x)
        return scores.argmax(1)

    @exclusive
    def digest(self) -> str:
        """SHA-256 of the statistics: equal exactly when the statistics are. See :mod:`torchlssvm.statistics`."""
        return self._need_statistics("a digest").digest()

    @exclusive
    def drift(self) -> float:
        """The largest relative deviation of the weights in use from those solved from statistics. Costs a solve."""
        self._need_statistics("drift")
        w = self._current()[0]
        if self.n == 0:
            return 0.0
        exact = self._engine.exact_weights()
        return float((w - exact).abs().max() / exact.abs().max().clamp(min=torch.finfo(w.dtype).tiny))

    @exclusive
    def refresh(self) -> LSSVMHead:
        """Solve from statistics now: weights are then bit for bit those of a fresh head with the same data."""
        self._need_statistics("refresh")
        now = {name: version == self._version for name, (version, _) in self._made.items()}
        with self._changing():
            self._engine.reset()
        for name, (version, text) in self._made.items():  # no sample has changed
            self._made[name] = (self._version if now[name] else version, text)
        self._current()
        return self

    # -- changing ------------------------------------------------------------------------------------------------------

    @exclusive
    def add(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> LSSVMHead:
        """Learn samples. x: (B, J); y: (B,) labels or (B, K) targets; weight: (B,), integers on a grid; ids: for folds."""
        return self._apply_changes([(self._check(x, y, weight, ids), 1)])

    @exclusive
    def remove(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> LSSVMHead:
        """Unlearn samples held: the same arguments, bit for bit, as when they were added."""
        return self._apply_changes([(self._check(x, y, weight, ids), -1)])

    @exclusive
    def remove_approximate(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> Approximation:
        """Unlearn samples that are only roughly known, e.g. features computed again on another device.

        The result is not the head that never saw them, and ``uncertifiable`` says so from then on. Returns what it can be off
        by: ``estimate(sigma)`` for noise of that standard deviation in each feature, ``bound(delta)`` at worst.
        """
        return remove_approximate(self, x, y, weight, ids)

    @exclusive
    def update(self, add: tuple[Any, ...] | None = None, remove: tuple[Any, ...] | None = None) -> LSSVMHead:
        """Add and remove jointly (Theorem 1). Each argument is (x, y), or (x, y, weight, ids)."""
        changes: list[tuple[SampleBatch, int]] = []
        for name, samples, sign in (("add", add, 1), ("remove", remove, -1)):
            if samples is None:
                continue
            if not isinstance(samples, tuple | list) or not 2 <= len(samples) <= 4:
                raise ValueError(f"{name} must be (x, y), (x, y, weight) or (x, y, weight, ids)")
            weight, ids = (*samples[2:], None, None)[:2]
            like = changes[0][0] if changes else None
            changes.append((self._check(samples[0], samples[1], weight, ids, like), sign))
        return self._apply_changes(changes)

    @exclusive
    def relabel(self, x: Any, y_old: Any, y_new: Any, weight: Any = None, ids: Any = None) -> LSSVMHead:
        """Give samples held new labels (or targets): P and C stay as they are, unless weights depend on the label."""
        old = self._check(x, y_old, weight, ids)
        new = self._check(x, y_new, weight, ids)
        stats = self.statistics
        plain = stats is not None and not stats.per_class and not stats.folds and old.labels is not None
        if not len(old):
            return self
        if stats is not None and plain:
            rows = self._rows.changed([(old, -1), (new, 1)])
            with self._changing():
                q = stats.relabel(old, new, proven=self.checked)
                self._rows = rows
                self._engine.relabelled(old, new, q)
                self._note([(old, -1), (new, 1)])
        elif stats is None and self._options.class_weight is None:
            with self._changing():
                self._engine.relabel(old, new)
        else:
            self._apply_changes([(old, -1), (new, 1)])
        return self

    @exclusive
    def replace(
        self, x_old: Any, y_old: Any, x_new: Any, y_new: Any, ids_old: Any = None, ids_new: Any = None
    ) -> LSSVMHead:
        """Exchange samples held for others. ids: for folds."""
        return self.update(add=(x_new, y_new, None, ids_new), remove=(x_old, y_old, None, ids_old))

    def merge(self, other: LSSVMHead) -> LSSVMHead:
        """Take over everything the other head has learned: same shapes, same grid."""
        return self._merge(other, 1)

    def __iadd__(self, other: LSSVMHead) -> LSSVMHead:
        """Merge."""
        return self.merge(other)

    def __isub__(self, other: LSSVMHead) -> LSSVMHead:
        """Remove everything the other head has learned."""
        return self._merge(other, -1)

    @exclusive
    def add_classes(self, k: int) -> LSSVMHead:
        """Make room for k more classes; samples held are negative examples of them (float targets: 0)."""
        stats = self._need_statistics("add_classes")
        if isinstance(self._options.class_weight, Tensor):
            raise ValueError("class_weight is a tensor (K,): set it to None first, then to one for the new classes")
        checks.natural(k, "k")
        with self._changing():
            stats.add_classes(k)
            self._num_classes = stats.num_classes
            self._engine.reset()
        return self

    @exclusive
    def forget_class(self, c: int) -> LSSVMHead:
        """Unlearn all samples of one class, without them. The class keeps its number."""
        stats = self._need_statistics("forget_class")
        if not stats.per_class:
            raise ValueError("forgetting a class needs statistics per class: use per_class=True")
        checks.label(c, self.num_classes)
        rows = self._rows.without_class(c)
        with self._changing():
            stats.forget_class(c)
            stats.canonicalize()
            self._rows = self._no_rows() if stats.empty else rows
            self._engine.reset()
        return self

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check(
        self, x: Any, y: Any, weight: Any = None, ids: Any = None, like: SampleBatch | None = None
    ) -> SampleBatch:
        if self.statistics is not None:
            batch = self.statistics.check(x, y, weight, ids, like)
        else:
            choices = self._engine.choices if like is None or not self._engine.empty else like.choices
            batch = check_batch(
                x, y, weight, ids, J=self.in_features, K=self.num_classes, folds=0, device=self.device,
                exact=self._grid is not None, choices=choices, wanted=GridChoices(None, self._grid, self._target_grid),
            )  # fmt: skip
        if len(batch) and batch.labels is None and (self._options.class_weight is not None or self.multiclass == "ovo"):
            raise ValueError("class_weight and multiclass='ovo' need labels (B,), got float targets")
        return batch

    def _apply_changes(self, changes: list[tuple[SampleBatch, int]], rough: bool = False) -> LSSVMHead:
        """Change the state by checked batches, all or none. ``rough``: what is removed is only roughly what is held."""
        changes = [(b, s) for b, s in changes if len(b)]
        if not changes:
            return self
        self._check_whole()
        stats, removes = self.statistics, any(s < 0 for _, s in changes)
        if stats is None:
            with self._changing():
                self._engine.apply(changes)
            return self
        rows = self._rows.dropped(REASON) if rough else self._rows.changed(changes)
        rough = rough or self._uncertifiable is not None
        doubtful = removes and not self._vouched and rows.unchecked is not None
        undo = _Undo(stats, changes) if doubtful else None
        with self._changing():
            views = stats.change(changes, held=True, rough=rough, proven=not doubtful)
            self._engine.changed(changes, views)
            if undo is not None:
                self._test_sums(undo, rough)
            self._rows = rows
            self._note(changes)
            if removes and stats.drained:
                self._emptied(stats)
        return self

    def _test_sums(self, undo: _Undo, rough: bool) -> None:
        """RemovalError, with everything put back, if the sums cannot be those of samples."""
        stats, reason = undo.stats, None
        if stats.drained and not checks.is_fake(stats.counts):
            stats.canonicalize()
            if not stats.empty and not rough:
                reason = "no sample would be left, but the sums would not be zero"
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NumericalWarning)  # the next read says it
                try:
                    self._engine.weights(doubtful=True)
                except NotPositiveDefinite:
                    reason = "without the samples removed the system would not be positive definite"
        if reason is not None:
            undo.run()
            self._engine.reset()
            raise checks.removal_error(reason)

    def _note(self, changes: list[tuple[SampleBatch, int]]) -> None:
        """Where ranks may exchange changes, remember which samples changed, if their ids are given."""
        shared = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.statistics is not None and self.statistics.exact and (shared or self.statistics.marked):
            for batch, sign in changes:
                self._ledger.note(batch, sign, self.statistics.grid)

    def _emptied(self, stats: Statistics) -> None:
        """No sample is left: the head is as new, also if the sums are only roughly zero."""
        stats.canonicalize()
        if not stats.empty and not checks.is_fake(stats.counts):
            stats.__dict__.update(stats.zero().__dict__)
        self._uncertifiable, self._rows = None, self._no_rows()
        self._engine.reset()

    @exactly
    def _merge(self, other: LSSVMHead, sign: int) -> LSSVMHead:
        if not isinstance(other, LSSVMHead):
            raise ValueError(f"can only merge with another LSSVMHead, got {type(other).__name__}")
        mine, theirs = self._need_statistics("merging"), other._need_statistics("merging")
        if self.intercept != other.intercept or self.multiclass != other.multiclass:
            raise ValueError(
                f"cannot merge heads: intercept {self.intercept!r}, multiclass {self.multiclass!r} here and "
                f"{other.intercept!r}, {other.multiclass!r} there"
            )
        first, second = sorted(
            (self, other), key=id
        )  # one order for all threads, so that none waits for another for ever
        with first._lock, second._lock:
            other._check_whole()
            theirs = theirs.copy() if mine is theirs else theirs
            mine.compatible(theirs)
            if sign > 0:
                self._ledger.refuse_twice(other._ledger.merged)
            rows = self._rows.merged(other._rows, sign)
            doubtful = sign < 0 and rows.unchecked is not None
            undo = _Undo(mine, theirs) if doubtful else None
            with self._changing():
                mine.merge(theirs, sign, held=True)
                self._engine.reset()
                if undo is not None:
                    self._test_sums(undo, self._uncertifiable is not None)
                self._rows = rows
                self._ledger.combine(other._ledger, sign)
                self._uncertifiable = self._uncertifiable or other._uncertifiable
                if sign < 0 and mine.drained:
                    self._emptied(mine)
        return self


class _Undo:
    """Takes a removal back that turned out to be impossible: exactly, by the opposite change or from a copy."""

    def __init__(self, stats: Statistics, change: list[tuple[SampleBatch, int]] | Statistics):
        self.stats, self.change = stats, change
        self.copy = None if stats.exact else stats.copy()

    def run(self) -> None:
        """Put the sums back."""
        if self.copy is not None:
            self.stats.__dict__.update(self.copy.__dict__)
        elif isinstance(self.change, Statistics):
            self.stats.merge(self.change)
        else:
            self.stats.change([(b, -s) for b, s in self.change])
