"""``MarginHead``: a squared-hinge SVM on features, whose data can be added, removed and corrected exactly."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.functional.byte_tensors import tensor_to_bytes
from torchlssvm.functional.grid import GridOption, as_grid, grid_from_json, grid_to_json
from torchlssvm.functional.modes import exactly
from torchlssvm.linear import checkpoint
from torchlssvm.linear.active_sets import ActiveSetSolver
from torchlssvm.linear.diagnostics import margin_changes, margin_rho_selection, rho_rule
from torchlssvm.linear.diagnostics.rho_selection import RhoPath, decided
from torchlssvm.linear.diagnostics.uncertainty import calibrate_on
from torchlssvm.linear.grid_rows import GridRows
from torchlssvm.linear.head import LSSVMHead
from torchlssvm.linear.linear_head import LinearHead, check_class_weight
from torchlssvm.linear.locking import exclusive
from torchlssvm.linear.solvers import SolverOptions
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.batch import SampleBatch
from torchlssvm.statistics.statistics import Evidence

__all__ = ["MarginHead"]


class MarginHead(LinearHead):
    r"""Squared-hinge SVM head: a max-margin classifier whose samples can be added, removed and relabelled exactly.

    Minimizes, for each class k against the rest, with y = +1 for the class and -1 otherwise,

    .. math:: \rho |w_k|^2 + \sum_n c_n \max(0, 1 - y_{nk} (w_k^T \phi_n + b_k))^2,

    which is ridge regression on the active set :math:`\{n : y_{nk} f_k(\phi_n) < 1\}`. The head keeps its samples, as integers
    on the grid, because any sample may become active later. ``digest()`` is the digest of the statistics of all samples,
    as in :class:`~torchlssvm.LSSVMHead`. The active sets do not depend on the history of changes, and after ``refresh()``
    neither does any bit of the weights. A class whose samples all have one sign has w = 0, b equal to that sign and an empty
    active set.

    Statistics and rows change immediately, while active sets and weights are brought up to date when you read them. If no
    changed sample is active in a class, the weights of this class keep every bit.

    Args:
        in_features: J, the number of features.
        num_classes: K, the number of classes, 2 or more.
        rho: the regularization, a number > 0, which corresponds to C = 1 / (2 rho) of ``LinearSVC``. It can be set at any time.
            Default: chosen by :meth:`select_rho` with default arguments, at the first read with 10 samples of two classes and
            again at each ``refresh()`` after samples have changed. With fewer samples, rho is 1.0, and ``choices`` reports that
            rho is not chosen yet.
        intercept: ``"free"``, ``"penalized"`` (a constant feature) or ``"none"``.
        class_weight: None, ``"balanced"`` (n / (P n_k) for P classes with samples), ``"complement"`` ((n - n_k) / n),
            or a tensor (K,). With ``"balanced"`` or ``"complement"``, every change of samples changes every class.
        grid: a :class:`FixedPoint`, a number (the largest feature that the grid can represent) or ``"auto"`` (a power of two
            from the first batch).
        per_class: keep sums per class. Default: only if ``class_weight`` requires them.
        normalize: None, ``"l2"`` or ``"sqrt"``. Each row is normalized before it is rounded to the grid, as in
            :class:`~torchlssvm.LSSVMHead`.
        scale: ``"std"`` standardizes features by the mean and deviation of the current samples, as in
            :class:`~torchlssvm.LSSVMHead`. Every change of samples then changes every class. Leave-one-out and influence hold
            the scale fixed.
        targets: only ``"classes"``. For several labels per sample, or for numbers, use :class:`~torchlssvm.LSSVMHead`.
        rows_folder: folder in which to keep the rows as a memory-mapped file instead of in memory, 4 bytes per number. The file
            is unlinked and disappears with the process. Copies of the head keep their rows in memory.
        device: device of the sums and weights.

    Attributes:
        statistics: the sums of the current samples.
        samples: the current samples, as distinct rows on the grid.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(200, 16), torch.arange(200) % 3
        >>> x[:, 0] += 4 * y
        >>> head = MarginHead(16, 3, grid=32.0).add(x, y)
        >>> bool((head.predict(x) == y).float().mean() > 0.6)
        True
        >>> rest = MarginHead(16, 3, grid=32.0).add(x[50:], y[50:])
        >>> head.remove(x[:50], y[:50]).digest() == rest.digest()
        True
        >>> torch.equal(head.refresh().w, rest.w)
        True
    """

    _solver: ActiveSetSolver
    _rho_method = "kfold"
    _rho_candidates = len(margin_rho_selection.DEFAULT_RHO_SHARES)
    _keeps_rows = True
    _saved_names = (
        "samples.q", "samples.labels", "samples.copies", "samples.grid", "solution.w", "solution.b", "solution.active",
    )  # fmt: skip

    @exactly
    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        rho: float | None = None,
        intercept: str = "free",
        class_weight: str | Tensor | None = None,
        grid: GridOption = "auto",
        per_class: bool | None = None,
        normalize: str | None = None,
        scale: str | None = None,
        targets: str = "classes",
        rows_folder: str | os.PathLike[str] | None = None,
        device: torch.device | str | None = None,
    ):
        if targets != "classes":
            raise ValueError(
                f"MarginHead learns classes, got targets={targets!r}: use LSSVMHead, or one MarginHead(J, 2) for each label"
            )
        if as_grid(grid) is None:
            raise ValueError(
                "MarginHead keeps its samples on a grid: grid must be a FixedPoint, a number or 'auto', got None"
            )
        device = torch.empty(0, device=device).device
        statistics = Statistics(
            in_features, num_classes, grid=grid, device=device, per_class=class_weight is not None or bool(per_class),
            normalize=normalize, scale=scale,
        )  # fmt: skip
        if num_classes < 2:
            raise ValueError(f"num_classes must be an int >= 2, got {num_classes!r}: a margin is between classes")
        weight = check_class_weight(class_weight, num_classes, device)
        if per_class is False and weight is not None:
            raise ValueError("class_weight needs sums per class, so per_class=False is not possible")
        super().__init__(statistics, rho, intercept, weight)
        self.samples = GridRows(in_features, device, None if rows_folder is None else os.fspath(rows_folder))
        self._solver = ActiveSetSolver(self.samples, self.statistics, self._options)

    def _rho_number(self, value: Any) -> float | None:
        if isinstance(value, str) and value == "gcv":
            raise ValueError(
                'rho="gcv" is for LSSVMHead: generalized cross-validation needs squared errors. Give MarginHead a number, or '
                "rho=None, which chooses by k-fold on the current samples"
            )
        return None if value is None else checks.positive(value, "rho")

    def _best_rho(self) -> float | None:
        """By k-fold, where there are enough samples of two classes at least."""
        if not rho_rule.is_choosable(self.statistics) or len(self.samples.folds(5).unique()) < 2:
            return None
        rho = margin_rho_selection.rho_path(self, None, "kfold", "accuracy", 5).rho
        return None if math.isnan(rho) else rho

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    @exclusive
    def active_counts(self) -> Tensor:
        """Number of active samples in each class (K,)."""
        self._solve()
        copies = self.samples.copies
        counts = [copies[self._solver.active(k)].sum() for k in range(self.num_classes)]
        return torch.stack(counts).to(torch.int64)

    @exclusive
    def active(self, x: Any, y: Any) -> Tensor:
        """Return which samples are active in which class (B, K). Pass x (B, J) and y (B,) as added."""
        self._solve()
        batch = self._check(x, y)
        assert batch.choices.grid is not None
        assert batch.labels is not None
        slots = self.samples.find(batch.choices.grid.quantize(batch.x), batch.labels)
        return torch.stack([self._solver.active(k)[slots] for k in range(self.num_classes)], 1)

    # -- changing ------------------------------------------------------------------------------------------------------

    @exclusive
    def relabel(self, x: Any, y_old: Any, y_new: Any, weight: Any = None, ids: Any = None) -> Self:
        """Change the labels of samples. Only the old and the new classes of these samples change."""
        return self._apply_changes([(self._check(x, y_old, weight, ids), -1), (self._check(x, y_new, weight, ids), 1)])

    @exclusive
    def forget_class(self, c: int) -> Self:
        """Unlearn all samples of one class. The class keeps its number."""
        checks.label(c, self.num_classes)
        mine = self.samples.labels == c
        return self._apply_changes([(self._held_batch(self, mine), -1)]) if bool(mine.any()) else self

    def _merge_samples(self, other: MarginHead, sign: int) -> None:
        self.statistics.compatible(other.statistics)
        if other.n == 0 or other.grid is None:
            return
        if sign > 0 and self.statistics.empty:
            self.statistics.decide("labels", other.grid)
        self._apply_changes([(self._held_batch(other), sign)])

    def _held_batch(self, head: MarginHead, some: Any = slice(None)) -> SampleBatch:
        """The samples of a head as a checked batch of this one. some: (n,) bool, only these."""
        rows, grid = head.samples, head.grid
        assert grid is not None
        x, y, copies = grid.dequantize(rows.q[some]), rows.labels[some].clone(), rows.copies[some].clone()
        return self.statistics.check(x, y, copies, gridded=True)

    # -- diagnostics -----------------------------------------------------------------------------------------------------

    @exclusive
    def leave_one_out(self, x: Any, y: Any, weight: Any = None, groups: Any = None) -> Tensor:
        """Return exact leave-one-out scores (B, K), each with the active sets of the head without the sample.

        Nothing is refitted. A sample that is not active in a class keeps its current score. The arguments are those of
        :meth:`torchlssvm.LSSVMHead.leave_one_out`.
        """
        return margin_changes.leave_one_out(self, x, y, weight, groups)

    def _influence(self, *arguments: Any) -> Tensor:
        return margin_changes.influence(self, *arguments)

    @exclusive
    def select_rho(
        self, rhos: Any = None, method: str = "kfold", *, score: str = "accuracy", folds: int = 5, apply: bool = True
    ) -> RhoPath:
        """Choose rho on the current samples, and apply it.

        Args:
            rhos: (r,) values > 0 to try. Default: nine values from the mean eigenvalue of the features down to 1e-4 of it.
            method: ``"kfold"``, or ``"loo"`` (exact leave-one-out, without refitting). Generalized cross-validation is refused,
                because the scores of this head are not linear in the targets.
            score: ``"accuracy"``, or ``"squared"`` for the squared hinge.
            folds: number of folds for ``"kfold"``. A hash of the features and the label assigns each sample to a fold, so
                copies of a sample share a fold.
            apply: set to False to return the errors and leave rho unchanged.

        >>> import torch
        >>> from torchlssvm import MarginHead
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(60, 4), torch.arange(60) % 2
        >>> head = MarginHead(4, 2).add(x, y)
        >>> path = head.select_rho([0.1, 1.0, 10.0])
        >>> head.rho == path.rho, path.errors.shape
        (True, torch.Size([3]))
        """
        path = decided(margin_rho_selection.rho_path(self, rhos, method, score, folds))
        if apply:
            self.rho = path.rho
            self._choices.record("rho", method, len(path.rhos))
        return path

    @exclusive
    def least_squares(self) -> LSSVMHead:
        """Return a least-squares head on the same samples with the same options, for leverage, GCV and choosing columns.

        >>> import torch
        >>> from torchlssvm import MarginHead
        >>> x, y = torch.randn(50, 4), torch.arange(50) % 2
        >>> head = MarginHead(4, 2).add(x, y)
        >>> head.least_squares().digest() == head.digest()
        True
        """
        options = {"target_grid": "auto"} | {k: v for k, v in self.config().items() if k != "type"}
        out = LSSVMHead.from_config(options, device=self.device)
        out._adopt(self.statistics.state())
        return out

    # -- probabilities -------------------------------------------------------------------------------------------------

    def predict_proba(self, x: Tensor, calibrated: bool = True) -> Tensor:  # (B, J) -> (B, K)
        """Return probabilities (B, K). If the current samples have no calibration yet, the head calibrates first."""
        if calibrated and self.calibration is None and self.n:
            self._calibrate_on_rows()
        return super().predict_proba(x, calibrated)

    def _calibrate_on_rows(self, method: str | None = None) -> None:
        """Calibrate on the current samples."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            grid, rows = self.grid, self.samples
            assert grid is not None
            order = rows.saved_order()  # so that the calibration depends on the samples alone
            x_held, y_held = rows.q[order].to(torch.float64) * grid.resolution, rows.labels[order]
            scores = margin_changes.leave_one_out(self, x_held, y_held, rows.copies[order], None, gridded=True)
            calibrate_on(self, scores, y_held, method, weight=rows.copies[order])

    # -- parts, for the store, checkpoints and copies --------------------------------------------------------------------

    def _check(
        self, x: Any, y: Any, weight: Any = None, ids: Any = None, like: SampleBatch | Statistics | None = None
    ) -> SampleBatch:
        """A checked batch, for :meth:`_apply_changes`. Rows to be removed are looked up when the change is made."""
        batch = self.statistics.check(x, y, weight, ids, like)
        if len(batch) and batch.labels is None:
            raise ValueError("MarginHead needs labels (B,), got float targets")
        return batch

    def _apply_changes(self, changes: list[tuple[SampleBatch, int]]) -> Self:
        """Change the state by checked batches, all or none."""
        changes = [(batch, sign) for batch, sign in changes if batch.size]
        if not changes:
            return self
        self._check_whole()
        plan = self.samples.plan(changes)
        self.samples.reserve(len(plan.q))  # memory is reserved before anything changes
        with self._changing():
            self.statistics.change(changes, Evidence.PROVEN)
            self._solver.change(plan)
            if self.statistics.drained:
                self.statistics.canonicalize()
                self._forget_choices()
                self._solver.reset()
        return self

    @exclusive
    def _sample_state(self) -> dict[str, Tensor]:
        """All that the head holds of its samples, for :meth:`_adopt`: the rows, in an order that depends on them alone."""
        self._check_whole()
        rows = {f"samples.{k}": v for k, v in self.samples.state().items()}
        return rows | {"samples.grid": checkpoint.pack({"grid": grid_to_json(self.statistics.choices.grid)})}

    @exclusive
    def _derived(self) -> dict[str, Tensor]:
        """Values that are derived from samples: w, b and the active sets (K, n) in the order of :meth:`_sample_state`."""
        self._solve()
        return self._solver.state()

    @exclusive
    def _snapshot(self) -> dict[str, Tensor]:
        """State that makes :meth:`_resume` fast: the :meth:`_derived` values, if they are up to date, but no samples."""
        return self._derived() if self._published is not None else {}

    @exclusive
    def _resume(self, state: dict[str, Tensor]) -> None:
        """Start the next solve, which is still proven, from a :meth:`_snapshot`. Raises ValueError if it has other samples."""
        if not state:
            return
        with self._changing():
            self._solver.restore(state)
            self._solver.restart()

    @exclusive
    def _adopt(self, state: dict[str, Tensor] | None) -> None:
        """Replace the current samples by those of a :meth:`_sample_state`; None empties the head."""
        if state is None:
            self._forget_choices()
        fresh, rows = (self.statistics.zero(), self.samples.empty()) if state is None else self._loaded_samples(state)
        self._replace_parts(**self._parts(fresh, rows, self._options))
        self._choices.outdate()

    def _parts(
        self, statistics: Statistics, rows: GridRows, options: SolverOptions, solution: dict[str, Tensor] | None = None
    ) -> dict[str, Any]:
        """Parts for :meth:`_replace_parts`. solution: the state of a solver."""
        solver = ActiveSetSolver(rows, statistics, options)
        if solution is not None:
            solver.restore({k: checkpoint.moved(v, statistics.device) for k, v in solution.items()})
        return {"statistics": statistics, "samples": rows, "_solver": solver}

    def _loaded_samples(self, state: dict[str, Tensor]) -> tuple[Statistics, GridRows]:
        """Statistics and rows from a :meth:`_sample_state`; ValueError when they do not fit."""
        rows, stats = self.samples.empty(), self.statistics.zero()
        saved = checkpoint.part(state, "samples.")
        grid = grid_from_json(json.loads(tensor_to_bytes(saved.pop("grid")).decode())["grid"])
        rows.load(saved, self.num_classes)
        if rows.n:
            if grid is None:
                raise ValueError("the saved rows have no grid")
            wanted = stats.requested.grid
            if wanted is not None and wanted != grid:
                raise ValueError(f"the grid is {grid} in the saved head and {wanted} here")
            stats.decide("labels", grid)
            stats.change([(stats.check(grid.dequantize(rows.q), rows.labels, rows.copies, gridded=True), 1)])
        return stats, rows

    def _solved_anew(self) -> tuple[Tensor, ...]:
        """w as a read after ``refresh()`` would return it. The weights in use do not change."""
        return (self._solver.restarted(self._options).weights()[0],)

    def _solve_afresh(self) -> None:
        self._solver.restart()

    def _drop_unfinished(self) -> None:
        self._solver.drop_unfinished()

    def _room_for(self, k: int) -> Callable[[], None]:
        return lambda: self._solver.add_classes(k)

    # -- nn.Module -----------------------------------------------------------------------------------------------------

    def _copies(self) -> dict[str, Any]:
        """Copies of the parts, without the matrices of the solver."""
        self._solve()
        kept = copy.deepcopy({name: getattr(self, name) for name in ("_options", "_choices", "_integrity")})
        parts = self._parts(self.statistics.copy(), self.samples.copy(), kept["_options"], self._solver.state())
        return kept | parts

    def _saved_parts(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        meta = {"digest": self.statistics.digest(), "per_class": self.statistics.per_class}
        return meta, self._sample_state() | {f"solution.{k}": v.clone() for k, v in self._solver.state().items()}

    def _loaded_parts(
        self, state: dict[str, Tensor], meta: dict[str, Any], options: SolverOptions
    ) -> Callable[[], None]:
        if meta["per_class"] != self.statistics.per_class:
            raise ValueError(f"per_class is {meta['per_class']} in the saved head and {self.statistics.per_class} here")
        statistics, rows = self._loaded_samples(state)
        checkpoint.check_digest(statistics, meta["digest"])
        parts = self._parts(statistics, rows, options, checkpoint.part(state, "solution."))
        return lambda: self._replace_parts(**parts)

    def _move(self, device: torch.device, options: SolverOptions) -> None:
        statistics, rows = self.statistics.to(device), self.samples.copy(device)
        self._replace_parts(**self._parts(statistics, rows, options, self._solver.state()))
