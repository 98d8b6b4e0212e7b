"""``LinearHead``: the common base of the least-squares and the margin head."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchlssvm.errors import InterruptedUpdateError, NotFittedError, StoreError
from torchlssvm.functional import checks
from torchlssvm.functional.calibration import strictly_inside
from torchlssvm.functional.grid import FixedPoint, grid_to_json
from torchlssvm.functional.modes import all_or_nothing, exactly
from torchlssvm.functional.module_state import device_after
from torchlssvm.functional.row_normalization import normalized
from torchlssvm.functional.threads import PASS_WORK, threads_for
from torchlssvm.linear import checkpoint
from torchlssvm.linear.data_choices import Choice, ChoiceState, DataChoices
from torchlssvm.linear.diagnostics.calibration import Calibration
from torchlssvm.linear.diagnostics.influence import Influential, Measure, check_ranking, names_of, rank
from torchlssvm.linear.diagnostics.rho_selection import RhoPath
from torchlssvm.linear.diagnostics.uncertainty import calibrate_on
from torchlssvm.linear.discriminant_rule import check_rule
from torchlssvm.linear.locking import Keeper, catch_up, exclusive, give_lock
from torchlssvm.linear.solution import relative_distance
from torchlssvm.linear.solvers import SolverOptions
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.batch import SampleBatch, signed_samples
from torchlssvm.statistics.statistics import ROW_OPTIONS, Integrity


class LinearHead(nn.Module):
    """Base class of linear heads on features, whose samples can be added, removed and corrected exactly.

    A head keeps the statistics of its samples, which it changes exactly, and computes the weights from them when you read
    them. You can use a head from several threads, because a lock runs its methods one at a time.

    Attributes:
        statistics: the sums of the current samples.
    """

    _lock: Any  # a threading.RLock, which has no type of its own
    _keeper: Keeper | None = None
    """The store that the head belongs to. It brings the head up to date before the head is used."""
    _keeps_rows = False
    _rho_method = "gcv"  # by which rho is chosen where no number is given
    _rho_candidates: int | None = None  # values that are compared; None: powers of two
    uncertifiable: str | None = None
    unchecked: str | None = None
    rule: str = "least_squares"
    multiclass: str = "ovr"
    """One class against the rest, "ovr", or against each other one, "ovo"."""

    _buffer_names: tuple[str, ...] = ("w", "b")
    _saved_names: tuple[str, ...] = ()
    """Tensors of a checkpoint beside buffers and options, and those that may be missing."""
    _optional_names: tuple[str, ...] = ()

    def __init__(self, statistics: Statistics, rho: Any, intercept: str, class_weight: str | Tensor | None):
        super().__init__()
        give_lock(self)
        checks.one_of(intercept, "intercept", ("free", "penalized", "none"))
        number = self._rho_number(rho)
        self.statistics = statistics
        self._options = SolverOptions(1.0 if number is None else number, intercept, class_weight)
        self._solver: Any = None  # made by the subclass
        self._choices = DataChoices.for_rho(self._rho_method if number is None else None)
        self._state_version = 0
        self._integrity = Integrity()
        self._solving = False  # set while caches are computed, so that interrupted work is done again
        self._published: tuple[Tensor, Tensor] | None = None  # w and b now, for readers without the lock
        self._give_buffers(dict.fromkeys(self._buffer_names))

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def in_features(self) -> int:
        """J, the number of features."""
        return self.statistics.in_features

    @property
    def num_classes(self) -> int:
        """K, the number of classes or targets."""
        return self.statistics.num_classes

    @property
    def device(self) -> torch.device:
        """Device of the state."""
        return self.statistics.device

    @property
    def intercept(self) -> str:
        """How the intercept is treated: "free", "penalized" or "none"."""
        return self._options.intercept

    @property
    def targets(self) -> str:
        """What the head predicts: "classes", "multilabel" (several labels for each sample) or "regression" (numbers)."""
        return self.statistics.targets or "classes"

    @property
    def normalize(self) -> str | None:
        """How each row is normalized before it is rounded to the grid: None, "l2" or "sqrt"."""
        return self.statistics.normalize

    @property
    def scale(self) -> str | None:
        """How features are scaled at each solve: None for no scaling, "std" for standardization."""
        return self.statistics.scale

    @property
    def grid(self) -> FixedPoint | None:
        """The grid in use; None if the head has no grid, or if ``"auto"`` has seen no data yet."""
        return self.statistics.grid

    @property
    def counts(self) -> Tensor:
        """Number of samples per class (K,)."""
        catch_up(self)
        return self.statistics.counts.clone()

    @property
    def n(self) -> int | float:
        """Total weight of the current samples: the number of samples, unless weights were given."""
        catch_up(self)
        return self.statistics.n

    @property
    def rho(self) -> float:
        """The regularization. After you set rho, the next read of the weights solves for them.

        Set rho to ``"gcv"``, or to None for a margin head, to have the value chosen from the samples from then on.
        """
        if self._choices.rho_is_open and not self.statistics.empty:
            self._solve()
        return self._options.rho

    @rho.setter
    @exclusive
    def rho(self, value: float | str | None) -> None:
        number = self._rho_number(value)
        if number is None:
            self._choices.record("rho", self._rho_method, rule=True, state=ChoiceState.OPEN)
            self._published = None
            return
        with self._changing(same_samples=True):
            self._solver.set_rho(number)
            self._choices.made.pop("rho", None)
            self._choices.outdate_calibration()

    @property
    def class_weight(self) -> str | Tensor | None:
        """A copy of the class weights. You can set them at any time if the head keeps sums per class."""
        weight = self._options.class_weight
        return weight.clone() if isinstance(weight, Tensor) else weight

    @class_weight.setter
    @exclusive
    def class_weight(self, value: str | Tensor | None) -> None:
        weight = check_class_weight(value, self.num_classes, self.device)
        if self.targets != "classes":
            refuse_for_targets(self.targets, weight)
        if weight is not None and not self.statistics.per_class:
            raise ValueError("class_weight needs sums per class: build the head with per_class=True")
        with self._changing():
            self._options.class_weight = weight
            self._solve_afresh()

    @property
    def weight(self) -> Tensor:
        """A copy of w with the layout (K, J) of nn.Linear."""
        return self._solve()[0].mT.clone()

    @property
    def bias(self) -> Tensor:
        """A copy of b (K,), as in nn.Linear."""
        return self._solve()[1].clone()

    def _drop_membership(self, reason: str = "its row hashes were dropped") -> Self:
        """Forget the hashes of the rows, e.g. where a store has the rows themselves; a margin head has none."""
        del reason
        return self

    def _trusted_removals(self) -> AbstractContextManager[None]:
        """A context for a caller, such as a store, that has the rows and guarantees that all rows it removes are held.

        Without this guarantee and without row hashes every removal would be tested by a solve.
        """
        return nullcontext()

    @property
    def choices(self) -> dict[str, Choice]:
        """Choices made from data, such as rho or a calibration, and whether each was made for the current samples."""
        return self._choices.listed(self.rho)

    @property
    def calibration(self) -> Calibration | None:
        """The map from scores to probabilities; None unless it was fitted on the current samples."""
        return self._choices.calibration

    def config(self) -> dict[str, Any]:
        """Return the options as primitives, with the rho in use. Pass them to ``from_config`` to create an empty head."""
        stats, weight = self.statistics, self._options.class_weight
        return {
            "in_features": self.in_features,
            "num_classes": self.num_classes,
            "rho": self._options.rho,
            "intercept": self._options.intercept,
            "class_weight": weight.tolist() if isinstance(weight, Tensor) else weight,
            "grid": grid_to_json(stats.requested.grid) or "auto" if stats.exact else None,
            "per_class": stats.per_class,
        } | self._row_options()

    @classmethod
    def from_config(cls, config: dict[str, Any], device: torch.device | str | None = None) -> Self:
        """Create an empty head from the options that ``config()`` of another head returned."""
        options: dict[str, Any] = checkpoint.arguments(config) | {"device": device}
        return cls(**options)

    def _row_options(self) -> dict[str, str]:
        """Options ``normalize``, ``scale`` and ``targets``, where they are used."""
        values = {name: getattr(self.statistics, name) for name in ROW_OPTIONS}
        return {name: value for name, value in values.items() if value is not None}

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, K)
        """Return the scores x @ w + b (B, K) in float64, differentiable in x."""
        catch_up(self)
        w, b = self._published or self._fitted_weights()  # one read: another thread may be changing the head
        x = checks.scored_features(x, self.in_features, self.device, sparse=not self._keeps_rows)
        return (x if self.normalize is None else normalized(x, self.normalize, torch.sqrt)) @ w + b

    def predict(self, x: Tensor, thresholds: Any = None) -> Tensor:  # (B, J) -> (B,) or (B, K)
        """Return the class with the highest score for each row (B,). Raises ValueError if a row contains NaN or inf.

        With ``targets="multilabel"``, returns booleans (B, K): True where the score of a label is above the threshold. With
        ``targets="regression"``, returns numbers (B, K), or (B,) if K = 1, as scikit-learn does.

        Args:
            x: (B, J) features.
            thresholds: one number, or one number per label (K,), for ``"multilabel"``. Default: 0, halfway between the targets
                -1 and +1. Use :func:`~torchlssvm.functional.several_targets.f1_thresholds` to choose thresholds from
                leave-one-out scores. The head does not keep thresholds, so choose them again after removals.
        """
        return predictions(self, checks.finite_scores(self(x)), thresholds)

    def predict_proba(self, x: Tensor, calibrated: bool = True) -> Tensor:  # (B, J) -> (B, K)
        """Return probabilities (B, K), calibrated by the last call of :meth:`calibrate`.

        ``calibrated=False`` returns (1 + score) / 2, clipped to [0, 1]; with ``rule="lda"``, whose scores are log posteriors,
        it returns their softmax. With ``targets="multilabel"``, each label has a probability, and the probabilities of a row do
        not sum to one.

        Raises NotFittedError before the first :meth:`calibrate`, and after any change of the samples, because a removed sample
        may still affect the calibration. A margin head keeps its samples and calibrates when needed.
        """
        scores = checks.finite_scores(self(x))
        if self.targets == "multilabel":
            return self._choices.probabilities(scores, True) if calibrated else strictly_inside((1.0 + scores) / 2)
        self._require_labels()
        if not calibrated and self.rule == "lda":
            return scores.softmax(1)
        return self._choices.probabilities(scores, calibrated)

    def _require_labels(self) -> None:
        if self.targets != "multilabel" and (self.num_classes < 2 or self.statistics.kind == "values"):
            raise ValueError("probabilities need labels: this head holds float targets")

    @exclusive
    def digest(self) -> str:
        """Return the SHA-256 digest of the statistics, which :meth:`torchlssvm.Statistics.digest` specifies."""
        self._check_whole()
        with threads_for(PASS_WORK * self.in_features**2):
            return self.statistics.digest()

    @exclusive
    def drift(self) -> float:
        """Return the largest relative deviation of the weights in use from those of ``refresh()``. Costs one solve."""
        w = self._solve()[0]
        return relative_distance(w, self._solved_anew()[0]) if self.n else 0.0

    @exclusive
    def refresh(self) -> Self:
        """Solve for the weights, so that they equal those of a new head with the same samples, bit for bit.

        If rho is chosen automatically and samples have changed since the last choice, rho is chosen again first. A head on
        columns that were chosen by ``select`` issues a warning, because it cannot choose among columns that it does not have.
        """
        if self._choices.state_of("columns") is ChoiceState.STALE:
            warnings.warn(
                "the columns of this head were chosen before its samples changed, and it cannot choose them again: change the "
                "samples of the head on all columns and read the selection's head again (found.head)",
                stacklevel=3,
            )
        self._refresh_rho()
        with self._changing(same_samples=True):
            self._solve_afresh()
        self._solve()
        return self

    @exclusive
    def _refresh_rho(self) -> Self:
        """Choose rho again if it has a rule and samples have changed since the last choice."""
        choices = self._choices
        if choices.rho_rule is not None and choices.state_of("rho") is not ChoiceState.CURRENT:
            self._choose_rho()
        return self

    def _set_rule(self, value: str) -> None:
        """Use another rule. Only a least-squares head has rules. Sums and factor stay as they are."""
        with self._changing(same_samples=True):
            self._options.rule = value
            self._choices.outdate_calibration()

    def _forget_choices(self) -> None:
        """Reset a rho and a rule that were chosen for samples that have all been removed. The next samples decide again."""
        if self._choices.rho_rule is not None:
            self._choices.reopen_rho()
            self._options.rho = 1.0
        if "rule" in self._choices.made:
            del self._choices.made["rule"]
            self._options.rule = "auto"

    def _choose_rho(self) -> None:
        """Choose rho by its rule. With too few samples, rho is 1.0 and remains to be chosen. The caller must hold the lock."""
        choices = self._choices
        with all_or_nothing(choices):
            # rho must not count as open during the choice, because reading the weights would choose it again.
            choices.record("rho", self._rho_method, self._rho_candidates, rule=True, state=ChoiceState.STALE)
            value = self._best_rho()
        rho = 1.0 if value is None else value
        if rho != self._options.rho:
            with self._changing(same_samples=True):
                self._solver.set_rho(rho)
                choices.outdate_calibration()
        state = ChoiceState.OPEN if value is None else ChoiceState.CURRENT
        choices.record("rho", self._rho_method, self._rho_candidates, rule=True, state=state)

    @exclusive
    def influence(
        self, x: Any, y: Any, x_val: Any, y_val: Any = None, what: str = "remove", on: str | Measure = "loss", *,
        y_new: Any = None, weight: Any = None, groups: Any = None,
    ) -> Tensor:  # fmt: skip
        """Compute how predictions at ``x_val`` would change if each sample, or group, were removed, added or relabelled.

        The changes are exact; nothing is refitted. With ``on="loss"`` and ``what="remove"``, a positive value means that the
        loss would rise without the sample, so the sample is helpful. With ``scale="std"``, the scale stays that of all samples
        held. Memory does not grow with B times V, except with ``on="scores"``.

        Args:
            x: samples (B, J) of the head, as added. For ``what="add"``, samples that the head does not have.
            y: (B,) labels or (B, K) targets of these samples.
            x_val: (V, J), the points at which the change is measured.
            y_val: (V,) labels or (V, K) targets of these points. Required for ``"loss"`` and ``"accuracy"``.
            what: ``"remove"``, ``"add"`` or ``"relabel"``.
            on: what to measure. ``"loss"`` (mean squared error, or squared hinge for a margin head) and ``"accuracy"`` return
                (B,). ``"scores"`` returns (B, V, K). A function from scores (b, V, K) to one number per change (b,) is also
                accepted.
            y_new: (B,) new labels. Required for ``"relabel"``.
            weight: (B,), as added.
            groups: (B,) group of each sample. The samples of a group change together, and the result has one entry per group,
                in order of first appearance.

        >>> import torch
        >>> from torchlssvm import LSSVMHead
        >>> x, y = torch.randn(50, 4), torch.arange(50) % 2
        >>> head = LSSVMHead(4, 2).add(x, y)
        >>> head.influence(x, y, x[:10], y[:10]).shape, head.influence(x, y, x[:10], on="scores").shape
        (torch.Size([50]), torch.Size([50, 10, 2]))
        """
        return self._influence(x, y, x_val, y_val, what, on, y_new, weight, groups)

    @exclusive
    def most_influential(
        self, x: Any, y: Any, x_val: Any, y_val: Any, count: int = 10, what: str = "remove", on: str = "loss", *,
        ids: Any = None, y_new: Any = None, weight: Any = None, groups: Any = None,
    ) -> Influential:  # fmt: skip
        """Find the ``count`` most helpful and the ``count`` most harmful samples, or groups, by their influence at ``x_val``.

        Pass ``ids`` (B,) to get the ids of these samples too. The other arguments are those of :meth:`influence`.

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
        check_ranking(what, on, count)
        names = names_of(ids, groups, len(x))
        change = self.influence(x, y, x_val, y_val, what, on, y_new=y_new, weight=weight, groups=groups)
        return rank(change, what, on, count, names)

    @exclusive
    def calibrate(self, x: Any, y: Any, method: str | None = None, *, weight: Any = None, groups: Any = None) -> Self:
        """Fit probabilities to leave-one-out scores, so that you need no held-out data. Returns self.

        Args:
            x: (n, J), as added.
            y: (n,), as added.
            weight: (n,), as added.
            method: ``"temperature"`` (default for three or more classes), ``"platt"`` (default for two classes and for
                ``targets="multilabel"``, which does not support ``"temperature"``) or ``"isotonic"``. A temperature keeps the
                order of the scores. With the other methods, the most probable class may differ from the class that ``predict``
                returns, because ``predict`` always uses the scores.
            groups: (n,) group of each sample, e.g. the user. The fit then uses leave-group-out scores.

        >>> import torch
        >>> from torchlssvm import LSSVMHead
        >>> x, y = torch.randn(50, 4), torch.arange(50) % 2
        >>> head = LSSVMHead(4, 2).add(x, y).calibrate(x, y)
        >>> bool(torch.allclose(head.predict_proba(x).sum(1), torch.ones(50, dtype=torch.float64)))
        True
        """
        self._require_labels()
        scores = self.leave_one_out(x, y, weight, groups)
        calibrate_on(self, scores, y, method, weight=weight, grouped=groups is not None)
        return self

    # -- changing ------------------------------------------------------------------------------------------------------

    @exclusive
    def add(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> Self:
        """Learn samples.

        Args:
            x: (B, J) features. A least-squares head also accepts sparse scipy and torch matrices, without making them dense.
            y: (B,) labels; (B, K) booleans or zeros and ones for ``targets="multilabel"``; or (B, K) float targets. A margin
                head accepts labels only.
            weight: (B,) weights of the samples, which must be integers if the head has a grid.
            ids: (B,) ids of the samples. Required if the head has folds.
        """
        return self._apply_changes([(self._check(x, y, weight, ids), 1)])

    @exclusive
    def remove(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> Self:
        """Unlearn samples. Pass exactly the arguments with which the samples were added, bit for bit."""
        return self._apply_changes([(self._check(x, y, weight, ids), -1)])

    @exclusive
    def update(self, add: tuple[Any, ...] | None = None, remove: tuple[Any, ...] | None = None) -> Self:
        """Add and remove samples in one step (Theorem 1). Pass each argument as (x, y) or (x, y, weight, ids)."""
        changes: list[tuple[SampleBatch, int]] = []
        for samples, sign in signed_samples(add, remove):
            x, y, weight, ids = (*samples, None, None)[:4]
            like = changes[0][0] if changes else None
            changes.append((self._check(x, y, weight, ids, like), sign))
        return self._apply_changes(changes)

    @exclusive
    def replace(self, x_old: Any, y_old: Any, x_new: Any, y_new: Any, ids_old: Any = None, ids_new: Any = None) -> Self:
        """Replace samples with others. Pass ``ids`` if the head has folds."""
        return self.update(add=(x_new, y_new, None, ids_new), remove=(x_old, y_old, None, ids_old))

    def _refuse_in_store(self, what: str) -> None:
        """Raise StoreError if the head belongs to a store, which would not know of a change to the head alone."""
        if self._keeper is not None:
            raise StoreError(f"this head belongs to a store, which must {what} instead. Nothing was changed.")

    def merge(self, other: Self) -> Self:
        """Add everything the other head has learned. Both heads must have the same shapes and the same grid."""
        return self._merge(other, 1)

    def __iadd__(self, other: Self) -> Self:
        """Add everything the other head has learned, as :meth:`merge`."""
        return self._merge(other, 1)

    def __isub__(self, other: Self) -> Self:
        """Remove everything the other head has learned."""
        return self._merge(other, -1)

    @exactly
    def _merge(self, other: Self, sign: int) -> Self:
        self._refuse_in_store("hold the samples themselves: add them by store.apply(Add(...))")
        alike = isinstance(other, type(self)) or isinstance(self, type(other))
        if not (isinstance(other, LinearHead) and alike):
            raise ValueError(f"can only merge with another {type(self).__name__}, got {type(other).__name__}")
        if self.intercept != other.intercept or self.multiclass != other.multiclass:
            raise ValueError(
                f"cannot merge heads: intercept {self.intercept!r}, multiclass {self.multiclass!r} here and "
                f"{other.intercept!r}, {other.multiclass!r} there"
            )
        catch_up(other)
        first, second = sorted([self, other], key=id)  # lock in the same order in all threads, to avoid a deadlock
        with first._lock, second._lock:
            other._check_whole()
            self._check_whole()
            self._merge_samples(other, sign)
        return self

    @exclusive
    def add_classes(self, k: int) -> Self:
        """Add k classes. The current samples become negative examples of the new classes, or get the float target 0.

        With ``targets="multilabel"``, adds k labels, which none of the current samples has.
        """
        self._refuse_in_store("record new classes: call store.add_classes([...])")
        if isinstance(self._options.class_weight, Tensor):
            raise ValueError("class_weight is a tensor (K,): set it to None first, then to one for the new classes")
        grown, make_room = self.statistics.with_classes(k), self._room_for(k)
        with self._changing():
            self.statistics.take_over(grown)
            make_room()
        return self

    def clear(self) -> None:
        """Forget all samples, so that the head equals a new one."""
        self._adopt(None)

    # -- what the subclasses do ----------------------------------------------------------------------------------------

    def _rho_number(self, value: Any) -> float | None:
        """A number > 0; None if rho is to be chosen from the samples."""
        raise NotImplementedError

    def _best_rho(self) -> float | None:
        """The rho that the rule finds; None if there are too few samples."""
        raise NotImplementedError

    def leave_one_out(self, x: Any, y: Any, weight: Any = None, groups: Any = None) -> Tensor:
        """Return leave-one-out scores (B, K): each sample is scored by a head that never saw it."""
        raise NotImplementedError

    def _influence(self, *arguments: Any, **more: Any) -> Tensor:
        """As :meth:`influence`, with all arguments."""
        raise NotImplementedError

    def select_rho(self, rhos: Any = None, *, apply: bool = True) -> RhoPath:
        """Choose rho among values > 0, and apply it unless ``apply`` is False."""
        raise NotImplementedError

    def _solved_anew(self) -> tuple[Tensor, ...]:
        """w and b as computed by a solve from the beginning. The weights in use do not change."""
        raise NotImplementedError

    def _check(
        self, x: Any, y: Any, weight: Any = None, ids: Any = None, like: SampleBatch | Statistics | None = None
    ) -> SampleBatch:
        """A checked batch, for :meth:`_apply_changes`. ``like``: a batch applied with it, whose choices come first."""
        raise NotImplementedError

    def _apply_changes(self, changes: list[tuple[SampleBatch, int]]) -> Self:
        """Change the state by checked batches, all or none."""
        raise NotImplementedError

    def _merge_samples(self, other: Self, sign: int) -> None:
        """Add (+1) or remove (-1) the samples of another head with the same options. The caller must hold both locks."""
        raise NotImplementedError

    def _solve_afresh(self) -> None:
        """Make the next read solve from the samples, without using the last solution."""
        raise NotImplementedError

    def _drop_unfinished(self) -> None:
        """Drop caches that an interruption left unfinished."""
        raise NotImplementedError

    def _room_for(self, k: int) -> Callable[[], None]:
        """Build what else k more classes need, and return a function that puts it into this head."""
        raise NotImplementedError

    def _sample_state(self) -> dict[str, Tensor]:
        """All that the head holds of its samples, for :meth:`_adopt`."""
        raise NotImplementedError

    def _adopt(self, state: dict[str, Tensor] | None) -> None:
        """Replace the current samples by those of a :meth:`_sample_state`; None empties the head."""
        raise NotImplementedError

    def _derived(self) -> dict[str, Tensor]:
        """The values in use that are derived from samples and options."""
        raise NotImplementedError

    def _saved_parts(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """JSON fields and tensors of a checkpoint."""
        raise NotImplementedError

    def _loaded_parts(
        self, state: dict[str, Tensor], meta: dict[str, Any], options: SolverOptions
    ) -> Callable[[], None]:
        """Build the parts of a saved head separately, and return a function that puts them into this head."""
        raise NotImplementedError

    def _move(self, device: torch.device, options: SolverOptions) -> None:
        """Move everything to another device, or nothing if that fails, since all parts are built there first."""
        raise NotImplementedError

    # -- parts, for the store, checkpoints and exchange ----------------------------------------------------------------

    @exclusive
    def _derived_anew(self) -> dict[str, Tensor]:
        """What a new head with the same options derives from the same samples."""
        fresh = type(self).from_config(self.config(), device=self.device)
        fresh._adopt(self._sample_state())
        return fresh._derived()

    def _snapshot(self) -> dict[str, Tensor]:
        """State from which :meth:`_resume` is fast."""
        return self._sample_state()

    def _resume(self, state: dict[str, Tensor]) -> None:
        """Restore a :meth:`_snapshot`; ValueError when it does not fit."""
        self._adopt(state)

    def _replace_parts(self, **parts: Any) -> None:
        """Replace attributes by parts that were built separately, including anything left by an interruption."""
        with self._lock:
            self._integrity = Integrity()
            with self._integrity:
                self.__dict__.update(parts)
                self._options, self._published, self._solving = self._solver.options, None, False
                self._state_version += 1

    # -- consistency ---------------------------------------------------------------------------------------------------

    def _check_whole(self) -> None:
        """Raise InterruptedUpdateError if a change was interrupted."""
        for integrity in (self._integrity, self.statistics.integrity):
            if integrity.torn:
                integrity.check()

    @property
    def _torn(self) -> bool:
        """True if a change was interrupted. A change that another thread is making is awaited first."""
        with self._lock:
            try:
                self._check_whole()
            except InterruptedUpdateError:
                return True
        return False

    @contextmanager
    def _changing(self, same_samples: bool = False) -> Iterator[None]:
        """A context in which the state changes. Readers wait, and the published weights and the choices made from data expire.

        An interruption in this context is detected later. ``same_samples``: choices made from data stay valid. The caller must
        hold the lock.
        """
        self._check_whole()
        with self._integrity:
            self._published, self._solving = None, True
            yield
            self._state_version += 1
            if not same_samples and self._choices.made:
                self._choices.outdate()
            self._solving = False

    def _solve(self, inverse: bool = False) -> tuple[Tensor, ...]:
        """Bring w, b and, if asked for, P up to date, and return them."""
        catch_up(self)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._check_whole()
            if self._solving:
                self._drop_unfinished()
            if self._choices.rho_is_open and not self.statistics.empty:
                self._choose_rho()
            self._published, self._solving = None, True
            more = (self._solver.inverse(),) if inverse else ()
            w, b = self._solver.weights()
            self._solving = False
            self._published = None if self.statistics.empty else (w, b)
            return w, b, *more

    def _fitted_weights(self) -> tuple[Tensor, Tensor]:
        """w and b, up to date; NotFittedError without samples."""
        with self._lock:
            self._solve()
            if self._published is None:
                raise NotFittedError("the head holds no samples: call add(x, y) first")
            return self._published

    # -- nn.Module -----------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device with the module; the dtype stays float64 whatever ``.half()`` asks for."""
        del recurse
        device = device_after(fn, self.device)
        if device == self.device:
            return self
        if device.type == "meta":
            raise RuntimeError(
                "a head cannot move to the meta device: tensors there hold no data, and its samples would be lost"
            )
        catch_up(self)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            rho, weight = self.rho, self.class_weight
            weight = weight.to(device) if isinstance(weight, Tensor) else weight
            self._move(device, dataclasses.replace(self._options, rho=rho, class_weight=weight))
            self._give_buffers(dict.fromkeys(self._buffer_names))
        return self

    def _give_buffers(self, kept: dict[str, Any]) -> None:
        object.__setattr__(self, "_buffers", checkpoint.LiveBuffers(kept, self._refresh_buffers))

    @exclusive
    def _refresh_buffers(self, names: Iterable[str]) -> None:
        """Publish current values. Equal values are not written again, except on a device, since comparing would wait."""
        for name in [n for n in names if n in self._buffer_names]:
            old, value = dict.get(self._buffers, name), self._buffer_value(name)
            if old is None or old.shape != value.shape or old.device != value.device:
                self._buffers[name] = value.clone()
            elif old.device.type != "cpu" or checks.is_fake(value) or not torch.equal(old, value):
                old.copy_(value)

    def _buffer_value(self, name: str) -> Tensor:
        """The value of a buffer, up to date."""
        return self._solve()[0 if name == "w" else 1]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        catch_up(self)
        with self._lock:  # weights and sums of one state
            super()._save_to_state_dict(destination, prefix, keep_vars)
            if not keep_vars:  # a snapshot, as all the rest is: the buffers themselves are written in place later
                destination.update({prefix + k: destination[prefix + k].clone() for k in self._buffer_names})
            destination.update({prefix + k: v for k, v in self._saved().items()})

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        problems = self._load(checkpoint.part(state_dict, prefix))
        problems.tell(prefix, strict, missing_keys, unexpected_keys, error_msgs)

    def _saved(self) -> dict[str, Tensor]:
        """State beside the buffers: the statistics or the rows, the solution's own coordinates, options and choices."""
        with torch.inference_mode(False), torch.no_grad():
            meta, out = self._saved_parts()
            weight, calibration = self.class_weight, self._choices.calibration
            meta |= {
                "format": checkpoint.FORMAT,
                "type": type(self).__name__,
                "rho": self.rho,
                "intercept": self.intercept,
                "rule": self._options.rule,
                "class_weight": weight.tolist() if isinstance(weight, Tensor) else weight,
                "made": self._choices.to_json(),
            } | self._row_options()
            if calibration is not None:
                meta["calibration"], out["calibration"] = calibration.describe(), calibration.values.clone()
            meta["checksum"] = checkpoint.checksum(out | {"options": checkpoint.pack(meta)})
            return out | {"options": checkpoint.pack(meta)}

    def _load(self, state: dict[str, Tensor]) -> checkpoint.LoadProblems:
        """Load the state that :meth:`_saved` and the buffers wrote. If there is a problem, nothing is changed.

        Raises VerificationError for a damaged state, whose tensors or statistics do not match the saved checksum or digest.
        """
        needed = (*self._buffer_names, "options", *self._saved_names)
        known = [*needed, *self._optional_names, "calibration"]
        problems = checkpoint.LoadProblems(
            [k for k in needed if k not in state], [k for k in state if k not in known], []
        )
        if problems.missing:
            return problems
        with torch.inference_mode(False), torch.no_grad():
            try:
                meta = checkpoint.load_meta(state["options"])
                self._check_meta(meta)
                checkpoint.check_tensors(state, known, meta)
                calibration = None
                if "calibration" in meta:
                    values = checkpoint.moved(state["calibration"], self.device)
                    calibration = Calibration.restore(meta["calibration"], values)
                options = self._loaded_options(meta)
                choices = DataChoices.from_json(meta.get("made", {}), calibration)
                install = self._loaded_parts(state, meta, options)
                with self._lock:
                    install()
                    self._choices = choices
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problems.errors.append(f"{type(self).__name__}: {error}")
        return problems

    def _loaded_options(self, meta: dict[str, Any]) -> SolverOptions:
        """Options of a saved head. Raises ValueError for any that this head could not be made with."""
        weight = check_class_weight(meta["class_weight"], self.num_classes, self.device)
        rule = check_rule(meta["rule"], self.multiclass, self.intercept)
        if self.targets != "classes":
            refuse_for_targets(self.targets, weight, rule=rule)
        if weight is not None and not self.statistics.per_class:
            raise ValueError("class_weight in the saved head needs sums per class, and per_class is False")
        return SolverOptions(checks.positive(meta["rho"], "rho"), self.intercept, weight, rule)

    def _check_meta(self, meta: dict[str, Any]) -> None:
        """Raise ValueError if a saved head differs in an option that cannot change."""
        if meta["type"] != type(self).__name__:
            raise ValueError(f"the saved head is a {meta['type']}")
        mine = {name: getattr(self, name) for name in ("intercept", "multiclass")}
        mine |= {name: getattr(self.statistics, name) for name in ROW_OPTIONS}
        for name, value in mine.items():
            saved = meta.get(name, "ovr" if name == "multiclass" else None)
            if saved != value:
                raise ValueError(f"{name} is {saved!r} in the saved head and {value!r} here")

    @exclusive
    def _state_and_parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """State for pickling and copying, and copies of the parts, which belong to one moment and to no other thread.

        The state does not contain the lock, the store, published weights, change count and values of the buffers. The change
        count would reveal that a sample was added and removed. The buffers may be older than the last removal.
        """
        parts = self._copies()
        buffers = {k: None if k in self._buffer_names else dict.__getitem__(self._buffers, k) for k in self._buffers}
        kept = {name: value for name, value in vars(self).items() if name not in {"_lock", "_keeper", *parts}}
        return kept | {"_published": None, "_buffers": buffers, "_state_version": 0}, parts

    def _copies(self) -> dict[str, Any]:
        """Copies of the parts, for pickling and copying. The caller must hold the lock."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling, which other threads do not change."""
        state, parts = self._state_and_parts()
        return state | parts

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy within the process."""
        out = memo[id(self)] = type(self).__new__(type(self))
        state, parts = self._state_and_parts()
        out.__setstate__(copy.deepcopy(state, memo) | parts)
        return out

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled head outside of inference mode, because tensors made in that mode could not be changed later."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                state = copy.deepcopy(state)
        buffers = state.pop("_buffers")
        self.__dict__.update(state)
        give_lock(self)
        self._give_buffers(buffers)

    def extra_repr(self) -> str:
        """Shape, options and count."""
        shape = f"in_features={self.in_features}, num_classes={self.num_classes}"
        pairs = {"multiclass": self.multiclass} if self.multiclass != "ovr" else {}
        more = "".join(f", {name}={value!r}" for name, value in (pairs | self._row_options()).items())
        return f"{shape}, n={self.n:g}, rho={self._options.rho:g}, intercept={self.intercept!r}{more}"


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


def targets_of(head: Any) -> str:
    """What a head predicts: "multilabel" or "regression" if it is a linear head with this option, otherwise "classes"."""
    return head.targets if isinstance(head, LinearHead) else "classes"


def predictions(head: LinearHead, scores: Tensor, thresholds: Any = None) -> Tensor:
    """Return what ``predict`` returns for inputs with these scores (B, K)."""
    if head.targets == "multilabel":
        return scores > checks.thresholds(thresholds, head.num_classes, scores.device)
    if thresholds is not None:
        raise ValueError(f'thresholds are for targets="multilabel", this head has targets={head.targets!r}')
    if head.targets == "regression":
        return scores[:, 0] if head.num_classes == 1 else scores
    if head.statistics.kind == "values":
        raise ValueError(
            'this head has learned float targets (B, K), not classes: create it with targets="multilabel" for several '
            'labels for each sample, or targets="regression" for numbers. If your targets encode classes, use '
            "head(x).argmax(1)"
        )
    return scores.argmax(1)


def refuse_for_targets(targets: str, weight: Any = None, multiclass: str = "ovr", rule: str = "least_squares") -> None:
    """Raise ValueError for an option that needs one class for each sample."""
    if weight is not None and targets != "multilabel":
        raise ValueError(f"class_weight needs classes or labels; with targets={targets!r}, pass sample weights to add")
    for name, value in (("multiclass", multiclass), ("rule", rule)):
        if value in ("ovo", "lda"):
            raise ValueError(f'{name}={value!r} needs targets="classes", one class for each sample; got {targets!r}')
