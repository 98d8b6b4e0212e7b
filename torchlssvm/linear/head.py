"""``LSSVMHead``: a least-squares SVM on features, whose data can be added, removed and corrected exactly."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchlssvm.errors import InterruptedUpdateError, NotFittedError, NumericalWarning, RemovalError
from torchlssvm.functional import checks
from torchlssvm.functional.approximate import Approximation
from torchlssvm.functional.grid import FixedPoint, GridOption, as_grid, grid_to_json
from torchlssvm.functional.modes import exactly
from torchlssvm.functional.row_normalization import normalized
from torchlssvm.functional.threads import PASS_WORK, threads_for
from torchlssvm.functional.votes import votes
from torchlssvm.linear import checkpoint, column_selection
from torchlssvm.linear.approximate_removal import INEXACT_REMOVAL, remove_approximate
from torchlssvm.linear.column_selection import Selection
from torchlssvm.linear.compact_solver import CompactSolver
from torchlssvm.linear.data_choices import Choice, ChoiceState, DataChoices
from torchlssvm.linear.diagnostics import rho_rule, uncertainty
from torchlssvm.linear.diagnostics.calibration import Calibration
from torchlssvm.linear.diagnostics.influence import Measure, influence
from torchlssvm.linear.diagnostics.influence_ranking import Influential, most_influential
from torchlssvm.linear.diagnostics.leave_one_out import leave_one_out
from torchlssvm.linear.diagnostics.rho_selection import RhoPath, rho_path
from torchlssvm.linear.diagnostics.whitened_problems import HeadView
from torchlssvm.linear.locking import exclusive, give_lock
from torchlssvm.linear.membership import HeldRows, StagedRows
from torchlssvm.linear.pending import Pending
from torchlssvm.linear.solution import NotPositiveDefinite, relative_distance
from torchlssvm.linear.solvers import Solver, SolverOptions, make_solver
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.batch import GridChoices, SampleBatch, check_batch, joint_changes
from torchlssvm.statistics.statistics import Evidence, Integrity

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FixedPoint", "LSSVMHead"]


UNKNOWN_ROWS = "it was merged with a head whose rows are not known, or known under another key"
"""Reason why removals are not checked against the rows held."""


class LSSVMHead(nn.Module):
    r"""Least-squares SVM head: one pass to learn, one exact call to add, remove, relabel or merge.

    Minimizes :math:`\rho |w_k|^2 + \sum_n (w_k^T \phi_n + b_k - y_{nk})^2` for each output k, with y = +1 for the class and
    -1 otherwise (or float targets), and keeps :math:`P = I - C = \rho A^{-1}`, :math:`A = \rho I + \sum \phi \phi^T`.

    Statistics are the truth, weights are a cache: ``add`` and ``remove`` change integer sums at once; ``w``, ``b``, ``C``
    and ``P`` are brought up to date when they are read, by Theorem 1 or by a solve, whichever is cheaper.

    Args:
        in_features: J, the number of features.
        num_classes: K, the number of classes (or of float targets; 1 for plain regression).
        rho: the regularization, settable at any time. The default of 1.0 can cost accuracy where features are large, small or
            many (4,000 CIFAR features: 72.9 % at 1.0, 76.9 % by GCV). ``"gcv"`` chooses it from the statistics alone, among
            powers of two, near-ties to the larger: at the first read with 10 samples of two classes, again by ``refresh()`` and
            ``choose_rho()``, at the end of a fit or command and before a certificate. In between it stays as it is, updates are
            Theorem 1's, and ``choices`` says that it is older than the samples.
        intercept: ``"free"``, ``"penalized"`` (a constant feature, LPSVM) or ``"none"``.
        class_weight: None, ``"balanced"`` (n / (P n_k) for P classes with samples), ``"complement"`` ((n - n_k) / n),
            or a tensor (K,). Settable.
        multiclass: ``"ovr"`` (one matrix for all classes) or ``"ovo"`` (one system per pair i < j; ``w`` is then (J, pairs),
            ``b`` (pairs,), ``C`` and ``P`` (pairs, J, J), in the order (0,1), (0,2), ...; scores are votes, ties broken by
            margins).
        grid: a :class:`FixedPoint`, a number (its limit, the largest feature), ``"auto"`` (a power of two from the first
            batch), or None for float64 sums.
        target_grid: the same for float targets.
        statistics: False keeps w and P only, the paper's compact form; features are then used as given unless ``grid`` is
            a :class:`FixedPoint`.
        per_class: keep sums per class; None means when ``class_weight`` or ``"ovo"`` needs it. ``forget_class`` needs it.
        folds: keep sums for so many folds, chosen by a hash of the sample's id.
        normalize: normalization of each row before the grid, from its own numbers alone: ``"l2"`` divides it by its length (a
            row of zeros stays), ``"sqrt"`` takes sign(x) sqrt|x|; None leaves it. ``forward`` does the same.
        scale: ``"std"`` solves for standardised features: mean and deviation of all samples held (unweighted, n in the
            denominator, 1 for a constant column) are derived from the statistics at each solve, so that after a removal they
            are those of the samples left. ``w`` and ``b`` are for features as they come; ``C`` and ``P`` are of the
            standardised ones. Every change then takes a solve. Leave-one-out and influence hold the scale fixed.
        membership: keep fingerprints of the rows held, by which a removal is checked at once.
        device: where the state lives.

    Attributes:
        statistics: the sums of the samples held; None in the compact form.
        solver: makes weights of the statistics (in the compact form: keeps them).
        rows: fingerprints of the rows held.
        data_choices: the choices made from data, rho and a calibration.
        pending: what changed since machines last agreed, for :mod:`torchlssvm.distributed`.
        requested: the grids asked for; those in use are ``grid`` and ``target_grid``.
        version: counts changes of the state.

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

    _lock: Any  # a threading.RLock, which has no type of its own
    keeps_rows = False
    normalize: str | None = None
    """Row normalization before the grid: None, "l2" or "sqrt"."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        rho: float | str = 1.0,
        intercept: str = "free",
        class_weight: str | Tensor | None = None,
        multiclass: str = "ovr",
        grid: GridOption = "auto",
        target_grid: GridOption = "auto",
        statistics: bool = True,
        per_class: bool | None = None,
        folds: int = 0,
        normalize: str | None = None,
        scale: str | None = None,
        membership: bool = True,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        give_lock(self)
        checks.one_of(intercept, "intercept", ("free", "penalized", "none"))
        checks.one_of(multiclass, "multiclass", ("ovr", "ovo"))
        device = torch.empty(0, device=device).device
        weight = check_class_weight(class_weight, num_classes, device)
        grid, target_grid = as_grid(grid), as_grid(target_grid, "target_grid")
        needs_classes = weight is not None or multiclass == "ovo"
        if per_class is False and needs_classes and statistics:
            raise ValueError(
                "per_class=False does not go with class_weight or multiclass='ovo', which need sums per class"
            )
        by_rule = isinstance(rho, str) and rho == "gcv"
        self._options = SolverOptions(1.0 if by_rule else checks.positive(rho, "rho (or 'gcv')"), intercept, weight)
        self._multiclass = multiclass
        # The arguments are checked by Statistics, in either form.
        sums = Statistics(
            in_features, num_classes, grid=grid, target_grid=target_grid, folds=folds, device=device,
            per_class=needs_classes if per_class is None else per_class, normalize=normalize, scale=scale,
        )  # fmt: skip
        self.normalize = normalize
        if not statistics:
            for name, on in (
                ("class_weight='balanced' or 'complement'", self._options.follows_counts),
                ("multiclass='ovo'", multiclass == "ovo"),
                ("per_class", bool(per_class)),
                ("folds", folds > 0),
                ("scale='std'", scale is not None),
                ("rho='gcv'", by_rule),
            ):
                if on:
                    raise ValueError(f"{name} needs statistics=True: the compact form keeps only w and P")
        self.statistics: Statistics | None = sums if statistics else None
        self.requested = GridChoices(
            None,
            grid if isinstance(grid, FixedPoint) else None,
            target_grid if isinstance(target_grid, FixedPoint) else None,
        )
        self.solver: Solver
        if statistics:
            self.solver, impossible = make_solver(sums, self._options, multiclass), None
            if not sums.exact:
                impossible = "without a grid (grid=None) a row has no exact form to be recognised by"
        else:
            self.solver = CompactSolver(in_features, num_classes, self._options, device)
            impossible = "the compact form (statistics=False) keeps only w and P"
        self._in_features, self._num_classes = in_features, num_classes
        self.rows = HeldRows(impossible, bool(membership))
        self.data_choices = DataChoices.for_rho("gcv" if by_rule else None)
        self.pending = Pending()
        self.version = 0
        self._vouched = False
        self._uncertifiable: str | None = None
        self.integrity = Integrity()
        self._solving = False  # set while caches are computed: what was interrupted is computed again
        self._published: tuple[Tensor, Tensor] | None = None  # w and b now, for readers without the lock
        self._view: tuple[int, HeadView] | None = None  # a cache, for the version it was made for
        checkpoint.make_live(self)

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def in_features(self) -> int:
        """J, the number of features."""
        return self._in_features

    @property
    def num_classes(self) -> int:
        """K, the number of classes or targets."""
        return self._num_classes

    @property
    def device(self) -> torch.device:
        """Device of the state."""
        return self._source.device

    @property
    def intercept(self) -> str:
        """Treatment of the constant: "free", "penalized" or "none"."""
        return self._options.intercept

    @property
    def multiclass(self) -> str:
        """One class against the rest, "ovr", or against each other one, "ovo"."""
        return self._multiclass

    @property
    def scale(self) -> str | None:
        """Scale of the features at the solve: None, as they are, or "std", standardised."""
        return None if self.statistics is None else self.statistics.scale

    @property
    def grid(self) -> FixedPoint | None:
        """The grid in use; None while ``"auto"`` has seen no data, or without a grid."""
        return self.requested.grid if self.statistics is None else self.statistics.grid

    @property
    def target_grid(self) -> FixedPoint | None:
        """The grid of float targets; None while ``"auto"`` has seen no data, or without one."""
        return self.requested.target_grid if self.statistics is None else self.statistics.target_grid

    @property
    def counts(self) -> Tensor:
        """Samples per class (K,)."""
        return self._source.counts.clone()

    @property
    def n(self) -> int | float:
        """The number of samples held (their total weight)."""
        return self._source.n

    @property
    def rho(self) -> float:
        """The regularization; setting it costs one solve at the next read. ``"gcv"`` lets it be chosen from then on."""
        stats = self.statistics
        if self.data_choices.made and stats is not None and not stats.empty and self.data_choices.rho_is_open:
            self.solve()
        return self._options.rho

    @rho.setter
    @exclusive
    def rho(self, value: float | str) -> None:
        if isinstance(value, str) and value == "gcv":
            self.need_statistics("rho='gcv'")
            self.data_choices.record("rho", "gcv", rule=True, state=ChoiceState.OPEN)
            self._published = None
            return
        value = checks.positive(value, "rho (or 'gcv')")
        with self.changing(same_samples=True):
            self.solver.set_rho(value)
            self.data_choices.made.pop("rho", None)
            self.data_choices.outdate_calibration()

    @exclusive
    def choose_rho(self) -> Self:
        """Choose rho again if ``"gcv"`` is its rule and samples have changed since; nothing happens otherwise."""
        choices = self.data_choices
        if choices.rho_rule is not None and self.n and choices.state_of("rho") is not ChoiceState.CURRENT:
            self._choose_rho()
        return self

    def _choose_rho(self) -> None:
        """Choose rho by GCV; with too few samples it is 1.0, and still to be chosen. Needs the lock."""
        choices, before = self.data_choices, self.data_choices.made["rho"]
        # Not open while it is chosen: reading the weights would choose again.
        choices.record("rho", "gcv", rule=True, state=ChoiceState.STALE)
        try:
            value = rho_rule.choose(self.view()) if rho_rule.is_choosable(self.need_statistics("rho='gcv'")) else None
        except BaseException:
            choices.made["rho"] = before
            raise
        rho = 1.0 if value is None else value
        if rho != self._options.rho:
            with self.changing(same_samples=True):
                self.solver.set_rho(rho)
                choices.outdate_calibration()
        choices.record("rho", "gcv", rule=True, state=ChoiceState.OPEN if value is None else ChoiceState.CURRENT)

    @property
    def class_weight(self) -> str | Tensor | None:
        """Weights by class, a copy; settable at any time when sums are kept per class."""
        weight = self._options.class_weight
        return weight.clone() if isinstance(weight, Tensor) else weight

    @class_weight.setter
    def class_weight(self, value: str | Tensor | None) -> None:
        stats = self.need_statistics("changing class_weight")
        weight = check_class_weight(value, self.num_classes, self.device)
        if weight is not None and not stats.per_class:
            raise ValueError("class_weight needs sums per class: build the head with per_class=True")
        with self._lock, self.changing():
            self._options.class_weight = weight
            self.solver.reset()

    @property
    def P(self) -> Tensor:
        """P = I - C = rho A^-1: (J, J), (J+1, J+1) when penalized, (pairs, ...) for ovo. Do not write to it."""
        return self.solve(inverse=True)[2]

    @property
    def weight(self) -> Tensor:
        """w as nn.Linear has it, (K, J)."""
        return self.solve()[0].mT

    @property
    def bias(self) -> Tensor:
        """b (K,), as nn.Linear has it."""
        return self.solve()[1]

    @property
    def planned_bytes(self) -> int:
        """Bytes of its sums and of one solve, once it holds samples of every class: known before the first one.

        8 J^2 for the sums (for each class with ``per_class`` or "ovo", each fold with ``folds``), and twice that to solve.

        >>> f"{LSSVMHead(20_000, 10).planned_bytes / 1e9:.1f} GB"
        '9.6 GB'
        """
        stats, square = self.statistics, 8 * self._in_features**2
        if stats is None:
            return 2 * square
        groups = (self._num_classes if stats.per_class else 1) * max(1, stats.folds)
        return (groups + 2) * square

    @property
    def checked(self) -> bool:
        """True when a removal is refused at once unless its rows are held, bit for bit; ``unchecked`` says why not."""
        return self.unchecked is None

    @property
    def unchecked(self) -> str | None:
        """Why removals are not checked against the rows held; None while they are.

        They are tested all the same: what would leave sums that cannot be those of samples is refused within the call.
        """
        return self.rows.unchecked

    def drop_membership(self, reason: str = "its fingerprints were dropped") -> Self:
        """Forget the fingerprints of the rows held, e.g. where a store has the rows themselves."""
        with self._lock:
            self.rows.recorded = False
            self.rows.drop(reason)
        return self

    @contextmanager
    def trusted_removals(self) -> Iterator[None]:
        """A context for a caller, such as a store, that has the rows and guarantees that all rows it removes are held.

        Without this guarantee and without fingerprints every removal would be tested by a solve.
        """
        with self._lock:
            before, self._vouched = self._vouched, True
            try:
                yield
            finally:
                self._vouched = before

    def locked(self) -> AbstractContextManager[Any]:
        """A context in which no other thread reads or changes the head: several calls as one."""
        lock: AbstractContextManager[Any] = self._lock
        return lock

    @property
    def uncertifiable(self) -> str | None:
        """Why the head can no longer be certified to hold exactly the samples it was given; None while it can."""
        return self._uncertifiable

    def mark_uncertifiable(self, reason: str | None) -> None:
        """Record why the head cannot be certified any more; an earlier reason stays, and an empty head has none."""
        self._uncertifiable = None if self._source.empty else self._uncertifiable or reason

    def config(self) -> dict[str, Any]:
        """The options as primitives; ``LSSVMHead.from_config`` makes an empty head like this one from them."""
        stats, weight = self.statistics, self._options.class_weight
        float_sums = stats is not None and not stats.exact
        return {
            "in_features": self._in_features,
            "num_classes": self._num_classes,
            "rho": self._options.rho,
            "intercept": self._options.intercept,
            "class_weight": weight.tolist() if isinstance(weight, Tensor) else weight,
            "multiclass": self._multiclass,
            "grid": None if float_sums else grid_to_json(self.requested.grid) or "auto",
            "target_grid": grid_to_json(self.requested.target_grid) or "auto",
            "statistics": stats is not None,
            "per_class": None if stats is None else stats.per_class,
            "folds": 0 if stats is None else stats.folds,
            "membership": self.rows.recorded,
        } | self.row_options()

    def row_options(self) -> dict[str, str]:
        """Options ``normalize`` and ``scale``, where they are used: files without them are as version 0.1.0 wrote them."""
        both = {"normalize": self.normalize, "scale": self.scale}
        return {name: value for name, value in both.items() if value is not None}

    @classmethod
    def from_config(cls, config: dict[str, Any], device: torch.device | str | None = None) -> Self:
        """An empty head with the options of another one."""
        return cls(**checkpoint.arguments(config), device=device)

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, K)
        """Scores x @ w + b (votes for ovo), float64; differentiable in x."""
        w, b = self._published or self._fitted_weights()  # one read: another thread may be changing the head
        x = checks.scored_features(x, self.in_features, self.device, sparse=True)
        scores = (x if self.normalize is None else normalized(x, self.normalize, torch.sqrt)) @ w + b
        return votes(scores, self.num_classes) if self.multiclass == "ovo" else scores

    def predict(self, x: Tensor) -> Tensor:  # (B, J) -> (B,)
        """The class with the highest score."""
        scores: Tensor = self(x)
        return scores.argmax(1)

    @exclusive
    def digest(self) -> str:
        """SHA-256 of the statistics: equal exactly when the statistics are. See :mod:`torchlssvm.statistics`."""
        with threads_for(PASS_WORK * self.in_features**2):
            return self.need_statistics("a digest").digest()

    @exclusive
    def drift(self) -> float:
        """The largest relative deviation of the weights in use from those solved from statistics. Costs a solve."""
        self.need_statistics("drift")
        w = self.solve()[0]
        if self.n == 0:
            return 0.0
        exact = self.solved_anew()[0]
        return relative_distance(w, exact)

    @exclusive
    def solved_anew(self, inverse: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """w, b and, if asked for, P as a solve from the statistics gives them; those in use stay as they are."""
        solver = make_solver(self.need_statistics("a solve from statistics"), self._options, self._multiclass)
        P = solver.inverse() if inverse else None
        w, b = solver.weights()
        return w, b, w if P is None else P

    @exclusive
    def refresh(self) -> LSSVMHead:
        """Solve from statistics now: weights are then bit for bit those of a fresh head with the same data.

        With ``rho="gcv"`` rho is chosen again first, if samples have changed since it was.
        """
        self.need_statistics("refresh")
        self.choose_rho()
        with self.changing(same_samples=True):
            self.solver.reset()
        self.solve()
        return self

    # -- changing ------------------------------------------------------------------------------------------------------

    @exclusive
    def add(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> LSSVMHead:
        """Learn samples. x: (B, J); y: (B,) labels or (B, K) targets; weight: (B,), integers on a grid; ids: for folds.

        Sparse rows, scipy's or torch's, are summed as they are.
        """
        return self.apply_changes([(self.check(x, y, weight, ids, sparse=True), 1)])

    @exclusive
    def remove(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> LSSVMHead:
        """Unlearn samples held: the same arguments, bit for bit, as when they were added."""
        return self.apply_changes([(self.check(x, y, weight, ids, sparse=True), -1)])

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
        return self.apply_changes(joint_changes(partial(self.check, sparse=True), add, remove))

    @exclusive
    def relabel(self, x: Any, y_old: Any, y_new: Any, weight: Any = None, ids: Any = None) -> LSSVMHead:
        """Give samples held new labels (or targets): P and C stay as they are, unless weights depend on the label."""
        old = self.check(x, y_old, weight, ids)
        new = self.check(x, y_new, weight, ids)
        stats = self.statistics
        plain = stats is not None and not stats.per_class and not stats.folds and old.labels is not None
        if not len(old):
            return self
        if stats is not None and plain:
            rows, ((old, _), (new, _)) = self.rows.stage([(old, -1), (new, 1)])
            with threads_for(0), self.changing():
                q = stats.relabel(old, new, self._evidence())
                self.solver.relabelled(old, new, q)
                self._record([(old, -1), (new, 1)], rows)
        elif stats is None and self._options.class_weight is None:
            with self.changing():
                self.solver.relabelled(old, new, None)
        else:
            self.apply_changes([(old, -1), (new, 1)])
        return self

    @exclusive
    def replace(
        self, x_old: Any, y_old: Any, x_new: Any, y_new: Any, ids_old: Any = None, ids_new: Any = None
    ) -> LSSVMHead:
        """Exchange samples held for others. ids: for folds."""
        return self.update(add=(x_new, y_new, None, ids_new), remove=(x_old, y_old, None, ids_old))

    def merge(self, other: LSSVMHead) -> LSSVMHead:
        """Add everything the other head has learned: same shapes, same grid."""
        return self._merge(other, 1)

    def __iadd__(self, other: LSSVMHead) -> LSSVMHead:
        """Add everything the other head has learned, as :meth:`merge`."""
        return self._merge(other, 1)

    def __isub__(self, other: LSSVMHead) -> LSSVMHead:
        """Remove everything the other head has learned."""
        return self._merge(other, -1)

    @exclusive
    def add_classes(self, k: int) -> LSSVMHead:
        """Make room for k more classes; samples held are negative examples of them (float targets: 0)."""
        stats = self.need_statistics("add_classes")
        if isinstance(self._options.class_weight, Tensor):
            raise ValueError("class_weight is a tensor (K,): set it to None first, then to one for the new classes")
        checks.natural(k, "k")
        with self.changing():
            stats.add_classes(k)
            if self.pending.statistics is not None:
                self.pending.statistics.add_classes(k)
            self.pending.id = None  # deltas taken before have fewer classes
            self._num_classes = stats.num_classes
            self.solver.reset()
        return self

    @exclusive
    def forget_class(self, c: int) -> LSSVMHead:
        """Unlearn all samples of one class, without them. The class keeps its number."""
        stats = self.need_statistics("forget_class")
        if not stats.per_class:
            raise ValueError("forgetting a class needs statistics per class: use per_class=True")
        checks.label(c, self.num_classes)
        with self.changing():
            self.pending.merge(stats.forget_class(c), -1)
            stats.canonicalize()
            self.rows.without_class(c)
            if stats.empty:
                self.rows.clear()
            self.solver.reset()
        return self

    # -- diagnostics -----------------------------------------------------------------------------------------------------

    @exclusive
    def leave_one_out(self, x: Any, y: Any, weight: Any = None, groups: Any = None, *, pairs: str = "votes") -> Tensor:
        """Scores (B, K) of samples held, each by the head that never saw it: y_i - (y_i - f(x_i)) / (1 - h_i).

        Exact, with class weights that follow the counts derived again without the sample. With ``scale="std"`` the scale of all
        samples held stays, as if it were given: the sample left out has its share in it. In batches: any part of what is
        held may be given. ``groups`` (B,): leave out the whole group instead (leave-user-out); all of a group goes in one call.

        Scores, as ``forward`` returns them, and as ``KernelLSSVM.leave_one_out`` does for the samples it keeps: margins, error
        rates and calibrations follow from them. ``IncrementalSVM.leave_one_out`` returns a ``LeaveOneOut`` instead, since its
        path yields margins of two classes, some of them only as a bound, with the ids they belong to.

        Args:
            x: (B, J), as added.
            y: (B,) labels or (B, K) targets, as added.
            weight: (B,), as added.
            groups: (B,) numbers or names.
            pairs: with ``multiclass="ovo"``, ``"votes"`` as in ``forward``, or ``"least"``: the score of a class is the least
                it gets against any other, which has finer margins.

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
        return leave_one_out(self.view(), x, y, weight, groups, pairs)

    @exclusive
    def rho_path(
        self, rhos: Any = None, method: str = "gcv", x: Any = None, y: Any = None, *, weight: Any = None, ids: Any = None,
        score: str = "squared",
    ) -> RhoPath:  # fmt: skip
        """Errors for many values of rho from one eigendecomposition, without choosing; arguments as for ``select_rho``."""
        return rho_path(self.view(), rhos, method, x, y, weight, ids, score)

    @exclusive
    def select_rho(
        self, rhos: Any = None, method: str = "gcv", x: Any = None, y: Any = None, *, weight: Any = None, ids: Any = None,
        score: str = "squared",
    ) -> RhoPath:  # fmt: skip
        """Choose rho and apply it: one eigendecomposition serves all values.

        Args:
            rhos: values > 0; None: 100 around the scale of the data.
            method: ``"gcv"`` (generalized cross-validation, from statistics alone), ``"loo"`` (exact leave-one-out; x and y are
                all samples held) or ``"kfold"`` (exact, from the sums of each fold; needs ``folds``). With ``scale="std"`` the
                first two hold the scale fixed, k-fold derives it again without the fold.
            x: (n, J), as added.
            y: (n,) or (n, K), as added.
            weight: (n,), as added.
            ids: (n,), as added; only for k-fold by accuracy.
            score: ``"squared"`` or ``"accuracy"`` ("loo" and "kfold", with x and y).

        >>> import torch
        >>> from torchlssvm import LSSVMHead
        >>> x, y = torch.randn(50, 4), torch.arange(50) % 2
        >>> head = LSSVMHead(4, 2).add(x, y)
        >>> path = head.select_rho([0.1, 1.0, 10.0], "loo", x, y)
        >>> head.rho == path.rho, path.errors.shape
        (True, torch.Size([3]))
        """
        path = rho_path(self.view(), rhos, method, x, y, weight, ids, score)
        self.rho = path.rho
        self.data_choices.record("rho", method, len(path.rhos))
        return path

    @exclusive
    def restrict(self, columns: Any) -> LSSVMHead:
        """A new head on some of the columns, from the same statistics: as if it had learned those columns of every row.

        Args:
            columns: (k,) numbers, each once; a slice; or a mask (J,).

        The new head takes rows of k features, in the order given. After ``normalize="l2"`` the length is still that of the
        full row, which the new head cannot know: it has ``normalize=None`` and takes columns of rows that were normalized
        before, ``torchlssvm.functional.row_normalization.normalized(x, "l2")[:, columns]`` (float64).

        >>> import torch
        >>> from torchlssvm import LSSVMHead
        >>> x, y = torch.randn(40, 6), torch.arange(40) % 2
        >>> head = LSSVMHead(6, 2).add(x, y)
        >>> part = head.restrict([4, 1])
        >>> part.digest() == LSSVMHead(2, 2, grid=head.grid).add(x[:, [4, 1]], y).digest()
        True
        """
        return column_selection.restrict(
            self, column_selection.check_columns(columns, self.in_features, self.device), self.scale
        )

    @exclusive
    def select(
        self, columns: Any = None, rho: Any = None, scale: Any = None, method: str = "gcv", x: Any = None, y: Any = None, *,
        weight: Any = None, ids: Any = None, score: str = "squared",
    ) -> Selection:  # fmt: skip
        """Choose columns, scale and rho from one set of statistics; this head stays as it is, the result has a new one.

        Args:
            columns: candidates: a list of columns as :meth:`restrict` takes them, or a dict by name (the layers of a network,
                say); None is all columns.
            rho: values > 0; None: 100 around the scale of the data, for each candidate.
            scale: candidates out of None and ``"std"``; None is the head's own.
            method: ``"gcv"``, ``"loo"`` or ``"kfold"``, as for :meth:`select_rho`.
            x: (n, J), as added; for "loo", and for "kfold" by accuracy.
            y: (n,) or (n, K), as added.
            weight: (n,), as added.
            ids: (n,), as added.
            score: ``"squared"`` or ``"accuracy"``.

        >>> import torch
        >>> from torchlssvm import LSSVMHead
        >>> x, y = torch.randn(60, 6), torch.arange(60) % 2
        >>> x[:, 3] += 3 * y
        >>> found = LSSVMHead(6, 2).add(x, y).select({"left": [0, 1, 2], "right": [3, 4, 5]}, scale=(None, "std"))
        >>> found.best.name, len(found.candidates), found.head.in_features
        ('right', 4, 3)
        """
        return column_selection.select(self, columns, rho, scale, method, x, y, weight, ids, score)

    @exclusive
    def influence(
        self, x: Any, y: Any, x_val: Any, y_val: Any = None, what: str = "remove", on: str | Measure = "loss", *,
        y_new: Any = None, weight: Any = None, groups: Any = None,
    ) -> Tensor:  # fmt: skip
        """The exact change at x_val if each sample, or group of samples, were removed, added or relabelled.

        Positive for ``on="loss"`` means the loss would rise: removing such a sample hurts, it is a helpful one. In tiles; a
        matrix of samples by points is made for ``on="scores"`` only. With ``scale="std"`` the scale of all samples held stays.

        Args:
            x: (B, J), samples held, as added; for ``what="add"`` samples that are not held.
            y: (B,) or (B, K), their labels or targets.
            x_val: (V, J), where to look.
            y_val: (V,) labels or (V, K) targets, for "loss" and "accuracy".
            what: ``"remove"``, ``"add"`` or ``"relabel"``.
            on: ``"loss"`` (mean squared error) or ``"accuracy"``, returns (B,); ``"scores"``, returns (B, V, K); or a function
                from scores (b, V, K) to one number for each change (b,).
            y_new: (B,), for ``"relabel"``.
            weight: (B,), as added.
            groups: (B,); samples of a group change together, and the result has one entry for each group, in the order in
                which they first appear.

        >>> import torch
        >>> from torchlssvm import LSSVMHead
        >>> x, y = torch.randn(50, 4), torch.arange(50) % 2
        >>> head = LSSVMHead(4, 2).add(x, y)
        >>> head.influence(x, y, x[:10], y[:10]).shape, head.influence(x, y, x[:10], on="scores").shape
        (torch.Size([50]), torch.Size([50, 10, 2]))
        """
        return influence(self.view(), x, y, x_val, y_val, what, on, y_new, weight, groups)

    @exclusive
    def most_influential(
        self, x: Any, y: Any, x_val: Any, y_val: Any, count: int = 10, what: str = "remove", on: str = "loss", *,
        ids: Any = None, y_new: Any = None, weight: Any = None, groups: Any = None,
    ) -> Influential:  # fmt: skip
        """The ``count`` most helpful and the ``count`` most harmful samples (or groups) by their exact influence at x_val.

        Never a matrix of samples by points; other arguments as for ``influence``. ``ids`` (B,) come back with the samples.

        >>> import torch
        >>> from torchlssvm import LSSVMHead
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(200, 4), torch.arange(200) % 2
        >>> x[:, 0] += 6 * y
        >>> given = y.clone()
        >>> given[7] = 1 - given[7]  # a wrong label
        >>> head = LSSVMHead(4, 2).add(x[:100], given[:100])
        >>> found = head.most_influential(x[:100], given[:100], x[100:], y[100:], 3, ids=[f"s{i}" for i in range(100)])
        >>> "s7" in found.harmful_ids, bool((found.harm > 0).all()), len(found.helpful)
        (True, True, 3)
        """
        return most_influential(self.view(), x, y, x_val, y_val, count, what, on, ids, y_new, weight, groups)

    # -- probabilities -------------------------------------------------------------------------------------------------

    @exclusive
    def calibrate(self, x: Any, y: Any, method: str | None = None, *, weight: Any = None, groups: Any = None) -> Self:
        """Fit probabilities on the leave-one-out scores of samples held: no held-out data is needed. Returns self.

        Args:
            x: (n, J), as added.
            y: (n,), as added.
            weight: (n,), as added.
            method: ``"temperature"`` (the default for many classes), ``"platt"`` (for two) or ``"isotonic"``. A temperature
                keeps the order of the scores; the others may find another class more probable than the one that ``predict``,
                which always goes by scores, returns.
            groups: (n,), e.g. users: then on leave-group-out scores.

        >>> import torch
        >>> from torchlssvm import LSSVMHead
        >>> x, y = torch.randn(50, 4), torch.arange(50) % 2
        >>> head = LSSVMHead(4, 2).add(x, y).calibrate(x, y)
        >>> bool(torch.allclose(head.predict_proba(x).sum(1), torch.ones(50, dtype=torch.float64)))
        True
        """
        calibration = uncertainty.calibrate(self.view(), x, y, method, weight, groups)
        self.data_choices.record_calibration(calibration)
        return self

    @exclusive
    def calibrate_on(self, scores: Any, y: Any, method: str | None = None) -> Self:
        """As ``calibrate``, on leave-one-out scores (n, K) that were computed in batches. Returns self."""
        calibration = uncertainty.calibrate_on(self.view(), scores, y, method)
        self.data_choices.record_calibration(calibration)
        return self

    @property
    def calibration(self) -> Calibration | None:
        """The map from scores to probabilities, if it was made for the samples held now."""
        return self.data_choices.calibration

    def predict_proba(self, x: Tensor, calibrated: bool = True) -> Tensor:  # (B, J) -> (B, K)
        """Probabilities (B, K): calibrated by the last ``calibrate``; before any, and if asked, (1 + score) / 2, clipped.

        A change of samples makes the calibration void, since what was removed has shaped it: that is a NotFittedError until
        ``calibrate`` is called again.
        """
        scores: Tensor = self(x)
        if self.num_classes < 2 or self._kind == "values":
            raise ValueError("probabilities need labels: this head holds float targets")
        return self.data_choices.probabilities(scores, calibrated)

    @exclusive
    def leverage(self, x: Any, relative: bool = False) -> Tensor:
        """Leverage of inputs, their distance from the samples held: g = 1/n + (x - mu)^T A^-1 (x - mu) (B,), from P. x: (B, J).

        ``relative``: divided by its mean over the samples held; an input of 10 is ten times as far as those are.
        """
        return uncertainty.leverage(self.view(), x, relative)

    @exclusive
    def uncertainty(self, x: Any) -> Tensor:
        """The standard error of each score (B, K): sigma_k sqrt(g), sigma_k^2 = rss_k / (n - dof). x: (B, J)."""
        return uncertainty.uncertainty(self.view(), x)

    @property
    def choices(self) -> dict[str, Choice]:
        """Choices made from data (rho, a calibration), each with a note whether it was made for the samples held now."""
        return self.data_choices.listed(self.rho)

    # -- parts, for the store, checkpoints and exchange ----------------------------------------------------------------

    @exclusive
    def sample_state(self) -> dict[str, Tensor]:
        """All that the head holds of its samples, for :meth:`adopt`: the statistics."""
        return self.need_statistics("sample_state").state()

    @exclusive
    def derived(self) -> dict[str, Tensor]:
        """All that follows from samples and options, as it is in use: w, b and P."""
        return dict(zip(("w", "b", "P"), self.solve(inverse=True), strict=True))

    def derived_anew(self) -> dict[str, Tensor]:
        """w, b and P as the statistics alone give them; those in use stay as they are."""
        return dict(zip(("w", "b", "P"), self.solved_anew(inverse=True), strict=True))

    def snapshot(self) -> dict[str, Tensor]:
        """State from which :meth:`resume` makes the head again: the statistics."""
        return self.sample_state()

    def resume(self, state: dict[str, Tensor]) -> None:
        """Restore a :meth:`snapshot`; ValueError when it does not fit."""
        self.adopt(state)

    @exclusive
    def adopt(self, state: dict[str, Tensor] | None) -> None:
        """Put saved statistics in the place of those held; None empties the head."""
        fresh = None if self.statistics is None else self.statistics.zero()
        if fresh is not None and state is not None:
            fresh.load(state)
        self.integrity = Integrity()  # anything interrupted before is replaced
        with self.integrity:
            self._published, self._solving = None, True
            if self.statistics is not None and fresh is not None:
                self.statistics.__dict__.update(fresh.__dict__)
            if state is None:
                self.rows.changed = None
                self.rows.clear()
                self.data_choices.reopen_rho()
            else:
                self.rows.drop("its statistics were replaced by saved ones")
            self._uncertifiable = None
            self.pending.forget()
            self.solver.reset()
            self.version += 1
            self.data_choices.outdate()
            self._solving = False

    def replace_parts(
        self, statistics: Statistics | None, solver: Solver, rows: HeldRows, pending: Pending,
        uncertifiable: str | None,
    ) -> None:  # fmt: skip
        """Put parts that were built aside in the place of those held: anything interrupted before is replaced."""
        with self._lock:
            self.integrity = Integrity()
            with self.integrity:
                self.statistics, self.solver, self._options = statistics, solver, solver.options
                self.rows, self.pending, self._uncertifiable = rows, pending, uncertifiable
                self._published, self._view, self._solving = None, None, False
                self.version += 1

    def check_whole(self) -> None:
        """InterruptedUpdateError if a change was interrupted."""
        for part in (self, self.statistics):
            if part is not None and part.integrity.torn:
                part.integrity.check()

    @property
    def torn(self) -> bool:
        """True if a change was interrupted; one that another thread is making is waited for."""
        with self._lock:
            try:
                self.check_whole()
            except InterruptedUpdateError:
                return True
        return False

    @contextmanager
    def changing(self, same_samples: bool = False) -> Iterator[None]:
        """Change the state: readers wait, an interruption is noticed, choices and published weights are out of date.

        ``same_samples``: choices made from data stay as they are. Needs the lock.
        """
        self.check_whole()
        with self.integrity:
            self._published, self._solving = None, True
            yield
            self.version += 1
            if not same_samples and self.data_choices.made:
                self.data_choices.outdate()
            self._solving = False

    def invalidate(self) -> Self:
        """Forget everything computed from the statistics, after they were changed from outside."""
        with self._lock, self.changing():
            self.solver.reset()
        return self

    def solve(self, inverse: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Bring w, b and, if asked for, P up to date, and return them."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self.check_whole()
            if self._solving and self.statistics is not None:
                self.solver.reset()
            if self.data_choices.made and self.data_choices.rho_is_open and not self._source.empty:
                self._choose_rho()
            self._published = None
            compact = self.statistics is None  # nothing is behind its weights: an interruption has to be noticed
            with self.integrity if compact else nullcontext():
                self._solving = True
                P = self.solver.inverse() if inverse else None
                w, b = self.solver.weights()
                self._solving = False
            self._published = None if self._source.empty else (w, b)
            return w, b, w if P is None else P

    def view(self) -> HeadView:
        """Read-only view of the present state, for :mod:`torchlssvm.linear.diagnostics`; NotFittedError without samples."""
        w, b = self._published or self._fitted_weights()
        if self._view is None or self._view[0] != self.version:
            target = self.target_grid if self._kind == "values" else None
            exact = self.requested.grid is not None if self.statistics is None else self.statistics.exact
            view = HeadView(
                self.in_features, self.num_classes, self.multiclass, self.device, self._options, self.statistics,
                self.solver, w, b, self.n, self.counts.to(torch.float64), exact, GridChoices(self._kind, self.grid, target),
                self.normalize,
            )  # fmt: skip
            self._view = (self.version, view)
        return self._view[1]

    def _fitted_weights(self) -> tuple[Tensor, Tensor]:
        """w and b, up to date; NotFittedError without samples."""
        with self._lock:
            self.solve()
            if self._published is None:
                raise NotFittedError("the head holds no samples: call add(x, y) first")
            return self._published

    @property
    def _source(self) -> Statistics | CompactSolver:
        """The part that counts the samples held: the statistics, or the solver of the compact form."""
        if self.statistics is not None:
            return self.statistics
        assert isinstance(self.solver, CompactSolver)
        return self.solver

    @property
    def _kind(self) -> str | None:
        """Kind of what is held, "labels" or "values"; None while empty."""
        source = self._source
        return source.choices.kind if isinstance(source, CompactSolver) else source.kind

    def need_statistics(self, what: str) -> Statistics:
        """Statistics, for what is named; ValueError in the compact form, InterruptedUpdateError after an interruption."""
        if self.statistics is None:
            raise ValueError(f"{what} needs statistics=True: the compact form keeps only w and P")
        with self._lock:  # a change that another thread is making is none that was interrupted
            self.check_whole()
        return self.statistics

    def check(
        self, x: Any, y: Any, weight: Any = None, ids: Any = None, like: SampleBatch | Statistics | None = None,
        sparse: bool = False,
    ) -> SampleBatch:  # fmt: skip
        """A checked batch, for :meth:`apply_changes`. ``like``: one that goes in together with it and decides first.

        ``sparse``: many sparse rows stay sparse.
        """
        if self.statistics is not None:
            changed = self.pending.statistics
            if like is None and changed is not None and not changed.empty:
                like = changed  # where everything was removed: what was agreed on stays decided
            batch = self.statistics.check(x, y, weight, ids, like, sparse=sparse)
        else:
            assert isinstance(self.solver, CompactSolver)
            choices = self.solver.choices if like is None or not self.solver.empty else like.choices
            batch = check_batch(
                x, y, weight, ids, J=self.in_features, K=self.num_classes, folds=0, device=self.device,
                exact=self.requested.grid is not None, choices=choices, wanted=self.requested,
                normalize=self.normalize,
            )  # fmt: skip
        if batch.labels is None and len(batch) and (self._options.class_weight is not None or self.multiclass == "ovo"):
            raise ValueError("class_weight and multiclass='ovo' need labels (B,), got float targets")
        return batch

    def _evidence(self, rough: bool = False) -> Evidence:
        """How it is known that samples to be removed are held. ``rough``: they are only roughly those held."""
        if not rough and (self._vouched or self.checked):
            return Evidence.PROVEN
        return Evidence.COUNTS if rough or self._uncertifiable is not None else Evidence.SUMS

    def apply_changes(self, changes: list[tuple[SampleBatch, int]], rough: bool = False) -> LSSVMHead:
        """Change the state by checked batches, all or none. ``rough``: what is removed is only roughly what is held."""
        changes = [(b, s) for b, s in changes if b.size]
        if not changes:
            return self
        stats, removes = self.statistics, any(s < 0 for _, s in changes)
        if removes:
            self.check_whole()  # before rows are missed that an interrupted update may have lost
        if stats is None:
            with self.changing():
                self.solver.changed(changes, None)
            return self
        evidence = self._evidence(rough)
        rows, changes = (StagedRows(), changes) if rough else self.rows.stage(changes)
        before = stats.copy() if removes and evidence is not Evidence.PROVEN else None
        with threads_for(0), self.changing():  # large sums and solves inside have all threads
            self.solver.release(sum(batch.x.shape[0] for batch, _ in changes))
            with self._put_back(before):
                views = stats.change(changes, evidence)
                self.solver.changed(changes, views)
                if before is not None:
                    self._test_sums(evidence)
            if rough:
                self.rows.drop(INEXACT_REMOVAL)
            self._record(changes, rows)
            if removes and stats.drained:
                self._emptied(stats)
        return self

    @contextmanager
    def _put_back(self, before: Statistics | None) -> Iterator[None]:
        """Put the sums back, if there is a copy of them, where a removal turns out to be impossible."""
        try:
            yield
        except RemovalError:
            if before is not None and self.statistics is not None:
                self.statistics.take_over(before)
                self.solver.reset()
            raise

    def _test_sums(self, evidence: Evidence) -> None:
        """RemovalError if the sums cannot be those of samples."""
        assert self.statistics is not None
        stats = self.statistics
        if stats.drained:
            stats.canonicalize()
            if not stats.empty and evidence is Evidence.SUMS:
                raise checks.removal_error("no sample would be left, but the sums would not be zero")
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericalWarning)  # the next read warns again
            try:
                self.solver.weights(doubtful=True)
            except NotPositiveDefinite:
                raise checks.removal_error(
                    "without the samples removed the system would not be positive definite"
                ) from None

    def _record(self, changes: list[tuple[SampleBatch, int]], rows: StagedRows) -> None:
        """Count what was summed: its rows, and what is pending for other machines."""
        self.rows.commit(rows)
        if self.statistics is not None and self.statistics.exact:
            self.pending.change(changes, torch.distributed.is_available() and torch.distributed.is_initialized())

    def _emptied(self, stats: Statistics) -> None:
        """Make the head as new after its last sample left, also if the sums are only roughly zero."""
        stats.canonicalize()
        if not stats.empty:
            self.pending.merge(stats, -1)
            stats.take_over(stats.zero())
        self._uncertifiable = None
        self.rows.clear()
        self.data_choices.reopen_rho()
        self.solver.reset()

    @exactly
    def _merge(self, other: LSSVMHead, sign: int) -> LSSVMHead:
        if not isinstance(other, LSSVMHead):
            raise ValueError(f"can only merge with another LSSVMHead, got {type(other).__name__}")
        mine, theirs = self.need_statistics("merging"), other.need_statistics("merging")
        if self.intercept != other.intercept or self.multiclass != other.multiclass:
            raise ValueError(
                f"cannot merge heads: intercept {self.intercept!r}, multiclass {self.multiclass!r} here and "
                f"{other.intercept!r}, {other.multiclass!r} there"
            )
        first, second = sorted((self, other), key=id)  # one order for all threads: none waits for another for ever
        with first.locked(), second.locked():
            other.check_whole()
            theirs = theirs.copy() if mine is theirs else theirs
            mine.compatible(theirs)
            if sign > 0:
                self.pending.refuse_twice(other.pending.merged)
            other.rows.flush()
            theirs_known = None if other.rows.unchecked is not None else other.rows.held
            rows, key = self.rows.joined(theirs_known, other.rows.key, sign), other.rows.key or self.rows.key
            tested = Evidence.SUMS if self._uncertifiable is None else Evidence.COUNTS
            evidence = tested if rows is None else Evidence.PROVEN
            before = mine.copy() if sign < 0 and rows is None else None
            with self.changing():
                with self._put_back(before):
                    mine.merge(theirs, sign, evidence)
                    self.solver.reset()
                    if before is not None:
                        self._test_sums(evidence)
                self.pending.merge(theirs, sign)
                if rows is not None and theirs_known is not None and self.rows.changed is not None:
                    self.rows.changed = self.rows.changed.plus(theirs_known, sign)
                self.rows.replace(rows, key, UNKNOWN_ROWS)
                self.pending.combine(other.pending, sign)
                self.mark_uncertifiable(other.uncertifiable)
                if sign < 0 and mine.drained:
                    self._emptied(mine)
        return self

    # -- nn.Module -----------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device with the module; the dtype stays float64 whatever ``.half()`` asks for."""
        del recurse
        checkpoint.move(self, fn(torch.empty(0, device=self.device)).device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with self._lock:  # weights and sums of one state
            super()._save_to_state_dict(destination, prefix, keep_vars)
            if not keep_vars:  # a snapshot, as all the rest is: the buffers themselves are written in place later
                destination.update({prefix + k: destination[prefix + k].clone() for k in checkpoint.BUFFER_NAMES})
            destination.update({prefix + k: v for k, v in checkpoint.save(self).items()})

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        problems = checkpoint.load(self, {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)})
        problems.tell(prefix, strict, missing_keys, unexpected_keys, error_msgs)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: no raw sample is ever in there."""
        return checkpoint.freeze(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`__getstate__` returned."""
        checkpoint.thaw(self, state)

    def extra_repr(self) -> str:
        """Shape, options and count."""
        form = "" if self.statistics is not None else ", statistics=False"
        pairs = ", multiclass='ovo'" if self.multiclass == "ovo" else ""
        form += "".join(f", {name}={value!r}" for name, value in self.row_options().items())
        shape = f"in_features={self.in_features}, num_classes={self.num_classes}"
        return f"{shape}, n={self.n:g}, rho={self._options.rho:g}, intercept={self.intercept!r}{pairs}{form}"


def check_class_weight(value: Any, K: int, device: torch.device) -> str | Tensor | None:
    """None, "balanced", "complement" or positive weights (K,)."""
    if value is None or isinstance(value, str):
        checks.one_of(value, "class_weight (or a tensor)", (None, "balanced", "complement"))
        return value
    try:
        weight = torch.as_tensor(value, dtype=torch.float64, device=device).detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        allowed = f"None, 'balanced', 'complement' or {K} numbers in the order of the classes"
        raise ValueError(f"class_weight must be {allowed}; got {type(value).__name__}") from error
    if weight.shape != (K,):
        raise ValueError(f"class_weight must have shape ({K},), got {tuple(weight.shape)}")
    if not checks.is_fake(weight) and not bool((torch.isfinite(weight) & (weight > 0)).all()):
        raise ValueError(f"class_weight must be finite and > 0, got {weight.tolist()}")
    return weight
