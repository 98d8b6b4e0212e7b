"""``LSSVMHead``: a least-squares SVM on features, whose data can be added, removed and corrected exactly."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.functional.approximate import Approximation, approximation
from torchlssvm.functional.byte_tensors import bytes_to_tensor, tensor_to_bytes
from torchlssvm.functional.grid import FixedPoint, GridOption, as_grid, grid_to_json
from torchlssvm.functional.threads import threads_for
from torchlssvm.functional.votes import votes
from torchlssvm.linear import checkpoint
from torchlssvm.linear.diagnostics import rho_rule
from torchlssvm.linear.diagnostics.influence import Measure, influence
from torchlssvm.linear.diagnostics.leave_one_out import leave_one_out
from torchlssvm.linear.diagnostics.rho_selection import RhoPath, decided, rho_path
from torchlssvm.linear.diagnostics.whitened_problems import HeadView
from torchlssvm.linear.discriminant_rule import check_rule, resolve_rule
from torchlssvm.linear.linear_head import LinearHead, check_class_weight, refuse_for_targets
from torchlssvm.linear.locking import catch_up, exclusive
from torchlssvm.linear.membership import Counts, HeldRows, StagedRows
from torchlssvm.linear.normal_equations import class_weights
from torchlssvm.linear.pending import Changes, Pending
from torchlssvm.linear.solvers import SharedSolver, Solver, SolverOptions, make_solver, real_targets, weighted_labels
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.batch import SampleBatch
from torchlssvm.statistics.statistics import Evidence, Integrity

__all__ = ["FixedPoint", "LSSVMHead"]

INEXACT_REMOVAL = "remove_approximate took out samples that may not be, bit for bit, those that were added"
"""Reason why a head can no longer be certified, and why its rows are no longer known."""

UNKNOWN_ROWS = "samples were merged whose rows are not known, or known under another key"
"""Reason why removals are not checked against the rows of the head."""


class LSSVMHead(LinearHead):
    r"""Least-squares SVM head that learns in one pass and adds, removes, relabels or merges samples exactly.

    Minimizes :math:`\rho |w_k|^2 + \sum_n (w_k^T \phi_n + b_k - y_{nk})^2` for each output k, with y = +1 for the class and
    -1 otherwise (or float targets), and keeps :math:`P = I - C = \rho A^{-1}`, :math:`A = \rho I + \sum \phi \phi^T`.

    The head stores integer sums of its samples, which ``add`` and ``remove`` change immediately. ``w``, ``b``, ``C`` and ``P``
    are computed from these sums and cached. Reading one of them brings it up to date, either by Theorem 1 or by a new solve,
    whichever is cheaper.

    Args:
        in_features: J, the number of features.
        num_classes: K, the number of classes, labels or values to predict.
        targets: what ``y`` contains. ``"classes"``: one label per sample (B,); float targets (B, K) are also learned, but
            ``predict`` then raises an error. ``"multilabel"``: booleans, or zeros and ones, (B, K); each label is learned
            separately as -1 and +1. ``"regression"``: numbers (B, K), or (B,) if K = 1, rounded to ``target_grid``.
        rho: the regularization, a number > 0 or ``"gcv"``. Can be set at any time. ``"gcv"`` chooses a power of two from the
            statistics alone and prefers the larger value in a near-tie. The first read with 10 samples of two classes chooses
            rho; before that, rho is 1.0. ``refresh()``, the end of a fit or command, and a certificate choose again. In
            between, rho stays fixed so that Theorem 1 applies, and ``choices`` reports that rho is older than the samples.
        intercept: ``"free"``, ``"penalized"`` (a constant feature, LPSVM) or ``"none"``.
        class_weight: None, ``"balanced"`` (n / (P n_k) for P classes with samples), ``"complement"`` ((n - n_k) / n),
            or a tensor (K,). Can be set at any time if sums are kept per class. With ``targets="multilabel"``, each label is a
            problem of two classes, the samples with the label and those without it; a tensor (K,) weights the samples with each
            label, as ``pos_weight`` of ``torch.nn.BCEWithLogitsLoss`` does. Each label then has its own matrix and solve.
        multiclass: ``"ovr"`` (one matrix for all classes) or ``"ovo"`` (one system per pair i < j, in the order (0,1), (0,2),
            ...; the pairs vote, and margins break ties).
        grid: a :class:`FixedPoint`, a number (the largest feature that the grid can represent), ``"auto"`` (a power of two
            from the first batch), or None for float64 sums.
        target_grid: the grid for float targets, given like ``grid``. ``"auto"`` rounds targets to 2^-20 of the largest target
            in the first batch, and represents whole numbers below a million exactly.
        per_class: keep sums per class, which ``forget_class`` requires, or per label. Default: only if ``class_weight`` or
            ``"ovo"`` requires them.
        rule: how to compute weights from the sums: ``"least_squares"``, ``"lda"`` or ``"auto"``. Can be set at any time.
            ``"lda"`` is the linear discriminant with the within-class scatter S_w + rho I and priors from the (weighted) class
            counts. With many classes and few features, least squares hides classes that lie between others; the discriminant
            does not. ``"lda"`` requires labels, a free intercept and one-vs-rest. rho is still chosen for least squares, and P
            and C are those of least squares. ``"auto"`` uses the discriminant for three or more classes and at most 100
            features per class; a store, which has the samples, chooses by leave-one-out accuracy.
        folds: number of folds to keep separate sums for. A hash of the sample id assigns each sample to a fold.
        normalize: how to normalize each row before it is rounded to the grid. ``"l2"`` divides the row by its length and leaves
            a row of zeros unchanged. ``"sqrt"`` takes sign(x) sqrt|x|. ``forward`` normalizes its inputs in the same way.
            Default: no normalization.
        scale: ``"std"`` standardizes features. The mean and deviation (unweighted, n in the denominator, 1 for a constant
            column) are computed from the statistics at each solve, so a removed sample no longer affects them. ``w`` and ``b``
            apply to the original features, ``C`` and ``P`` to the standardized ones. Every change then requires a new solve.
            Leave-one-out and influence hold the scale fixed.
        membership: keep a hash of each row, so that each removal is checked immediately.
        device: device of the sums and weights.

    Attributes:
        statistics: the sums of the current samples.
        pending: the changes since machines last agreed, for :mod:`torchlssvm.distributed`.

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

    _solver: Solver
    _buffer_names = ("w", "b", "C")
    _saved_names = ("P", "solution.w", "statistics.meta", "statistics.counts")
    _optional_names = (
        "statistics.sums", "solution.beta", "solution.mu", "solution.n", "solution.b", "membership",
        "pending.counts", "pending.sums", "pending.meta", "pending.rows",
    )  # fmt: skip

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        rho: float | str = "gcv",
        intercept: str = "free",
        class_weight: str | Tensor | None = None,
        multiclass: str = "ovr",
        grid: GridOption = "auto",
        target_grid: GridOption = "auto",
        rule: str = "least_squares",
        targets: str = "classes",
        per_class: bool | None = None,
        folds: int = 0,
        normalize: str | None = None,
        scale: str | None = None,
        membership: bool = True,
        device: torch.device | str | None = None,
    ):
        checks.one_of(multiclass, "multiclass", ("ovr", "ovo"))
        check_rule(rule, multiclass, intercept)
        device = torch.empty(0, device=device).device
        weight = check_class_weight(class_weight, num_classes, device)
        grid, target_grid = as_grid(grid), as_grid(target_grid, "target_grid")
        checks.one_of(targets, "targets", ("classes", "multilabel", "regression"))
        if targets != "classes":
            refuse_for_targets(targets, weight, multiclass, rule)
        needs_classes = weight is not None or multiclass == "ovo"
        if per_class is False and needs_classes:
            raise ValueError(
                "class_weight and multiclass='ovo' need sums per class, so per_class=False is not possible"
            )
        sums = Statistics(
            in_features, num_classes, grid=grid, target_grid=target_grid, folds=folds, device=device,
            per_class=needs_classes if per_class is None else per_class, normalize=normalize, scale=scale,
            targets=None if targets == "classes" else targets,
        )  # fmt: skip
        super().__init__(sums, rho, intercept, weight)
        self._options.rule = rule
        self.multiclass = multiclass
        self._solver = make_solver(sums, self._options, multiclass)
        impossible = None if sums.exact else "without a grid (grid=None) a row has no exact form to be recognised by"
        self._rows = HeldRows(impossible, bool(membership))
        self.pending = Pending(sums, self._rows)
        self._vouched = False
        self._uncertifiable: str | None = None
        self._view_cache: tuple[int, HeadView] | None = None  # a cache, for the version it was made for

    def _rho_number(self, value: Any) -> float | None:
        return None if isinstance(value, str) and value == "gcv" else checks.positive(value, "rho (or 'gcv')")

    def _best_rho(self) -> float | None:
        return rho_rule.choose(self._view()) if rho_rule.is_choosable(self.statistics) else None

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def P(self) -> Tensor:
        """P = I - C = rho A^-1 (J, J); (J+1, J+1) with a penalized intercept. Do not write to it.

        One matrix per pair with "ovo", and one per label with class weights for several labels.
        """
        return self._solve(inverse=True)[2]

    @property
    def rule(self) -> str:
        """The rule in use, "least_squares" or "lda". Can be set at any time, also to "auto"."""
        return resolve_rule(self._options.rule, self.statistics)

    @rule.setter
    @exclusive
    def rule(self, value: str) -> None:
        check_rule(value, self.multiclass, self.intercept)
        if self.targets != "classes":
            refuse_for_targets(self.targets, rule=value)
        if value == "lda" and self.statistics.kind == "values":
            raise ValueError("rule='lda' needs labels (B,), this head holds float targets")
        self._choices.made.pop("rule", None)
        self._set_rule(value)

    @property
    def unchecked(self) -> str | None:  # type: ignore[override]
        """The reason why removals are not checked against the rows of the head, or None if they are checked.

        Without row hashes, each removal is still tested: it is refused if no set of samples could have the remaining sums.
        """
        return self._rows.unchecked

    def _drop_membership(self, reason: str = "its row hashes were dropped") -> Self:
        """Forget the hashes of the rows, e.g. where a store has the rows themselves."""
        with self._lock:
            self._rows.recorded = False
            self._rows.drop(reason)
        return self

    @contextmanager
    def _trusted_removals(self) -> Iterator[None]:
        """See :meth:`LinearHead._trusted_removals`. Without row hashes, a solve tests every removal outside this context."""
        with self._lock:
            before, self._vouched = self._vouched, True
            try:
                yield
            finally:
                self._vouched = before

    @property
    def uncertifiable(self) -> str | None:  # type: ignore[override]
        """The reason why nobody can certify that the head has exactly the samples it was given, or None if this is possible."""
        return self._uncertifiable

    def _mark_uncertifiable(self, reason: str | None) -> None:
        """Record why the head can no longer be certified. An earlier reason stays; an empty head needs no reason."""
        self._uncertifiable = None if self.statistics.empty else self._uncertifiable or reason

    def config(self) -> dict[str, Any]:
        """Return the options as primitives, with the rho in use, for ``LSSVMHead.from_config``."""
        return super().config() | {
            "multiclass": self.multiclass,
            "rule": self._options.rule,
            "target_grid": grid_to_json(self.statistics.requested.target_grid) or "auto",
            "folds": self.statistics.folds,
            "membership": self._rows.recorded,
        }

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, K)
        """Return the scores x @ w + b (B, K), or votes for ``"ovo"``, in float64, differentiable in x."""
        scores = super().forward(x)
        return votes(scores, self.num_classes) if self.multiclass == "ovo" else scores

    @exclusive
    def _solved_anew(self, inverse: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """w, b and, if asked for, P as computed by a solve from the statistics. The weights in use do not change."""
        self._check_whole()
        solver = make_solver(self.statistics, self._options, self.multiclass)
        P = solver.inverse() if inverse else None
        w, b = solver.weights()
        return w, b, w if P is None else P

    # -- changing ------------------------------------------------------------------------------------------------------

    @exclusive
    def remove_approximate(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> Approximation:
        """Unlearn samples that you know only approximately, e.g. features that were recomputed on another device.

        Afterwards the head only approximates a head that never saw the samples, and ``uncertifiable`` says so. The returned
        :class:`~torchlssvm.functional.approximate.Approximation` gives the error of the weights: ``estimate(sigma)`` for noise
        with standard deviation sigma in each feature, and ``bound(delta)`` for the worst case.
        """
        if not isinstance(self._solver, SharedSolver):
            raise ValueError(
                "remove_approximate works on one shared system: use multiclass='ovr', and no class_weight for several labels"
            )
        if self.scale is not None:
            raise ValueError(
                "remove_approximate holds for features as they are: scale='std' moves with the samples removed"
            )
        batch = self._check(x, y, weight, ids, sparse=False)
        if len(batch) and batch.size >= self.n:
            raise ValueError(f"all {self.n} samples would be removed: there is nothing left to estimate, use remove")
        self._apply_changes([(batch, -1)], rough=True)
        w, b, P = self._solve(inverse=True)  # an impossible removal is detected here and rolled back
        grid = batch.choices.grid
        rows = batch.x.to(torch.float64) if grid is None else grid.snap(batch.x)  # (L, J)
        weights = torch.ones(len(batch), dtype=torch.float64, device=self.device) if batch.mult is None else batch.mult
        by_class = class_weights(self.class_weight, self.counts.to(torch.float64))
        if batch.labels is not None and by_class is not None:
            weights = weights * by_class[batch.labels]
        if len(batch):
            self._mark_uncertifiable(INEXACT_REMOVAL)
        mean, total = None, None
        if self.intercept == "free":
            solution = self._solver.solution
            mean, total = solution.mu * math.sqrt(self.rho), float(solution.n)
        return approximation(P, self.rho, w, b, rows, real_targets(batch, self.num_classes), weights, mean, total)

    @exclusive
    def relabel(self, x: Any, y_old: Any, y_new: Any, weight: Any = None, ids: Any = None) -> Self:
        """Change the labels (or targets) of samples. P and C change only if weights depend on the label."""
        old = self._check(x, y_old, weight, ids, sparse=False)
        new = self._check(x, y_new, weight, ids, sparse=False)
        stats = self.statistics
        if not len(old):
            return self
        if stats.per_class or stats.folds or old.labels is None:
            return self._apply_changes([(old, -1), (new, 1)])
        rows, ((old, _), (new, _)) = self._rows.stage([(old, -1), (new, 1)])
        with threads_for(0), self._changing():
            q = stats.relabel(old, new, self._evidence())
            self._solver.relabelled(old, new, q)
            self._record([(old, -1), (new, 1)], rows)
        return self

    @exclusive
    def forget_class(self, c: int) -> Self:
        """Unlearn all samples of one class, without passing the samples. The class keeps its number."""
        stats = self.statistics
        self._check_whole()
        if self.targets != "classes":
            raise ValueError(
                f"forget_class is for classes: with targets={self.targets!r} a sample has K labels or numbers, and belongs to "
                "none of them alone. Remove the samples: head.remove(x, y)"
            )
        if not stats.per_class:
            raise ValueError("forgetting a class needs statistics per class: use per_class=True")
        checks.label(c, self.num_classes)
        with self._changing():
            self.pending.merge(Changes(stats.forget_class(c), self._rows.take_class(c)), -1, shrinks=True)
            stats.canonicalize()
            if stats.empty:
                self._rows.clear()
                self._forget_choices()
            self._solver.reset()
        return self

    # -- diagnostics -----------------------------------------------------------------------------------------------------

    @exclusive
    def leave_one_out(self, x: Any, y: Any, weight: Any = None, groups: Any = None, *, pairs: str = "votes") -> Tensor:
        """Return exact leave-one-out scores (B, K): y_i - (y_i - f(x_i)) / (1 - h_i) for sample i with leverage h_i.

        Each sample is scored as by a head that was trained without it, so you can use the scores to estimate margins, error
        rates and calibrations on new data. You can pass the samples in batches. Class weights that depend on the class counts
        are recomputed without the sample. With ``scale="std"``, however, the scale stays that of all samples, including the
        one left out.

        Args:
            x: (B, J), as added.
            y: (B,) labels or (B, K) targets, as added.
            weight: (B,), as added.
            groups: (B,) group of each sample, as numbers or names, to leave out the whole group of a sample (leave-user-out).
                Pass all samples of a group in one call.
            pairs: how ``multiclass="ovo"`` combines pairs: ``"votes"`` as in ``forward``, or ``"least"``, where the score of a
                class is its lowest score against any other class. ``"least"`` gives finer margins.

        >>> import torch
        >>> from torchlssvm import LSSVMHead
        >>> from torchlssvm.analysis.cross_validation import error_rate
        >>> x, y = torch.randn(40, 3), torch.arange(40) % 2
        >>> head = LSSVMHead(3, 2).add(x, y)
        >>> scores = head.leave_one_out(x, y)
        >>> torch.allclose(scores[0], head.remove(x[:1], y[:1])(x[:1])[0], atol=1e-4)  # the grid aside
        True
        >>> 0 <= error_rate(scores, y) <= 1
        True
        """
        scores = leave_one_out(self._view(), x, y, weight, groups, pairs)
        self._require_held(x, y, weight)
        return scores

    def _require_held(self, x: Any, y: Any, weight: Any) -> None:
        """Raise RemovalError, naming the first sample, if samples are not held. Folds are not compared."""
        if self._rows.unchecked is None and self.n and not self.statistics.folds:
            self._rows.stage([(self._check(x, y, weight), -1)])

    @exclusive
    def select_rho(
        self, rhos: Any = None, method: str = "gcv", x: Any = None, y: Any = None, *, weight: Any = None, ids: Any = None,
        score: str = "squared", apply: bool = True,
    ) -> RhoPath:  # fmt: skip
        """Choose rho and apply it. All values together need one decomposition.

        Args:
            rhos: (r,) values > 0 to try. Default: 100 values around the scale of the data.
            method: ``"gcv"`` (generalized cross-validation, from the statistics alone), ``"loo"`` (exact leave-one-out; pass
                all current samples as x and y) or ``"kfold"`` (exact, from the sums of each fold; requires ``folds``). With
                ``scale="std"``, ``"gcv"`` and ``"loo"`` hold the scale fixed, and ``"kfold"`` recomputes it without the fold.
            x: (n, J), as added.
            y: (n,) or (n, K), as added.
            weight: (n,), as added.
            ids: (n,), as added. Required only for ``"kfold"`` with ``score="accuracy"``.
            score: ``"squared"``, or ``"accuracy"`` for ``"loo"`` and ``"kfold"``, which then require x and y.
            apply: set to False to return the errors and leave rho unchanged.

        >>> import torch
        >>> from torchlssvm import LSSVMHead
        >>> x, y = torch.randn(50, 4), torch.arange(50) % 2
        >>> head = LSSVMHead(4, 2).add(x, y)
        >>> path = head.select_rho([0.1, 1.0, 10.0], "loo", x, y)
        >>> head.rho == path.rho, path.errors.shape
        (True, torch.Size([3]))
        """
        path = decided(rho_path(self._view(), rhos, method, x, y, weight, ids, score))
        if x is not None:
            self._require_held(x, y, weight)
        if apply:
            self.rho = path.rho
            self._choices.record("rho", method, len(path.rhos))
        return path

    def _influence(
        self, x: Any, y: Any, x_val: Any, y_val: Any, what: str, on: str | Measure, y_new: Any, weight: Any, groups: Any
    ) -> Tensor:
        change = influence(self._view(), x, y, x_val, y_val, what, on, y_new, weight, groups)
        if what != "add":
            self._require_held(x, y, weight)
        return change

    # -- parts, for the store, checkpoints and exchange ----------------------------------------------------------------

    @exclusive
    def _sample_state(self) -> dict[str, Tensor]:
        """All that the head holds of its samples, for :meth:`_adopt`: the statistics."""
        self._check_whole()
        return self.statistics.state()

    @exclusive
    def _derived(self) -> dict[str, Tensor]:
        """The values in use that are derived from samples and options: w, b and P."""
        return dict(zip(("w", "b", "P"), self._solve(inverse=True), strict=True))

    @exclusive
    def _adopt(self, state: dict[str, Tensor] | None) -> None:
        """Replace the statistics held by saved ones; None empties the head."""
        fresh = self.statistics.zero()
        if state is not None:
            fresh.load(state)
        self._integrity = Integrity()  # anything interrupted before is replaced
        with self._integrity:
            self._published, self._solving = None, True
            self.statistics.__dict__.update(fresh.__dict__)
            self.pending.forget()
            if state is None:
                self._rows.clear()
                self._forget_choices()
            else:
                self._rows.drop("its statistics were replaced by saved ones")
            self._uncertifiable = None
            self._solver.reset()
            self._state_version += 1
            self._choices.outdate()
            self._solving = False

    def _solve_afresh(self) -> None:
        fresh = make_solver(self.statistics, self._options, self.multiclass)
        if type(fresh) is not type(self._solver):  # class weights of several labels were set or dropped
            self._solver = fresh
        self._solver.reset()

    def _drop_unfinished(self) -> None:
        self._solver.reset()

    def _room_for(self, k: int) -> Callable[[], None]:
        changed = self.pending.statistics
        grown = None if changed is None else changed.with_classes(k)

        def make_room() -> None:
            self.pending.id, self.pending.statistics = None, grown  # deltas taken earlier have fewer classes
            if self.targets == "multilabel" and k and not self.statistics.empty:
                self._rows.drop("labels were added since, and the row hashes are of rows with fewer labels")
            self._solver.reset()

        return make_room

    def _view(self) -> HeadView:
        """Read-only view of the present state, for :mod:`torchlssvm.linear.diagnostics`; NotFittedError without samples."""
        catch_up(self)
        w, b = self._published or self._fitted_weights()
        if self._view_cache is None or self._view_cache[0] != self._state_version:
            view = HeadView(self.multiclass, self._options, self.statistics, self._solver, w, b)
            self._view_cache = (self._state_version, view)
        return self._view_cache[1]

    def _check(
        self, x: Any, y: Any, weight: Any = None, ids: Any = None, like: SampleBatch | Statistics | None = None,
        sparse: bool = True,
    ) -> SampleBatch:  # fmt: skip
        """A checked batch, for :meth:`_apply_changes`. ``like``: a batch applied with it, whose choices come first.

        ``sparse``: many sparse rows stay sparse.
        """
        changed = self.pending.statistics
        if like is None and changed is not None and not changed.empty:
            like = changed  # if everything was removed, the agreed choices stay in force
        batch = self.statistics.check(x, y, weight, ids, like, sparse=sparse)
        if batch.labels is None and self.targets != "multilabel" and len(batch):
            if self._options.class_weight is not None or self.multiclass == "ovo":
                raise ValueError("class_weight and multiclass='ovo' need labels (B,), got float targets")
            if self._options.rule == "lda":
                raise ValueError("rule='lda' needs labels (B,), got float targets")
        return batch

    def _evidence(self, rough: bool = False) -> Evidence:
        """How to check that the head has the samples to be removed. ``rough``: these samples are only approximations."""
        if not rough and (self._vouched or self.unchecked is None):
            return Evidence.PROVEN
        return Evidence.COUNTS if rough or self._uncertifiable is not None else Evidence.SUMS

    def _apply_changes(self, changes: list[tuple[SampleBatch, int]], rough: bool = False) -> Self:
        """Change the state by checked batches, all or none. ``rough``: the samples removed only approximate those held."""
        changes = [(b, s) for b, s in changes if b.size]
        if not changes:
            return self
        stats, removes = self.statistics, any(s < 0 for _, s in changes)
        if removes:
            self._check_whole()  # an interrupted update may have lost rows, so this check comes first
            stats.check_removable()
        evidence = self._evidence(rough) if removes else Evidence.PROVEN
        rows, changes = (StagedRows({}, []), changes) if rough else self._rows.stage(changes)
        with threads_for(0), self._changing():  # large sums and solves inside have all threads
            self._solver.release(sum(batch.x.shape[0] for batch, _ in changes))
            with self._tested(evidence) as sums:
                views = sums.change(changes, evidence)
            self._solver.changed(changes, views if sums is stats else None)  # a test of the sums ends the views
            if rough:
                self._rows.drop(INEXACT_REMOVAL)
            self._record(changes, rows)
            if removes and stats.drained:
                self._emptied(stats)
        return self

    @contextmanager
    def _tested(self, evidence: Evidence, groups: Iterable[int] | None = None) -> Iterator[Statistics]:
        """Yield the sums to change. If only they can show that samples removed were held, they are a copy, which is tested.

        The copy replaces the sums if samples could have it, in total or by groups. Otherwise RemovalError is raised.
        """
        if evidence not in (Evidence.SUMS, Evidence.COUNTS):
            yield self.statistics
            return
        sums = self.statistics.copy()
        yield sums
        sums.canonicalize()
        if evidence is Evidence.SUMS and not sums.empty:
            sums.check_possible(groups)
        elif not sums.drained:  # roughly those of samples: the ridge has to make up for the rest
            step = 1.0 if sums.grid is None else sums.grid.resolution
            sums.check_possible(ridge=self._options.rho / step**2)
        self.statistics.take_over(sums)

    def _record(self, changes: list[tuple[SampleBatch, int]], rows: StagedRows) -> None:
        """Record summed samples: their rows, and the changes pending for other machines."""
        self._rows.commit(rows)
        if self.statistics.exact:
            self.pending.change(changes)

    def _emptied(self, stats: Statistics) -> None:
        """Make the head as new after its last sample left, also if the sums are only roughly zero."""
        stats.canonicalize()
        if not stats.empty:
            self.pending.merge(Changes(stats, None), -1, shrinks=True)
            stats.take_over(stats.zero())
        self._uncertifiable = None
        self._rows.clear()
        self._forget_choices()
        self._solver.reset()

    def _merge_samples(self, other: LSSVMHead, sign: int) -> None:
        if sign > 0:
            self.pending.refuse_twice(other.pending.merged)
        theirs = other.statistics.copy() if other is self else other.statistics
        ids, reason = set(other.pending.merged), other.uncertifiable
        self._take_in(Changes(theirs, other._rows.known(), other._rows.key), sign, shrinks=sign < 0)
        self.pending.count_ids(ids, sign)
        self._mark_uncertifiable(reason)

    def _take_in(self, changes: Changes, sign: int, shrinks: bool) -> None:
        """Add or subtract sums and their rows, all or none. ``shrinks``: the change may remove samples.

        Raises RemovalError and changes nothing if no samples could have the resulting sums.
        """
        stats, sums = self.statistics, changes.statistics
        self._check_whole()
        stats.compatible(sums)
        if sign < 0:
            stats.check_removable()
        rows = self._rows.joined(changes.rows, changes.key, sign)
        evidence = Evidence.PROVEN if shrinks else Evidence.NONE
        if shrinks and rows is None:
            evidence = Evidence.SUMS if self._uncertifiable is None else Evidence.COUNTS
        with self._changing():
            with self._tested(evidence, sums.group_sums()) as changed:
                changed.merge(sums, sign, evidence)
            self._solver.reset()
            self.pending.merge(changes, sign, shrinks)
            self._rows.replace(rows, changes.key, UNKNOWN_ROWS)
            if shrinks and stats.drained:
                self._emptied(stats)

    def _hold(self, sums: Statistics, rows: Counts | None, key: bytes | None) -> None:
        """Replace what is held by other sums (their parts, not copies) and rows, after an exchange."""
        with self._changing():
            self.statistics.take_over(sums)
            self._rows.replace(rows, key, UNKNOWN_ROWS)
            if sums.empty:
                self._rows.clear()
            self._choices.reopen_rho()  # ranks may have chosen differently, so all choose again from the agreed state
            self._solver.reset()

    def _form(self) -> dict[str, Any]:
        """The options that must be equal in heads that exchange changes. A rho with a rule is compared by its rule."""
        without = ("grid", "target_grid", "membership")  # grids are compared where they are decided
        options = {name: value for name, value in self.config().items() if name not in without}
        return options | {"rho": self._choices.rho_rule or self.rho}

    # -- nn.Module -----------------------------------------------------------------------------------------------------

    def _buffer_value(self, name: str) -> Tensor:
        if name != "C":
            return super()._buffer_value(name)
        P = self.P
        return torch.eye(P.shape[-1], dtype=P.dtype, device=P.device) - P

    def _saved_parts(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        stats = self.statistics
        out = {"P": self.P.clone()}
        out |= {f"solution.{k}": v.clone() for k, v in self._solver.state().items()}
        out |= {f"statistics.{k}": v for k, v in stats.state().items()}
        meta: dict[str, Any] = {
            "multiclass": self.multiclass,
            "uncertifiable": self.uncertifiable,
            "digest": stats.digest() if stats.exact else None,
            "unchecked": self.unchecked,
        }
        if self.unchecked is None:
            out["membership"] = bytes_to_tensor(self._rows.to_bytes())
        if stats.exact:
            meta["pending"], changes = self.pending.save()
            out |= {f"pending.{k}": v for k, v in changes.items()}
        return meta, out

    def _loaded_parts(
        self, state: dict[str, Tensor], meta: dict[str, Any], options: SolverOptions
    ) -> Callable[[], None]:
        P, w = (checkpoint.moved(state[k], self.device) for k in ("P", "w"))
        D, K = self.in_features + (self.intercept == "penalized"), self.num_classes
        outputs = K * (K - 1) // 2 if self.multiclass == "ovo" else K
        shared = self.multiclass == "ovr" and not weighted_labels(self.statistics, options)
        inverse = (D, D) if shared else (outputs, D, D)
        if P.shape != inverse or w.shape != (self.in_features, outputs):
            needed = f"{inverse}, {(self.in_features, outputs)}"
            raise ValueError(f"P, w have shapes {tuple(P.shape)}, {tuple(w.shape)}; needed {needed}")
        statistics = self.statistics.zero()
        statistics.load(checkpoint.part(state, "statistics."))
        checkpoint.check_digest(statistics, meta["digest"])
        rows = HeldRows(self._rows.impossible, self._rows.recorded)
        if rows.unchecked is None:
            if "membership" in state:
                rows.load(tensor_to_bytes(state["membership"]))
            elif not statistics.empty:
                rows.drop(meta.get("unchecked") or "it was loaded from a file that has no hashes of rows")
        solver = make_solver(statistics, options, self.multiclass)
        solution = checkpoint.part(state, "solution.")
        solver.restore({k: checkpoint.moved(v, self.device) for k, v in solution.items()}, P)
        pending = Pending(statistics, rows)
        if statistics.exact:
            pending = Pending.load(meta["pending"], checkpoint.part(state, "pending."), statistics, rows)
        return lambda: self._replace(statistics, solver, pending, meta.get("uncertifiable"))

    def _move(self, device: torch.device, options: SolverOptions) -> None:
        statistics = self.statistics.to(device)
        solver = make_solver(statistics, options, self.multiclass)
        solution = {k: checkpoint.moved(v, device) for k, v in self._solver.state().items()}
        solver.restore(solution, checkpoint.moved(self.P, device))
        self._rows.read_waiting()  # products that wait to be hashed would stay behind on the old device
        self._replace(statistics, solver, self.pending.to(statistics, self._rows), self.uncertifiable)

    def _replace(self, statistics: Statistics, solver: Solver, pending: Pending, uncertifiable: str | None) -> None:
        self._replace_parts(
            statistics=statistics, _solver=solver, _rows=pending.held_rows, pending=pending, _uncertifiable=uncertifiable,
            _view_cache=None,
        )  # fmt: skip

    @exclusive
    def _copies(self) -> dict[str, Any]:
        self._solve()
        self._solver.drop_raw_samples()
        names = ("statistics", "_options", "_solver", "_choices", "_integrity", "_rows", "pending")
        parts = copy.deepcopy({name: getattr(self, name) for name in names})  # together, as they refer to each other
        return parts | {"_view_cache": None}
