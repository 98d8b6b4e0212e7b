"""``MarginHead``: a squared-hinge SVM on features, whose data can be added, removed and corrected exactly."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchlssvm.errors import InterruptedUpdateError, NotFittedError
from torchlssvm.functional import checks
from torchlssvm.functional.grid import FixedPoint, GridOption, as_grid
from torchlssvm.functional.modes import exactly
from torchlssvm.functional.row_normalization import normalized
from torchlssvm.linear import margin_checkpoint
from torchlssvm.linear.active_sets import ActiveSetSolver
from torchlssvm.linear.checkpoint import arguments, make_live, thaw
from torchlssvm.linear.data_choices import Choice, DataChoices
from torchlssvm.linear.diagnostics import margin_changes, margin_rho_selection, uncertainty
from torchlssvm.linear.diagnostics.calibration import Calibration
from torchlssvm.linear.diagnostics.influence import Measure
from torchlssvm.linear.diagnostics.influence_ranking import Influential, check_ranking, names_of, rank
from torchlssvm.linear.diagnostics.rho_selection import RhoPath
from torchlssvm.linear.grid_rows import GridRows
from torchlssvm.linear.head import LSSVMHead, check_class_weight
from torchlssvm.linear.locking import exclusive, give_lock
from torchlssvm.linear.solution import relative_distance
from torchlssvm.linear.solvers import SolverOptions
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.batch import SampleBatch, joint_changes
from torchlssvm.statistics.statistics import Evidence, Integrity

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MarginHead"]


class MarginHead(nn.Module):
    r"""Squared-hinge SVM head: the accuracy of a max-margin classifier, and every change of its samples exact.

    Minimizes, for each class k against the rest, with y = +1 for the class and -1 otherwise,

    .. math:: \rho |w_k|^2 + \sum_n c_n \max(0, 1 - y_{nk} (w_k^T \phi_n + b_k))^2,

    which is ridge regression on the active set :math:`\{n : y_{nk} f_k(\phi_n) < 1\}`. The head keeps its samples, on the grid
    as integers, to see which of them become active. ``digest()`` is that of the statistics of all samples held, as
    :class:`~torchlssvm.LSSVMHead`'s; active sets do not depend on the history, and after ``refresh()`` neither does a bit of
    the weights. A class with samples of one sign only has w = 0, b = that sign and an empty active set.

    Statistics and rows change at once; active sets and weights are brought up to date when they are read. A class in which no
    changed sample is active is left alone, to the bit.

    Args:
        in_features: J, the number of features.
        num_classes: K, the number of classes, 2 or more.
        rho: the regularization, settable at any time (scikit-learn's ``LinearSVC`` has C = 1 / (2 rho) for "none").
        intercept: ``"free"``, ``"penalized"`` (a constant feature) or ``"none"``.
        class_weight: None, ``"balanced"`` (n / (P n_k) for P classes with samples), ``"complement"`` ((n - n_k) / n),
            or a tensor (K,). With the first two every change of samples changes every class.
        grid: a :class:`FixedPoint`, a number (its limit) or ``"auto"`` (a power of two from the first batch).
        per_class: keep sums per class; None means when ``class_weight`` needs it.
        normalize: None, ``"l2"`` or ``"sqrt"``: normalization of each row before the grid, as for
            :class:`~torchlssvm.LSSVMHead`.
        scale: ``"std"`` solves for features standardised by the mean and deviation of the samples held, derived again at each
            solve, as for :class:`~torchlssvm.LSSVMHead`. Every change of samples then changes every class. Leave-one-out and
            influence hold the scale fixed.
        rows_folder: keep the rows in a memory-mapped file in this folder instead of in memory, 4 bytes a number. The file has
            no name and goes with the process; copies of the head have their rows in memory.
        device: where the state lives.

    Attributes:
        statistics: the sums of the samples held.
        samples: the samples held, distinct rows on the grid.
        solver: finds active sets and weights.
        data_choices: the choices made from data, rho and a calibration.
        version: counts changes of the state.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(200, 16), torch.arange(200) % 3
        >>> x[:, 0] += 4 * y
        >>> head = MarginHead(16, 3, grid=FixedPoint(limit=32.0)).add(x, y)
        >>> bool((head.predict(x) == y).float().mean() > 0.6)
        True
        >>> rest = MarginHead(16, 3, grid=FixedPoint(limit=32.0)).add(x[50:], y[50:])
        >>> head.remove(x[:50], y[:50]).digest() == rest.digest()
        True
        >>> torch.equal(head.refresh().w, rest.w)
        True
    """

    _lock: Any  # a threading.RLock, which has no type of its own
    multiclass = "ovr"
    uncertifiable = None
    unchecked = None
    checked = True
    keeps_rows = True

    @exactly
    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        rho: float = 1.0,
        intercept: str = "free",
        class_weight: str | Tensor | None = None,
        grid: GridOption = "auto",
        per_class: bool | None = None,
        normalize: str | None = None,
        scale: str | None = None,
        rows_folder: str | os.PathLike[str] | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        give_lock(self)
        checks.one_of(intercept, "intercept", ("free", "penalized", "none"))
        if as_grid(grid) is None:
            raise ValueError(
                "MarginHead keeps its samples on a grid: grid must be a FixedPoint, a number or 'auto', got None"
            )
        device = torch.empty(0, device=device).device
        self.statistics = Statistics(
            in_features, num_classes, grid=grid, device=device, per_class=class_weight is not None or bool(per_class),
            normalize=normalize, scale=scale,
        )  # fmt: skip
        if num_classes < 2:
            raise ValueError(f"num_classes must be an int >= 2, got {num_classes!r}: a margin is between classes")
        weight = check_class_weight(class_weight, num_classes, device)
        if per_class is False and weight is not None:
            raise ValueError("per_class=False does not go with class_weight, which needs sums per class")
        self._options = SolverOptions(check_rho(rho), intercept, weight)
        self.samples = GridRows(in_features, device, None if rows_folder is None else os.fspath(rows_folder))
        self.solver = ActiveSetSolver(self.samples, self.statistics, self._options)
        self.data_choices = DataChoices()
        self.version = 0
        self._integrity = Integrity()
        self._published: tuple[Tensor, Tensor] | None = None  # w and b now, for readers without the lock
        make_live(self, dict.fromkeys(margin_checkpoint.MARGIN_BUFFER_NAMES))

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def in_features(self) -> int:
        """J, the number of features."""
        return self.statistics.in_features

    @property
    def num_classes(self) -> int:
        """K, the number of classes."""
        return self.statistics.num_classes

    @property
    def device(self) -> torch.device:
        """Device of the state."""
        return self.statistics.device

    @property
    def intercept(self) -> str:
        """Treatment of the constant: "free", "penalized" or "none"."""
        return self._options.intercept

    @property
    def grid(self) -> FixedPoint | None:
        """The grid in use; None while ``"auto"`` has seen no data."""
        return self.statistics.grid

    @property
    def normalize(self) -> str | None:
        """Row normalization before the grid: None, "l2" or "sqrt"."""
        return self.statistics.normalize

    @property
    def scale(self) -> str | None:
        """Scale of the features at the solve: None, as they are, or "std", standardised."""
        return self.statistics.scale

    @property
    def target_grid(self) -> None:
        """None: a margin head holds labels."""
        return None

    @property
    def counts(self) -> Tensor:
        """Samples per class (K,)."""
        return self.statistics.counts.clone()

    @property
    def n(self) -> int:
        """The number of samples held (their total weight)."""
        return int(self.statistics.n)

    @property
    def rho(self) -> float:
        """The regularization; setting it costs a solve, from the active sets known, at the next read."""
        return self._options.rho

    @rho.setter
    @exclusive
    def rho(self, value: float) -> None:
        value = check_rho(value)
        with self.changing(same_samples=True):
            self.solver.set_rho(value)
            self.data_choices.made.pop("rho", None)
            self.data_choices.outdate_calibration()

    @property
    def class_weight(self) -> str | Tensor | None:
        """Weights by class, a copy; settable at any time when sums are kept per class."""
        weight = self._options.class_weight
        return weight.clone() if isinstance(weight, Tensor) else weight

    @class_weight.setter
    @exclusive
    def class_weight(self, value: str | Tensor | None) -> None:
        weight = check_class_weight(value, self.num_classes, self.device)
        if weight is not None and not self.statistics.per_class:
            raise ValueError("class_weight needs sums per class: build the head with per_class=True")
        with self.changing():
            self._options.class_weight = weight
            self.solver.restart()

    @property
    def weight(self) -> Tensor:
        """w as nn.Linear has it, (K, J): a copy."""
        return self.solve()[0].mT.clone()

    @property
    def bias(self) -> Tensor:
        """b (K,), as nn.Linear has it: a copy."""
        return self.solve()[1].clone()

    @property
    @exclusive
    def active_counts(self) -> Tensor:
        """Samples active in each class (K,)."""
        self.solve()
        copies = self.samples.copies
        counts = [copies[self.solver.active(k)].sum() for k in range(self.num_classes)]
        return torch.stack(counts).to(torch.int64)

    @property
    @exclusive
    def ties(self) -> Tensor:
        """Distinct samples of each class whose margin is 1 to 30 digits (K,): they count as inactive."""
        self.solve()
        return self.solver.tie_counts()

    @exclusive
    def active(self, x: Any, y: Any) -> Tensor:
        """Tell which samples held are active in which class (B, K). x: (B, J); y: (B,), as added."""
        self.solve()
        slots = self.samples.find(self.check(x, y))
        return torch.stack([self.solver.active(k)[slots] for k in range(self.num_classes)], 1)

    def locked(self) -> AbstractContextManager[Any]:
        """A context in which no other thread reads or changes the head: several calls as one."""
        lock: AbstractContextManager[Any] = self._lock
        return lock

    def drop_membership(self, reason: str = "") -> Self:
        """Do nothing: the rows themselves are held, and every removal is checked against them."""
        del reason
        return self

    def trusted_removals(self) -> AbstractContextManager[None]:
        """A context that does nothing: every removal is checked."""
        return nullcontext()

    def config(self) -> dict[str, Any]:
        """The options as primitives; ``MarginHead.from_config`` makes an empty head like this one from them."""
        return margin_checkpoint.config(self)

    @classmethod
    def from_config(cls, config: dict[str, Any], device: torch.device | str | None = None) -> Self:
        """An empty head with the options of another one."""
        return cls(**arguments(config), device=device)

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, K)
        """Scores x @ w + b, float64; differentiable in x."""
        w, b = self._published or self.fitted_weights()  # one read: another thread may be changing the head
        x = checks.scored_features(x, self.in_features, self.device)
        return (x if self.normalize is None else normalized(x, self.normalize, torch.sqrt)) @ w + b

    def points(self, x: Any) -> Tensor:
        """Features (B, J) in steps of the grid, not rounded to it. x: (B, J)."""
        assert self.grid is not None
        given = checks.features(x, self.in_features, self.device).to(torch.float64)
        return normalized(given, self.normalize) / self.grid.resolution

    def predict(self, x: Tensor) -> Tensor:  # (B, J) -> (B,)
        """The class with the highest score."""
        scores: Tensor = self(x)
        return scores.argmax(1)

    @exclusive
    def digest(self) -> str:
        """SHA-256 of the statistics of all samples held: equal exactly when the statistics are."""
        self.check_whole()
        return self.statistics.digest()

    @exclusive
    def drift(self) -> float:
        """The largest relative deviation of the weights in use from those of ``refresh()``. Costs a solve."""
        w = self.solve()[0]
        if self.n == 0:
            return 0.0
        exact = self.solver.solved_anew()
        return relative_distance(w, exact)

    @exclusive
    def refresh(self) -> Self:
        """Solve from the rows now: weights are then bit for bit those of a fresh head with the same data."""
        with self.changing(same_samples=True):
            self.solver.restart()
        self.solve()
        return self

    # -- changing ------------------------------------------------------------------------------------------------------

    @exclusive
    def add(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> Self:
        """Learn samples. x: (B, J); y: (B,) labels; weight: (B,), integers."""
        return self.apply_changes([(self.check(x, y, weight, ids), 1)])

    @exclusive
    def remove(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> Self:
        """Unlearn samples held: the same arguments, bit for bit, as when they were added."""
        return self.apply_changes([(self.check(x, y, weight, ids), -1)])

    @exclusive
    def update(self, add: tuple[Any, ...] | None = None, remove: tuple[Any, ...] | None = None) -> Self:
        """Add and remove jointly. Each argument is (x, y), or (x, y, weight, ids); what is removed is held before the call."""
        return self.apply_changes(joint_changes(self.check, add, remove))

    @exclusive
    def relabel(self, x: Any, y_old: Any, y_new: Any, weight: Any = None, ids: Any = None) -> Self:
        """Give samples held new labels: classes that are neither the old nor the new one are left alone."""
        return self.apply_changes([(self.check(x, y_old, weight, ids), -1), (self.check(x, y_new, weight, ids), 1)])

    @exclusive
    def replace(self, x_old: Any, y_old: Any, x_new: Any, y_new: Any, ids_old: Any = None, ids_new: Any = None) -> Self:
        """Exchange samples held for others."""
        return self.update(add=(x_new, y_new, None, ids_new), remove=(x_old, y_old, None, ids_old))

    @exclusive
    def add_classes(self, k: int) -> Self:
        """Make room for k more classes; samples held are negative examples of them."""
        if isinstance(self._options.class_weight, Tensor):
            raise ValueError("class_weight is a tensor (K,): set it to None first, then to one for the new classes")
        checks.natural(k, "k")
        with self.changing():
            self.statistics.add_classes(k)
            self.solver.add_classes(k)
        return self

    @exclusive
    def forget_class(self, c: int) -> Self:
        """Unlearn all samples of one class. The class keeps its number."""
        checks.label(c, self.num_classes)
        rows = self.samples.of_label(c)
        if not len(rows.slots):
            return self
        grid = self.grid
        assert grid is not None
        x = grid.dequantize(self.samples.q[rows.slots])
        labels = torch.full((len(x),), c, device=self.device)
        return self.apply_changes([(self.statistics.check(x, labels, -rows.copies, gridded=True), -1)])

    def merge(self, other: MarginHead) -> Self:
        """Add every sample the other head holds: same shapes, same grid."""
        return self._merge(other, 1)

    def __iadd__(self, other: MarginHead) -> Self:
        """Add every sample the other head holds, as :meth:`merge`."""
        return self._merge(other, 1)

    def __isub__(self, other: MarginHead) -> Self:
        """Remove every sample the other head holds; RemovalError, with nothing changed, if one is not held here."""
        return self._merge(other, -1)

    def _merge(self, other: MarginHead, sign: int) -> Self:
        if not isinstance(other, MarginHead):
            raise ValueError(f"can only merge with another MarginHead, got {type(other).__name__}")
        if self.intercept != other.intercept:
            raise ValueError(f"cannot merge heads: intercept {self.intercept!r} here and {other.intercept!r} there")
        heads: list[MarginHead] = [self, other]
        first, second = sorted(heads, key=id)  # one order for all threads: none waits for another for ever
        with first.locked(), second.locked(), torch.inference_mode(False), torch.no_grad():
            other.check_whole()
            self.check_whole()
            self.statistics.compatible(other.statistics)
            grid, rows = other.grid, other.samples
            if other.n == 0 or grid is None:
                return self
            if sign > 0 and self.statistics.empty:
                self.statistics.decide("labels", grid)
            batch = self.statistics.check(
                grid.dequantize(rows.q), rows.labels.clone(), rows.copies.clone(), gridded=True
            )
            return self.apply_changes([(batch, sign)])

    # -- diagnostics -----------------------------------------------------------------------------------------------------

    @exclusive
    def leave_one_out(self, x: Any, y: Any, weight: Any = None, groups: Any = None) -> Tensor:
        """Scores (B, K) of samples held, each by the head that never saw it: exact, with the active sets that it would have.

        Not by refitting: in each class one inverse serves all samples, and a sample that is not active in a class has the score
        it has now. Class weights that follow the counts are derived again without the sample; ``scale="std"`` keeps the scale
        of all samples held. Any part of what is held may be given.

        Args:
            x: (B, J), as added.
            y: (B,), as added.
            weight: (B,), as added.
            groups: (B,) numbers or names: leave out the whole group instead; all of a group goes in one call.

        >>> import torch
        >>> from torchlssvm import MarginHead
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(60, 3), torch.arange(60) % 2
        >>> head = MarginHead(3, 2).add(x, y)
        >>> scores = head.leave_one_out(x, y)
        >>> torch.allclose(scores[0], head.remove(x[:1], y[:1])(x[:1])[0], atol=1e-4)  # the grid aside
        True
        """
        with torch.inference_mode(False), torch.no_grad():
            return margin_changes.leave_one_out(self, x, y, weight, groups)

    @exclusive
    def influence(
        self, x: Any, y: Any, x_val: Any, y_val: Any = None, what: str = "remove", on: str | Measure = "loss", *,
        y_new: Any = None, weight: Any = None, groups: Any = None,
    ) -> Tensor:  # fmt: skip
        """The exact change at x_val if each sample, or group of samples, were removed, added or relabelled.

        Positive for ``on="loss"`` means the loss would rise: removing such a sample hurts. With ``scale="std"`` the scale of
        all samples held stays.

        Args:
            x: (B, J), samples held, as added; for ``what="add"`` samples that are to come.
            y: (B,), their labels.
            x_val: (V, J), where to look.
            y_val: (V,) labels, for "loss" and "accuracy".
            what: ``"remove"``, ``"add"`` or ``"relabel"``.
            on: ``"loss"`` (mean squared hinge over points and classes) or ``"accuracy"``, returns (B,); ``"scores"``, returns
                (B, V, K); or a function from scores (b, V, K) to one number for each change (b,).
            y_new: (B,), for ``"relabel"``.
            weight: (B,), as added.
            groups: (B,); samples of a group change together, and the result has one entry for each group, in the order in
                which they first appear.

        >>> import torch
        >>> from torchlssvm import MarginHead
        >>> x, y = torch.randn(50, 4), torch.arange(50) % 2
        >>> head = MarginHead(4, 2).add(x, y)
        >>> head.influence(x, y, x[:10], y[:10]).shape, head.influence(x, y, x[:10], on="scores").shape
        (torch.Size([50]), torch.Size([50, 10, 2]))
        """
        with torch.inference_mode(False), torch.no_grad():
            return margin_changes.influence(self, x, y, x_val, y_val, what, on, y_new, weight, groups)

    @exclusive
    def most_influential(
        self, x: Any, y: Any, x_val: Any, y_val: Any, count: int = 10, what: str = "remove", on: str = "loss", *,
        ids: Any = None, y_new: Any = None, weight: Any = None, groups: Any = None,
    ) -> Influential:  # fmt: skip
        """The ``count`` most helpful and most harmful samples (or groups) by their exact influence at x_val.

        Arguments as for :meth:`influence`; ``ids`` (B,) come back with the samples.
        """
        check_ranking(what, on, count)
        names = names_of(ids, groups, len(x))
        change = self.influence(x, y, x_val, y_val, what, on, y_new=y_new, weight=weight, groups=groups)
        return rank(change, what, on, count, names)

    @exclusive
    def rho_path(self, rhos: Any = None, method: str = "kfold", *, score: str = "accuracy", folds: int = 5) -> RhoPath:
        """Errors for many values of rho, without choosing; arguments as for :meth:`select_rho`."""
        with torch.inference_mode(False), torch.no_grad():
            return margin_rho_selection.rho_path(self, rhos, method, score, folds)

    @exclusive
    def select_rho(
        self, rhos: Any = None, method: str = "kfold", x: Any = None, y: Any = None, *, weight: Any = None, ids: Any = None,
        score: str = "accuracy", folds: int = 5,
    ) -> RhoPath:  # fmt: skip
        """Choose rho on the samples held, and apply it.

        Args:
            rhos: values > 0; None: nine values from the mean eigenvalue of the features down to 1e-4 of it.
            method: ``"kfold"``, or ``"loo"`` (exact leave-one-out, without refitting). Generalized cross-validation is refused:
                scores of this head are not linear in the targets.
            x: not needed, as ``y``, ``weight`` and ``ids``: the head holds its samples.
            y: not needed.
            weight: not needed.
            ids: not needed.
            score: ``"accuracy"``, or ``"squared"`` for the squared hinge.
            folds: for ``"kfold"``; the fold of a sample is a hash of its features and label, and copies are in one fold.

        >>> import torch
        >>> from torchlssvm import MarginHead
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(60, 4), torch.arange(60) % 2
        >>> head = MarginHead(4, 2).add(x, y)
        >>> path = head.select_rho([0.1, 1.0, 10.0])
        >>> head.rho == path.rho, path.errors.shape
        (True, torch.Size([3]))
        """
        del x, y, weight, ids
        path = self.rho_path(rhos, method, score=score, folds=folds)
        self.rho = path.rho
        self.data_choices.record("rho", method, len(path.rhos))
        return path

    @exclusive
    def least_squares(self) -> LSSVMHead:
        """A least-squares head on the same samples, with the same options: leverage, GCV and columns to choose from.

        >>> import torch
        >>> from torchlssvm import MarginHead
        >>> x, y = torch.randn(50, 4), torch.arange(50) % 2
        >>> head = MarginHead(4, 2).add(x, y)
        >>> head.least_squares().digest() == head.digest()
        True
        """
        options = {"target_grid": "auto"} | {k: v for k, v in self.config().items() if k != "type"}
        out = LSSVMHead.from_config(options, device=self.device)
        out.adopt(self.statistics.state())
        return out

    # -- probabilities -------------------------------------------------------------------------------------------------

    @property
    def calibration(self) -> Calibration | None:
        """The map from scores to probabilities, if it was made for the samples held now."""
        return self.data_choices.calibration

    @exclusive
    def calibrate(self, x: Any, y: Any, method: str | None = None, *, weight: Any = None, groups: Any = None) -> Self:
        """Fit probabilities on the leave-one-out scores of samples held. Arguments as for ``LSSVMHead.calibrate``."""
        return self.calibrate_on(self.leave_one_out(x, y, weight, groups), y, method)

    @exclusive
    def calibrate_on(self, scores: Any, y: Any, method: str | None = None) -> Self:
        """Fit probabilities on scores (n, K) of samples by heads that never saw them. y: (n,)."""
        calibration = uncertainty.calibrate_on(self, scores, y, method)
        self.data_choices.record_calibration(calibration)
        return self

    def predict_proba(self, x: Tensor, calibrated: bool = True) -> Tensor:  # (B, J) -> (B, K)
        """Probabilities (B, K): calibrated by the last calibration; before any, and if asked, (1 + score) / 2, clipped.

        A change of samples makes the calibration void, since what was removed has shaped it: that is a NotFittedError until it
        is made again.
        """
        return self.data_choices.probabilities(self(x), calibrated)

    @property
    def choices(self) -> dict[str, Choice]:
        """Choices made from data (rho, a calibration), each with a note whether it was made for the samples held now."""
        return self.data_choices.listed(self.rho)

    # -- parts, for the store, checkpoints and copies --------------------------------------------------------------------

    def check_whole(self) -> None:
        """InterruptedUpdateError if a change was interrupted."""
        if self._integrity.torn:
            self._integrity.check()
        self.statistics.check_whole()

    @contextmanager
    def changing(self, same_samples: bool = False) -> Iterator[None]:
        """Change the state: an interruption is noticed, choices and published weights are out of date. Needs the lock.

        ``same_samples``: choices made from data stay as they are.
        """
        self.check_whole()
        with self._integrity:
            self._published = None
            yield
            self.version += 1
            if not same_samples and self.data_choices.made:
                self.data_choices.outdate()

    def solve(self) -> tuple[Tensor, Tensor]:
        """Bring w and b up to date, and return them."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self.check_whole()
            w, b = self.solver.weights()
            self._published = (w, b) if self.statistics.n else None
            return w, b

    def fitted_weights(self) -> tuple[Tensor, Tensor]:
        """w and b, up to date; NotFittedError without samples."""
        with self._lock:
            w, b = self.solve()
            if not self.statistics.n:
                raise NotFittedError("the head holds no samples: call add(x, y) first")
            return w, b

    def check(
        self, x: Any, y: Any, weight: Any = None, ids: Any = None, like: SampleBatch | None = None, removed: bool = False,
        gridded: bool = False,
    ) -> SampleBatch:  # fmt: skip
        """A checked batch, for :meth:`apply_changes`. ``like``: one that goes in together with it and decides first.

        ``removed``: rows that are to be held; they are looked up when the change is made. ``gridded``: the rows are normalized
        and on the grid already.
        """
        del removed
        batch = self.statistics.check(x, y, weight, ids, like, gridded)
        if len(batch) and batch.labels is None:
            raise ValueError("MarginHead needs labels (B,), got float targets")
        return batch

    def apply_changes(self, changes: list[tuple[SampleBatch, int]]) -> Self:
        """Change the state by checked batches, all or none."""
        changes = [(batch, sign) for batch, sign in changes if batch.size]
        if not changes:
            return self
        self.check_whole()
        plan = self.samples.plan(changes)
        self.samples.reserve(len(plan.q))  # memory is reserved before anything changes
        with self.changing():
            self.statistics.change(changes, Evidence.PROVEN)
            self.solver.change(plan)
            if self.statistics.drained and not checks.is_fake(self.statistics.counts):
                self.statistics.canonicalize()
                self.solver.reset()
        return self

    @property
    def torn(self) -> bool:
        """True if a change was interrupted; one that another thread is making is waited for."""
        with self._lock:
            try:
                self.check_whole()
            except InterruptedUpdateError:
                return True
            return False

    @exclusive
    def sample_state(self) -> dict[str, Tensor]:
        """All that the head holds of its samples, for :meth:`adopt`: the rows, in an order that depends on them alone."""
        self.check_whole()
        return margin_checkpoint.save_samples(self)

    @exclusive
    def derived(self) -> dict[str, Tensor]:
        """All that follows from samples and options, as it is in use: w, b, and the active sets (K, n).

        The active sets are in the order of :meth:`sample_state`.
        """
        w, b = self.solve()
        return {"w": w, "b": b, "active": self.solver.sides_in_saved_order()}

    @exclusive
    def derived_anew(self) -> dict[str, Tensor]:
        """w, b and the active sets of a new head that learned the rows held."""
        fresh = type(self).from_config(self.config(), device=self.device)
        fresh.adopt(self.sample_state())
        return fresh.derived()

    @exclusive
    def snapshot(self) -> dict[str, Tensor]:
        """State that makes :meth:`resume` fast: what is :meth:`derived`, where that is up to date, and no samples."""
        return self.derived() if self._published is not None else {}

    @exclusive
    def resume(self, state: dict[str, Tensor]) -> None:
        """Begin the next solve where a :meth:`snapshot` of the samples held was; what it finds is proven all the same.

        ValueError when that is of other samples.
        """
        if not state:
            return
        counts, order = self.statistics.counts, self.samples.saved_order()
        fitted = ((counts > 0) & (counts < self.statistics.n)).to(torch.float64)
        sides = torch.empty_like(state["active"])
        if tuple(sides.shape) != (self.num_classes, len(order)) or not bool(state["w"].isfinite().all()):
            raise ValueError(
                f"active sets {tuple(sides.shape)} are not of {len(order)} samples, or weights are not finite"
            )
        sides[:, order] = state["active"]
        with self.changing():
            proofs = nn.functional.pad(fitted[:, None], (4, 0))
            self.solver.restore({"w": state["w"], "b": state["b"], "proofs": proofs}, sides)
            self.solver.restart()

    @exclusive
    def adopt(self, state: dict[str, Tensor] | None) -> None:
        """Put saved samples (``margin_checkpoint.save_samples``) in the place of those held; None empties the head."""
        fresh, rows = self.statistics.zero(), self.samples.empty()
        if state is not None:
            fresh, rows = margin_checkpoint.load_samples(self, state)
        self.replace_parts(fresh, rows)
        self.data_choices.outdate()

    def replace_parts(self, statistics: Statistics, rows: GridRows, options: SolverOptions | None = None) -> None:
        """Put parts that were built aside in the place of those held: anything interrupted before is replaced."""
        with self._lock:
            self._integrity = Integrity()
            with self._integrity:
                self._options = options or self._options
                self.statistics, self.samples = statistics, rows
                self.solver = ActiveSetSolver(rows, statistics, self._options)
                self._published = None
                self.version += 1

    # -- nn.Module -----------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device with the module; the dtype stays float64 whatever ``.half()`` asks for."""
        del recurse
        margin_checkpoint.move(self, fn(torch.empty(0, device=self.device)).device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with self._lock:  # weights and rows of one state
            super()._save_to_state_dict(destination, prefix, keep_vars)
            if not keep_vars:
                names = margin_checkpoint.MARGIN_BUFFER_NAMES
                destination.update({prefix + k: destination[prefix + k].clone() for k in names})
            destination.update({prefix + k: v for k, v in margin_checkpoint.save(self).items()})

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        problems = margin_checkpoint.load(
            self, {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        )
        problems.tell(prefix, strict, missing_keys, unexpected_keys, error_msgs)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: with the rows held, and without the matrices of the solver."""
        return margin_checkpoint.freeze(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`__getstate__` returned."""
        thaw(self, state)

    def extra_repr(self) -> str:
        """Shape, options and count."""
        shape = f"in_features={self.in_features}, num_classes={self.num_classes}"
        return f"{shape}, n={self.n}, rho={self.rho:g}, intercept={self.intercept!r}"


def check_rho(value: Any) -> float:
    """A finite rho > 0; ValueError for "gcv", which is a formula for squared errors."""
    if isinstance(value, str) and value == "gcv":
        raise ValueError(
            'rho="gcv" is for LSSVMHead: generalized cross-validation needs squared errors. Give MarginHead a number, and let '
            "head.select_rho() choose by k-fold on the samples held"
        )
    return checks.positive(value, "rho")
