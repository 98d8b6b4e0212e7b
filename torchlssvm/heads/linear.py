"""``LSSVMHead``: a least-squares SVM on features, whose data can be added, removed and corrected exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchlssvm.errors import NotFittedError
from torchlssvm.functional import checks
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.functional.modes import exactly
from torchlssvm.heads import persistence
from torchlssvm.heads.compact import Compact
from torchlssvm.heads.engines import Options, Pairwise, engine_for, votes
from torchlssvm.heads.solution import NotPositiveDefinite
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.batch import Batch, Choices, check_batch


class LSSVMHead(nn.Module):
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

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        rho: float = 1.0,
        intercept: str = "free",
        class_weight: str | Tensor | None = None,
        multiclass: str = "ovr",
        grid: FixedPoint | str | None = "auto",
        target_grid: FixedPoint | str | None = "auto",
        statistics: bool = True,
        per_class: bool | None = None,
        folds: int = 0,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        checks.one_of(intercept, "intercept", ("free", "penalized", "none"))
        checks.one_of(multiclass, "multiclass", ("ovr", "ovo"))
        device = torch.empty(0, device=device).device
        weight = _class_weight(class_weight, num_classes, device)
        needs_classes = weight is not None or multiclass == "ovo"
        if per_class is False and needs_classes and statistics:
            raise ValueError(
                "per_class=False does not go with class_weight or multiclass='ovo', which need sums per class"
            )
        self._options = Options(checks.positive(rho, "rho"), intercept, weight)
        self._multiclass = multiclass
        # The arguments are checked by Statistics, in either form.
        sums = Statistics(
            in_features, num_classes, grid=grid, target_grid=target_grid, folds=folds, device=device,
            per_class=needs_classes if per_class is None else per_class,
        )  # fmt: skip
        if not statistics:
            for name, on in (
                ("class_weight='balanced' or 'complement'", self._options.follows_counts),
                ("multiclass='ovo'", multiclass == "ovo"),
                ("per_class", bool(per_class)),
                ("folds", folds > 0),
            ):
                if on:
                    raise ValueError(f"{name} needs statistics=True: the compact form keeps only w and P")
        self.statistics: Statistics | None = sums if statistics else None
        self._grid = grid if isinstance(grid, FixedPoint) else None
        self._target_grid = target_grid if isinstance(target_grid, FixedPoint) else None
        self._engine: Any
        if statistics:
            self._engine = engine_for(sums, self._options, multiclass)
        else:
            self._engine = Compact(in_features, num_classes, self._options, device)
        self._in_features, self._num_classes = in_features, num_classes
        self._unverified = False
        self._version = 0
        persistence.make_live(self)

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def in_features(self) -> int:
        """J."""
        return self._in_features

    @property
    def num_classes(self) -> int:
        """K."""
        return self._num_classes

    @property
    def device(self) -> torch.device:
        """Where the state lives."""
        return self._engine.device if self.statistics is None else self.statistics.device

    @property
    def intercept(self) -> str:
        """How the constant is treated: "free", "penalized" or "none"."""
        return self._options.intercept

    @property
    def multiclass(self) -> str:
        """One class against the rest, "ovr", or against each other one, "ovo"."""
        return self._multiclass

    @property
    def grid(self) -> FixedPoint | None:
        """The grid in use; None while ``"auto"`` has seen no data, or without a grid."""
        return self._grid if self.statistics is None else self.statistics.grid

    @property
    def counts(self) -> Tensor:
        """Samples per class (K,)."""
        source = self._engine if self.statistics is None else self.statistics
        return source.counts.clone()

    @property
    def n(self) -> int | float:
        """The number of samples held (their total weight)."""
        return self._engine.n if self.statistics is None else self.statistics.n

    @property
    def rho(self) -> float:
        """The regularization; setting it costs one solve at the next read."""
        return self._options.rho

    @rho.setter
    def rho(self, value: float) -> None:
        value = checks.positive(value, "rho")
        self._current()  # what is pending was judged with the old value
        with torch.inference_mode(False), torch.no_grad():
            if self.statistics is None:
                self._engine.set_rho(value)
            else:
                self._options.rho = value
                self._engine.reset()
        self._version += 1

    @property
    def class_weight(self) -> str | Tensor | None:
        """Weights by class; settable at any time when sums are kept per class."""
        return self._options.class_weight

    @class_weight.setter
    def class_weight(self, value: str | Tensor | None) -> None:
        stats = self._need_statistics("changing class_weight")
        weight = _class_weight(value, self.num_classes, self.device)
        if weight is not None and not stats.per_class:
            raise ValueError("class_weight needs sums per class: build the head with per_class=True")
        self._current()
        self._options.class_weight = weight
        self._engine.reset()
        self._version += 1

    @property
    def P(self) -> Tensor:
        """P = I - C = rho A^-1: (J, J), (J+1, J+1) when penalized, (pairs, ...) for ovo. Do not write to it."""
        return self._current(inverse=True)[2]

    @property
    def weight(self) -> Tensor:
        """w as nn.Linear has it, (K, J)."""
        return self._current()[0].mT

    @property
    def bias(self) -> Tensor:
        """b (K,)."""
        return self._current()[1]

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, K)
        """Scores x @ w + b (votes for ovo), float64; differentiable in x."""
        self._fitted()
        usable = isinstance(x, Tensor) and x.device == self.device and not x.is_complex()
        if not usable or x.ndim != 2 or x.shape[1] != self.in_features:
            x = checks.features(x, self.in_features, self.device)  # takes arrays, and says what is wrong with the rest
        w, b, _ = self._current()
        scores = x.to(torch.float64) @ w + b
        return votes(scores, self.num_classes) if self.multiclass == "ovo" else scores

    def predict(self, x: Tensor) -> Tensor:  # (B, J) -> (B,)
        """The class with the highest score."""
        scores: Tensor = self(x)
        return scores.argmax(1)

    def digest(self) -> str:
        """SHA-256 of the statistics: equal exactly when the statistics are. See :mod:`torchlssvm.statistics`."""
        return self._need_statistics("a digest").digest()

    @exactly
    def drift(self) -> float:
        """The largest relative deviation of the weights in use from those solved from statistics. Costs a solve."""
        self._need_statistics("drift")
        w = self._current()[0]
        if self.n == 0:
            return 0.0
        exact = self._engine.exact_weights()
        return float((w - exact).abs().max() / exact.abs().max().clamp(min=torch.finfo(w.dtype).tiny))

    @exactly
    def refresh(self) -> LSSVMHead:
        """Solve from statistics now: weights are then bit for bit those of a fresh head with the same data."""
        self._need_statistics("refresh")
        self._engine.reset()
        self._version += 1
        self._current()
        return self

    # -- changing ------------------------------------------------------------------------------------------------------

    @exactly
    def add(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> LSSVMHead:
        """Learn samples. x: (B, J); y: (B,) labels or (B, K) targets; weight: (B,), integers on a grid; ids: for folds."""
        return self._apply_changes([(self._check(x, y, weight, ids), 1)])

    @exactly
    def remove(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> LSSVMHead:
        """Unlearn samples held: the same arguments, bit for bit, as when they were added."""
        return self._apply_changes([(self._check(x, y, weight, ids), -1)])

    @exactly
    def update(self, add: tuple[Any, ...] | None = None, remove: tuple[Any, ...] | None = None) -> LSSVMHead:
        """Add and remove jointly (Theorem 1). Each argument is (x, y), or (x, y, weight, ids)."""
        changes: list[tuple[Batch, int]] = []
        for name, samples, sign in (("add", add, 1), ("remove", remove, -1)):
            if samples is None:
                continue
            if not isinstance(samples, tuple | list) or not 2 <= len(samples) <= 4:
                raise ValueError(f"{name} must be (x, y), (x, y, weight) or (x, y, weight, ids)")
            weight, ids = (*samples[2:], None, None)[:2]
            like = changes[0][0] if changes else None
            changes.append((self._check(samples[0], samples[1], weight, ids, like), sign))
        return self._apply_changes(changes)

    @exactly
    def relabel(self, x: Any, y_old: Any, y_new: Any, weight: Any = None, ids: Any = None) -> LSSVMHead:
        """Give samples held new labels (or targets): P and C stay as they are, unless weights depend on the label."""
        old = self._check(x, y_old, weight, ids)
        new = self._check(x, y_new, weight, ids)
        stats = self.statistics
        plain = stats is not None and not stats.per_class and not stats.folds and old.labels is not None
        if not len(old):
            return self
        if stats is not None and plain:
            q = stats.relabel(old, new)
            self._engine.relabelled(old, new, q)
        elif stats is None and self._options.class_weight is None:
            self._engine.relabel(old, new)
        else:
            return self._apply_changes([(old, -1), (new, 1)])
        self._version += 1
        return self

    @exactly
    def replace(self, x_old: Any, y_old: Any, x_new: Any, y_new: Any) -> LSSVMHead:
        """Exchange samples held for others."""
        return self.update(add=(x_new, y_new), remove=(x_old, y_old))

    @exactly
    def merge(self, other: LSSVMHead) -> LSSVMHead:
        """Take over everything the other head has learned: same shapes, same grid."""
        return self._merge(other, 1)

    def __iadd__(self, other: LSSVMHead) -> LSSVMHead:
        """Merge."""
        return self.merge(other)

    @exactly
    def __isub__(self, other: LSSVMHead) -> LSSVMHead:
        """Remove everything the other head has learned."""
        return self._merge(other, -1)

    @exactly
    def add_classes(self, k: int) -> LSSVMHead:
        """Make room for k more classes; samples held are negative examples of them (float targets: 0)."""
        stats = self._need_statistics("add_classes")
        if isinstance(self._options.class_weight, Tensor):
            raise ValueError("class_weight is a tensor (K,): set it to None first, then to one for the new classes")
        self._current()
        stats.add_classes(k)
        self._num_classes = stats.num_classes
        return self._restart()

    @exactly
    def forget_class(self, c: int) -> LSSVMHead:
        """Unlearn all samples of one class, without them. The class keeps its number."""
        stats = self._need_statistics("forget_class")
        self._current()
        stats.forget_class(c)
        stats.canonicalize()
        return self._restart()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check(self, x: Any, y: Any, weight: Any = None, ids: Any = None, like: Batch | None = None) -> Batch:
        if self.statistics is not None:
            batch = self.statistics.check(x, y, weight, ids, like)
        else:
            choices = self._engine.choices if like is None or not self._engine.empty else like.choices
            batch = check_batch(
                x, y, weight, ids, J=self.in_features, K=self.num_classes, folds=0, device=self.device,
                exact=self._grid is not None, choices=choices, wanted=Choices(None, self._grid, self._target_grid),
            )  # fmt: skip
        if len(batch) and batch.labels is None and (self._options.class_weight is not None or self.multiclass == "ovo"):
            raise ValueError("class_weight and multiclass='ovo' need labels (B,), got float targets")
        return batch

    def _apply_changes(self, changes: list[tuple[Batch, int]]) -> LSSVMHead:
        changes = [(b, s) for b, s in changes if len(b)]
        if not changes:
            return self
        stats, removes = self.statistics, any(s < 0 for _, s in changes)
        if stats is None:
            self._engine.apply(changes)
        else:
            if removes:
                stats.guard()
            try:
                rows = stats.change(changes, held=True)
            except Exception:
                if removes and not self._unverified:
                    stats.release()
                raise
            self._unverified |= removes
            self._engine.changed(changes, rows)
            if removes and stats.drained:
                self._emptied(stats)
        self._version += 1
        return self

    def _emptied(self, stats: Statistics) -> None:
        """No sample is left: all sums must be zero, else what was removed was not what was held."""
        stats.canonicalize()
        if stats.empty or checks.is_fake(stats.counts):
            self._unverified = False
            self._engine.reset()
        else:
            self._roll_back("no sample would be left, but the sums would not be zero")

    def _roll_back(self, reason: str) -> None:
        assert self.statistics is not None
        self.statistics.restore()
        self._unverified = False
        self._restart()
        error = checks.removal_error(reason)
        error.args = (
            f"{error.args[0]} (The state is that before the first removal since the weights were last read.)",
        )
        raise error from None

    def _merge(self, other: LSSVMHead, sign: int) -> LSSVMHead:
        if not isinstance(other, LSSVMHead):
            raise ValueError(f"can only merge with another LSSVMHead, got {type(other).__name__}")
        mine, theirs = self._need_statistics("merging"), other._need_statistics("merging")
        if self.intercept != other.intercept or self.multiclass != other.multiclass:
            raise ValueError(
                f"cannot merge heads: intercept {self.intercept!r}, multiclass {self.multiclass!r} here and "
                f"{other.intercept!r}, {other.multiclass!r} there"
            )
        mine.compatible(theirs)
        doubtful = sign < 0 or other._unverified
        if doubtful:
            mine.guard()
        try:
            mine.merge(theirs, sign, held=True)
        except Exception:
            if doubtful and not self._unverified:
                mine.release()
            raise
        self._unverified |= doubtful
        if sign < 0 and mine.drained:
            self._emptied(mine)
        return self._restart()

    def _restart(self) -> LSSVMHead:
        self._engine.reset()
        self._version += 1
        return self

    @exactly
    def _current(self, inverse: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """w, b and, if asked for, P: up to date. Verifies pending removals, or rolls them back."""
        try:
            P = self._engine.inverse(self._unverified) if inverse else None
            w, b = self._engine.weights(self._unverified)
        except NotPositiveDefinite:
            self._roll_back("without the samples removed the system would not be positive definite")
            raise
        if self._unverified and self.statistics is not None:
            self.statistics.release()
            self._unverified = False
        return w, b, w if P is None else P

    def _fitted(self) -> None:
        source = self._engine if self.statistics is None else self.statistics
        if source.empty:
            raise NotFittedError("the head holds no samples: call add(x, y) first")

    def _need_statistics(self, what: str) -> Statistics:
        if self.statistics is None:
            raise ValueError(f"{what} needs statistics=True: the compact form keeps only w and P")
        return self.statistics

    # -- nn.Module -----------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LSSVMHead:
        """Move to another device with the module; the dtype stays float64 whatever ``.half()`` asks for."""
        del recurse
        persistence.move(self, fn(torch.empty(0, device=self.device)).device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:  # a snapshot, as all the rest is: the buffers themselves are written in place later
            destination.update({prefix + k: destination[prefix + k].clone() for k in persistence.BUFFERS})
        destination.update({prefix + k: v for k, v in persistence.save(self).items()})

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        mine = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        problems = persistence.load(self, mine)
        missing_keys += [prefix + k for k in problems.missing]
        unexpected_keys += [prefix + k for k in problems.unexpected if strict]
        error_msgs += problems.errors

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: no raw sample is ever in there."""
        return persistence.freeze(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Undo :meth:`__getstate__`."""
        persistence.thaw(self, state)

    def extra_repr(self) -> str:
        """Shape, options and count."""
        form = "" if self.statistics is not None else ", statistics=False"
        pairs = ", multiclass='ovo'" if isinstance(self._engine, Pairwise) else ""
        shape = f"in_features={self.in_features}, num_classes={self.num_classes}"
        return f"{shape}, n={self.n:g}, rho={self.rho:g}, intercept={self.intercept!r}{pairs}{form}"


def _class_weight(value: Any, K: int, device: torch.device) -> str | Tensor | None:
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
