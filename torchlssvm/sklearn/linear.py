"""Estimators on the linear heads."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import type_of_target, unique_labels
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from torchlssvm.analysis.label_errors import LabelErrors, find_label_errors, from_scores
from torchlssvm.errors import NotFittedError, RemovalError
from torchlssvm.functional import checks
from torchlssvm.functional.modes import all_or_nothing
from torchlssvm.linear import LinearHead, LSSVMHead, MarginHead
from torchlssvm.linear.diagnostics.rho_rule import LEAST_SAMPLES
from torchlssvm.linear.discriminant_rule import (
    FEATURES_PER_CLASS,
    LIFTED_FEATURES,
    RULES,
    choose_rule,
    has_open_rule,
    is_masked,
)
from torchlssvm.linear.linear_head import refuse_for_targets
from torchlssvm.sklearn.common import NAME_CLASSES, NUMPY_FLOAT_DTYPES, Array, Classifier
from torchlssvm.sklearn.dual_head import DualHead

AS_LEARNED = "Pass each row as it was learned: behind the steps of a pipeline, it is pipe[:-1].transform(X)."
"""What to do if a row to remove is not held."""

MOST_PAIRED_CLASSES, MOST_PAIRED_FEATURES = 10, 512
"""Up to this many classes and features, the default is one against one. At the limit, this takes 45 solves with 512 features,
about as long as one solve with 1,800 features. The sums of each class have 10 x 513 x 513 numbers in all, 21 MB."""


def choose_multiclass(classes: int, features: int) -> str:
    """Return "ovo" (one against one), which is more accurate, if it is cheap, and otherwise "ovr" (one against the rest)."""
    return "ovo" if 3 <= classes <= MOST_PAIRED_CLASSES and features <= MOST_PAIRED_FEATURES else "ovr"


LEAST_MEAN_WEIGHT = 0.9
"""If the mean of the positive sample weights is below this, ``fit`` warns: GCV takes their sum for the number of samples."""

WIDE_FEATURES = 512
"""Problems with more features than this, and more features than samples, are solved in the dual. With fewer features, sums are
cheap."""


class LinearEstimator(BaseEstimator):
    """The base of the estimators on a linear head."""

    head_: Any  # a linear head, or a DualHead
    _sparse: str | bool = False
    """The sparse formats that are accepted, in scikit-learn's terms."""
    _targets_kind: str = "classes"
    """The option ``targets`` of the head."""
    calibration: str | None = None
    _sums_fractions: bool = True
    """True if grid="auto" means float64 sums when the first sample weights are fractions."""

    @property
    def _calibration_method(self) -> str | None:
        return None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = bool(self._sparse)
        return tags

    if TYPE_CHECKING:

        def _check(self, X: Any, y: Any, reset: bool) -> tuple[Any, Array]:
            """Rows and labels or targets, as scikit-learn checks them."""

        def _start_outputs(self, y: Array, weight: Any) -> int:
            """Learn the classes or targets of the first samples, and return the number of outputs."""

        def _targets(self, y: Array, removes: bool = False) -> Array:
            """Labels or targets as a head takes them."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from scratch and solve. X: (n, J); y: (n,) labels, or targets (n,) or (n, K); sample_weight: (n,)."""
        with all_or_nothing(self):
            X, y = self._check(X, y, True)
            weight = self._check_weight(sample_weight, X)
            if weight is not None and self._uses_gcv() and weight.sum() < LEAST_MEAN_WEIGHT * np.count_nonzero(weight):
                warnings.warn(
                    f"sample_weight has the sum {weight.sum():g} for {np.count_nonzero(weight)} samples, and GCV takes the sum "
                    "for the number of samples: scale the weights to mean 1, or choose rho by leave-one-out (alphas='path', "
                    "selection='loo')",
                    stacklevel=2,
                )
            outputs = self._start_outputs(y, weight)
            self.head_ = self._new_head(X, outputs, weight)
            targets = self._targets(y)
            self._add(X, targets, weight)
            self._judge(X, targets, weight)
            self.head_.weight  # noqa: B018  solved here, so that the first prediction is as fast as the others
            return self

    def _learn_more(self, X: Any, y: Any, classes: Any, sample_weight: Any) -> None:
        """Learn more samples, all or none. classes: for a classifier, all classes that will ever occur."""
        with all_or_nothing(self):
            first = not hasattr(self, "head_")
            X, y = self._check(X, y, first)
            weight = self._check_weight(sample_weight, X)
            if first:
                outputs = self._start_outputs(y if classes is None else classes, None)
                self.head_ = self._new_head(X, outputs, weight)
            elif classes is not None and not np.array_equal(self.classes_, unique_labels(classes)):
                raise ValueError(f"classes={classes!r} is not the same as on the first call: {self.classes_!r}")
            self._add(X, self._targets(y), weight)
            self._judge_sums()

    def partial_unfit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Unlearn samples exactly. If one of them was not learned, raises RemovalError and changes nothing."""
        check_is_fitted(self, "head_")
        X, y = self._check(X, y, False)
        weight = self._check_weight(sample_weight, X)
        self._remove(X, self._targets(y, removes=True), weight)
        self._judge_sums()
        return self

    def _remove(self, X: Any, y: Array, weight: Array | None) -> None:
        """Unlearn checked samples, all or none."""
        try:
            self.head_.remove(self._rows(X), self._here(y), weight=self._tensor(weight))
        except RemovalError as error:
            raise RemovalError(f"{self._explained(error)} {AS_LEARNED}") from error

    def _explained(self, error: RemovalError) -> str:
        """The reason of a refused removal."""
        return str(error)

    def _is_dual(self, X: Any) -> bool:
        """True if there are fewer samples than features and a DualHead supports all options."""
        plain = all(getattr(self, name, None) is None for name in ("normalize", "scale", "device"))
        return (
            plain and bool(self._sparse) and self.intercept in ("free", "none") and getattr(self, "rule", "auto") != "lda"
            and WIDE_FEATURES < X.shape[1] > X.shape[0] and getattr(self, "multiclass", "auto") in ("auto", "ovr")
            and (self._targets_kind != "multilabel" or self._class_weight() is None)
        )  # fmt: skip

    def _new_head(self, X: Any, outputs: int, weight: Array | None) -> Any:
        """Make an empty head for samples like the first ones."""
        fractions = weight is not None and bool(np.any(weight != np.round(weight)))
        grid = None if fractions and self.grid == "auto" and self._sums_fractions else self.grid
        if not self._is_dual(X):
            return self._sum_head(X.shape[1], outputs, grid)
        return DualHead(
            X.shape[1], outputs, targets=self._targets_kind, rho=self.rho if self.alphas is None else 1.0, grid=grid,
            intercept=self.intercept, class_weight=self._class_weight(), calibration=self._calibration_method,
        )  # fmt: skip

    def _sum_head(self, in_features: int, outputs: int, grid: Any) -> LinearHead:
        """Make an empty head that keeps sums."""
        return self._make(LSSVMHead, in_features, outputs, grid, targets=self._targets_kind)

    def _make(
        self, kind: type[LSSVMHead] | type[MarginHead], in_features: int, outputs: int, grid: Any, **options: Any
    ) -> LinearHead:
        return kind(
            in_features, outputs, rho=self.rho if self.alphas is None else 1.0, intercept=self.intercept, grid=grid,
            normalize=self.normalize, scale=self.scale, device=self.device, **options,
        )  # fmt: skip

    def _class_weight(self) -> Any:
        return None

    def _add(self, X: Any, y: Array, weight: Array | None) -> None:
        """Learn checked samples, all or none."""
        dual = self.head_
        if isinstance(dual, DualHead) and len(dual.y) + X.shape[0] > dual.in_features:  # sums are smaller now
            self.head_ = self._sum_head(dual.in_features, dual.num_classes, dual.grid)
            self.head_.add(dual.rows * dual.unit, self._here(dual.y), weight=self._tensor(dual.weights))
        self.head_.add(self._rows(X), self._here(y), weight=self._tensor(weight))

    def _here(self, values: Array) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(values), device=self.head_.device)

    def _tensor(self, weight: Array | None) -> Tensor | None:
        return None if weight is None else self._here(weight)

    def _rows(self, X: Any) -> Any:
        """Return rows in the form that the head accepts. A sparse matrix does not change."""
        return self._here(X) if isinstance(X, np.ndarray) else X

    def _all_rows(self, X: Any) -> Any:
        """Return rows in the form that leave-one-out accepts: dense, except for a DualHead."""
        return self._rows(X if isinstance(self.head_, DualHead) else dense_rows(X))

    def _check_weight(self, sample_weight: Any, X: Any) -> Array | None:
        if sample_weight is None:
            return None
        weight: Array = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        return weight

    @property
    def alpha_(self) -> float:
        """The regularization in use: rho as given, or as chosen from the data."""
        return float(self.head_.rho)

    def _uses_gcv(self) -> bool:
        return bool(self.rho == "gcv" if self.alphas is None else self.selection == "gcv")

    def _candidates(self) -> Any:
        """Values of ``alphas``; None for a path."""
        if isinstance(self.alphas, str) and self.alphas != "path":
            raise ValueError(f"alphas must be None, 'path' or a list of values > 0, got {self.alphas!r}")
        return None if isinstance(self.alphas, str) else self.alphas

    def _judge(self, X: Any, y: Array, weight: Array | None) -> None:
        """Choose rho among ``alphas`` and the rule, and compute a calibration, as the options say."""
        values, head = self._candidates(), self.head_
        calibrates = self.calibration is not None and not head._keeps_rows  # heads with rows calibrate when asked
        open_rule = isinstance(head, LSSVMHead) and has_open_rule(head)
        if self.alphas is None and not calibrates and not open_rule:
            return
        kept = slice(None) if weight is None else weight > 0
        rows, targets = self._all_rows(X[kept]), self._here(y[kept])
        weights = None if weight is None else self._here(weight[kept])
        if self.alphas is not None:
            needs_samples = self.selection != "gcv" and not head._keeps_rows
            samples: dict[str, Any] = {"x": rows, "y": targets, "weight": weights} if needs_samples else {}
            self.path_ = head.select_rho(values, self.selection, **samples)
        if open_rule:
            choose_rule(head, lambda: [(rows, targets, weights)])
        if calibrates:
            head.calibrate(rows, targets, self._calibration_method, weight=weights)

    def _judge_sums(self) -> None:
        """Choose rho again after a change of samples if the sums are enough for it. Otherwise keep the value that fit chose."""
        head, dual = self.head_, isinstance(self.head_, DualHead)
        if not dual:
            head._choices.reopen_rho()  # with rho="gcv": chosen when it is next read
        if self.alphas is None:
            return
        values = self._candidates()
        if dual or self.selection == "gcv" or head._keeps_rows:
            if head.n >= LEAST_SAMPLES:
                self.path_ = head.select_rho(values, self.selection)
        elif not hasattr(self, "path_"):
            warnings.warn(
                "partial_fit does not choose among alphas by leave-one-out, which needs all samples at once: rho is 1. "
                "selection='gcv' chooses from the sums, and so does rho='gcv' with alphas=None",
                stacklevel=4,
            )

    @property
    def coef_(self) -> Array:
        """The weights in the layout of scikit-learn: (K, J), or (J,) or (1, J) for one output."""
        weight: Array = self.head_.weight.cpu().numpy()
        return weight[self._shown()]

    @property
    def intercept_(self) -> Any:
        """The intercepts, in the order of ``coef_``."""
        return self.head_.bias.cpu().numpy()[self._shown()]

    if TYPE_CHECKING:

        def _shown(self) -> slice | int:
            """Return the index of the outputs in ``coef_``: of two classes only the second, of targets (n,) the only one."""

    def _scores(self, X: Any) -> Tensor:
        return self._answer(X, "forward")

    def _answer(self, X: Any, verb: str, **options: Any) -> Tensor:
        """Check X and pass its rows to a method of the head."""
        check_is_fitted(self, "head_")
        X = validate_data(self, as_csr(X), reset=False, dtype=NUMPY_FLOAT_DTYPES, accept_sparse=self._sparse)
        ask = self.head_ if verb == "forward" else getattr(self.head_, verb)
        return ask(self._rows(X), **options)  # type: ignore[no-any-return]


class LinearClassifier(Classifier, LinearEstimator):
    """The base of the classifiers on a linear head."""

    def _class_weight(self) -> Any:
        """Return the class weights for a head. A dict from labels becomes a tensor (K,)."""
        weight = self._check_class_weight(self.class_weight)
        return torch.as_tensor(weight) if isinstance(weight, np.ndarray) else weight

    @property
    def _calibration_method(self) -> str | None:
        usual = None if self._indicator else "temperature"  # with two classes, Platt scaling may move the border
        return usual if self.calibration == "auto" else self.calibration

    _takes_indicators = False
    """True if y may be an array (n, K) of 0 and 1, with several labels for each sample."""

    def _check(self, X: Any, y: Any, reset: bool) -> tuple[Any, Array]:
        options = {"dtype": NUMPY_FLOAT_DTYPES, "accept_sparse": self._sparse, "multi_output": self._takes_indicators}
        X, y = validate_data(self, as_csr(X), y, reset=reset, **options)
        y = y.toarray() if hasattr(y, "toarray") else y
        if reset:
            self._indicator = self._takes_indicators and type_of_target(y) == "multilabel-indicator"
        return X, y if self._indicator else column_or_1d(y, warn=True)

    def _start_outputs(self, y: Array, weight: Any) -> int:
        self._learn_classes(y, weight)
        return len(self.classes_)

    def _targets(self, y: Array, removes: bool = False) -> Array:
        return self._encode(y, RemovalError) if removes else self._encode(y, advice=NAME_CLASSES)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Learn more samples, all or none. In the first call, pass all ``classes``, or at least two of them in y."""
        self._learn_more(X, y, classes, sample_weight)
        return self

    def _explained(self, error: RemovalError) -> str:
        if error.label is None:
            return str(error)
        held = "" if error.held_label is None else f" (it is held with label {self.classes_[error.held_label]!s})"
        return f"row {error.row} is not held with label {self.classes_[error.label]!s}{held}. Nothing was changed."

    def calibrate(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Calibrate the probabilities again after ``partial_fit`` or ``partial_unfit``. Pass all samples X (n, J), y (n,).

        If ``head_`` is a ``DualHead``, you need not call this method, because the head stores the rows and calibrates on them.
        """
        check_is_fitted(self, "head_")
        X, y = self._check(X, y, False)
        weight, labels = self._tensor(self._check_weight(sample_weight, X)), self._here(self._encode(y))
        if not isinstance(self.head_, DualHead):
            self.head_.calibrate(self._all_rows(X), labels, self._calibration_method, weight=weight)
        return self

    def label_errors(self, X: Any, y: Any, ids: Any = None, sample_weight: Any = None) -> LabelErrors:
        """Rank learned samples by how suspicious their labels are, by exact leave-one-out scores.

        Pass learned samples X (n, J) and y (n,) or (n, K), with the sample_weight (n,) with which they were learned.
        ``found.order`` contains row indices of X, the most suspicious first. ``found.names()`` returns your labels. With many
        classes and few features, X must contain all samples, because the ranking then uses a second head on 2,000 random
        features, which finds more errors.
        """
        check_is_fitted(self, "head_")
        X, y = self._check(X, y, False)
        weight = self._tensor(self._check_weight(sample_weight, X))
        rows, labels, classes = self._all_rows(X), self._here(self._encode(y)), self.classes_.tolist()
        masked = is_masked(len(classes), self.n_features_in_) and not self._indicator
        if isinstance(self.head_, LSSVMHead) and masked:
            found = find_label_errors(self.head_, rows, labels, ids, weight=weight, lift=LIFTED_FEATURES)
            return dataclasses.replace(found, classes=tuple(classes))
        options: dict[str, Any] = {} if isinstance(self.head_, DualHead) else {"weight": weight}
        if self.head_.multiclass == "ovo":
            options["pairs"] = "least"
        scores = self.head_.leave_one_out(rows, labels, **options)
        return from_scores(scores, labels.bool() if self._indicator else labels, ids, classes=classes)

    def influence(self, X: Any, y: Any, X_val: Any, y_val: Any, on: str = "loss", sample_weight: Any = None) -> Array:
        """Return the exact change (n,) of the loss (or accuracy) on X_val that removing each sample alone would cause.

        Pass learned samples X (n, J) and y (n,), with the sample_weight (n,) with which they were learned, and validation
        samples X_val (V, J) and y_val (V,). A sample helps if its removal raises the loss. With ``multiclass="ovo"``, use
        ``on="accuracy"``, because the pairs of classes have no common loss. With ``rule_ == "lda"``, the result is the
        influence on the least-squares solution of the same sums.
        """
        check_is_fitted(self, "head_")
        (X, y), (X_val, y_val) = self._check(X, y, False), self._check(X_val, y_val, False)
        weight = self._tensor(self._check_weight(sample_weight, X))
        if not isinstance(self.head_, LSSVMHead):
            raise ValueError(f"influence needs sums of least squares, this estimator has a {type(self.head_).__name__}")
        rows, points = self._here(dense_rows(X)), self._here(dense_rows(X_val))
        labels, truth = self._here(self._encode(y)), self._here(self._encode(y_val))
        head = self.head_
        if head.rule == "lda":
            head = LSSVMHead.from_config(head.config() | {"rule": "least_squares"}, self.device)
            head._adopt(self.head_._sample_state())
        out: Array = head.influence(rows, labels, points, truth, on=on, weight=weight).cpu().numpy()
        return out

    @available_if(lambda self: self.calibration is not None)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Array:
        """Predict probabilities (B, K), calibrated on leave-one-out scores."""
        check_is_fitted(self, "head_")
        if isinstance(self.head_, MarginHead) and self.head_.calibration is None:
            self.head_._calibrate_on_rows(self._calibration_method)
        try:
            out: Array = self._answer(X, "predict_proba").cpu().numpy()
        except NotFittedError as error:
            raise NotFittedError(
                "no calibration belongs to the samples learned, because partial_fit or partial_unfit changed them: call "
                "calibrate(X, y) with all samples learned, or fit again"
            ) from error
        return out

    def _shown(self) -> slice:
        two = len(self.classes_) == 2 and self.head_.multiclass == "ovr" and not self._indicator
        return slice(1 if two else 0, None)


class LSSVMClassifier(LinearClassifier):
    """Least-squares SVM (ridge) classifier with exact ``partial_fit`` and ``partial_unfit``.

    ``fit`` solves for the weights. ``partial_fit`` and ``partial_unfit`` only update sums over the samples, and the next
    prediction solves. By default, features are rounded to a grid, so that the sums are exact integers. After ``partial_unfit``,
    the state therefore equals, bit for bit, the state of an estimator that never saw the samples. Removing a sample that was
    not learned, or was already removed, raises RemovalError. Rounding changes a feature by less than 2^-20 of the largest one.

    **Fewer samples than features.** If n < J and J > 512, the problem is solved in the dual. ``head_`` is then a ``DualHead``,
    which stores the rows, dense or sparse, on the grid. A fit needs 4 n J + 8 n^2 bytes and n^2 J + n^3 operations. When
    ``partial_fit`` brings the number of rows above J, the estimator switches to sums, which need 4 J^2 bytes, and 8 J^2 bytes
    to solve. With ``normalize``, ``scale``, ``device``, ``intercept="penalized"``, ``multiclass="ovo"``, ``rule="lda"``, or
    ``class_weight`` for several labels, sums are always used. X may be sparse (scipy's or torch's CSR).

    **Several labels for each sample.** If y is an array (n, K) of 0 and 1, each column is learned as a separate binary problem,
    and ``predict`` returns such an array. ``class_weight`` then weights the samples with a label and those without it; a dict
    maps the numbers of labels to weights of the samples that have them. This does not support ``multiclass="ovo"``,
    ``rule="lda"`` and ``calibration="temperature"``.

    **Defaults that differ from** :class:`~torchlssvm.LSSVMHead`. ``fit`` has all samples at once, so ``multiclass`` and
    ``rule`` default to ``"auto"``, and ``selection`` can be exact leave-one-out. A head, which keeps only sums, cannot do this.

    Args:
        rho: the regularization (scikit-learn's alpha), a number, or ``"gcv"`` to choose it by generalized cross-validation, and
            again after each ``partial_fit`` or ``partial_unfit``. ``alpha_`` is the value in use.
        alphas: a list of values of rho for ``fit`` to compare, or ``"path"`` for 100 values around the scale of the data.
            Default: ``fit`` uses ``rho``.
        selection: how ``fit`` chooses among ``alphas``: ``"loo"`` (leave-one-out error) or ``"gcv"``. If sums are used,
            ``partial_fit`` and ``partial_unfit`` choose again only with ``"gcv"``.
        intercept: ``"free"``, ``"penalized"`` or ``"none"``.
        class_weight: None, ``"balanced"``, ``"complement"`` or a dict from labels to weights.
        multiclass: ``"ovr"`` (one class against the rest), ``"ovo"`` (one against one) or ``"auto"``, which is ``"ovo"`` for 3
            to 10 classes and at most 512 features (up to 45 solves and 21 MB of sums), and ``"ovr"`` otherwise.
            ``multiclass_`` is the choice in use.
        rule: how the weights are computed from the sums: ``"least_squares"``, ``"lda"`` (the linear discriminant of
            :class:`~torchlssvm.LSSVMHead`) or ``"auto"``. ``"auto"`` considers the discriminant if ``multiclass="auto"`` is
            ``"ovr"``, there are three or more classes with at most 100 features per class, and the intercept is free. ``fit``
            then uses the rule that is more accurate on left-out samples (up to 2,000 of them), and ``partial_fit`` without
            ``fit`` uses the discriminant. ``rule_`` is the rule in use. A ``DualHead`` always uses least squares.
        calibration: the map from scores to probabilities, which ``fit`` fits to leave-one-out scores: ``"temperature"``,
            ``"platt"``, ``"isotonic"`` or ``"auto"`` (a temperature, or Platt scaling if samples have several labels). Pass
            None for a faster ``fit`` without ``predict_proba``. ``predict`` always uses ``decision_function``, so with
            ``"platt"`` and ``"isotonic"`` the most probable class may differ from the predicted class if two scores are
            similar, as in scikit-learn's ``SVC``.
        normalize: how each row is normalized: None, ``"l2"`` or ``"sqrt"``. ``coef_`` applies to normalized rows.
        scale: None, or ``"std"`` to standardize features as a ``StandardScaler`` does. ``partial_unfit`` also removes the
            influence of its samples on the scale. ``coef_`` applies to features before scaling.
        grid: ``"auto"``, a number (the largest feature), a :class:`~torchlssvm.FixedPoint`, or None for float64 sums. With
            float64 sums, removals are exact up to rounding (1e-12), and removing a sample that was not learned raises an error
            only if the sums reveal it. On a grid, sample weights must be integers, which count copies. If the first sample
            weights are fractions, ``"auto"`` means None.
        device: the device of the head.
    """

    def __init__(
        self, rho: Any = "gcv", *, alphas: Any = None, selection: str = "loo", intercept: str = "free",
        class_weight: Any = None, multiclass: str = "auto", rule: str = "auto", calibration: str | None = "auto",
        normalize: str | None = None, scale: str | None = None, grid: Any = "auto", device: Any = None,
    ):  # fmt: skip
        self.rho, self.alphas, self.selection, self.intercept = rho, alphas, selection, intercept
        self.class_weight, self.multiclass, self.rule, self.calibration = class_weight, multiclass, rule, calibration
        self.normalize, self.scale, self.grid, self.device = normalize, scale, grid, device

    _sparse, _takes_indicators = "csr", True

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        plain = self.multiclass != "ovo" and self.rule != "lda"
        tags.classifier_tags.multi_label = plain and self.calibration != "temperature"
        return tags

    @property
    def _targets_kind(self) -> str:  # type: ignore[override]
        return "multilabel" if self._indicator else "classes"

    @property
    def multiclass_(self) -> str:
        """How several classes are separated: "ovr" (one against the rest) or "ovo" (one against one)."""
        kind: str = self.head_.multiclass
        return kind

    @property
    def rule_(self) -> str:
        """The rule in use, "least_squares" or "lda"."""
        rule: str = self.head_.rule
        return rule

    def _start_outputs(self, y: Array, weight: Any) -> int:
        if self._indicator:
            refuse_for_targets("multilabel", self.class_weight, self.multiclass, self.rule)
            self.classes_ = np.arange(np.shape(y)[-1])
            return len(self.classes_)
        return super()._start_outputs(y, weight)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from scratch and solve. Warns if there are few features for the number of classes, and suggests a remedy."""
        super().fit(X, y, sample_weight)
        classes, features = len(self.classes_), self.n_features_in_
        if not self._indicator and is_masked(classes, features) and self.multiclass_ != "ovo":
            lda = self.rule_ == "lda"
            use = "the linear discriminant is in use" if lda else "least squares is weak there"
            more = "" if lda or self.rule == "auto" else "rule='auto', or "
            lifted = max(LIFTED_FEATURES, FEATURES_PER_CLASS * classes)
            warnings.warn(
                f"{classes} classes meet {features} features: {use}. Often more accurate: {more}"
                f"make_pipeline(RandomFeatures({lifted}), LSSVMClassifier()) from torchlssvm.sklearn, or MarginClassifier",
                stacklevel=2,
            )
        return self

    def _sum_head(self, in_features: int, outputs: int, grid: Any) -> LinearHead:
        weight, kind = self._class_weight(), self.multiclass
        if kind == "auto":
            kind = "ovr" if self.rule == "lda" or self._indicator else choose_multiclass(outputs, in_features)
        rule = checks.one_of(self.rule, "rule", RULES)
        if self._indicator or (rule == "auto" and (self.multiclass, kind, self.intercept) != ("auto", "ovr", "free")):
            rule = "least_squares"
        return self._make(
            LSSVMHead, in_features, outputs, grid, class_weight=weight, multiclass=kind, rule=rule,
            per_class=weight is not None or None, targets=self._targets_kind,
        )  # fmt: skip


class MarginClassifier(LinearClassifier):
    """Squared-hinge SVM, one class against the rest, with exact ``partial_fit`` and ``partial_unfit``.

    Use it like ``LinearSVC(loss="squared_hinge")``. In addition, you can remove samples, and the result equals a fit on the
    remaining samples. For this purpose, the estimator stores its samples as integers on a grid. Sample weights must be
    integers, because they count copies of a sample.

    Args:
        rho: the regularization, C = 1 / (2 rho) in terms of ``LinearSVC``. Default: chosen by k-fold cross-validation, and
            chosen again after each ``partial_fit`` or ``partial_unfit``. ``alpha_`` is the value in use.
        alphas: a list of values of rho for ``fit`` to compare, or ``"path"`` for nine values around the scale of the data.
            Default: ``fit`` uses ``rho``.
        selection: how ``fit`` chooses among ``alphas``: ``"kfold"`` (cross-validation) or ``"loo"`` (leave-one-out error).
        intercept: ``"free"``, ``"penalized"`` (as in ``LinearSVC``) or ``"none"``.
        grid: ``"auto"`` or a :class:`~torchlssvm.FixedPoint`.

    All other arguments are those of :class:`LSSVMClassifier`.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> clf = MarginClassifier().fit(X, y)
    >>> bool(clf.score(X, y) > 0.9), clf.partial_unfit(X[:10], y[:10]).head_.n
    (True, 140)
    """

    def __init__(
        self, rho: Any = None, *, alphas: Any = None, selection: str = "kfold", intercept: str = "free",
        class_weight: Any = None, calibration: str | None = "auto", normalize: str | None = None, scale: str | None = None,
        grid: Any = "auto", device: Any = None,
    ):  # fmt: skip
        self.rho, self.alphas, self.selection, self.intercept = rho, alphas, selection, intercept
        self.class_weight, self.calibration = class_weight, calibration
        self.normalize, self.scale, self.grid, self.device = normalize, scale, grid, device

    _sums_fractions = False

    def _sum_head(self, in_features: int, outputs: int, grid: Any) -> LinearHead:
        return self._make(MarginHead, in_features, outputs, grid, class_weight=self._class_weight())


class LSSVMRegressor(RegressorMixin, LinearEstimator):
    """Ridge regression of one or several targets, with exact ``partial_fit`` and ``partial_unfit``.

    Options and data formats (the grid, sparse rows, fewer samples than features) work as in :class:`LSSVMClassifier`. Targets
    are rounded to a separate grid, which the first targets determine, so rounding changes a target by less than 2^-20 of the
    largest of these. If this loses much of a target, a ``NumericalWarning`` is issued.

    The arguments are those of :class:`LSSVMClassifier`.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = LSSVMRegressor().fit(X, y)
    >>> bool(model.score(X, y) > 0.5), model.partial_unfit(X[:10], y[:10]).head_.n
    (True, 432)
    """

    def __init__(
        self, rho: Any = "gcv", *, alphas: Any = None, selection: str = "loo", intercept: str = "free",
        normalize: str | None = None, scale: str | None = None, grid: Any = "auto", device: Any = None,
    ):  # fmt: skip
        self.rho, self.alphas, self.selection, self.intercept = rho, alphas, selection, intercept
        self.normalize, self.scale, self.grid, self.device = normalize, scale, grid, device

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    _sparse, _targets_kind = "csr", "regression"

    def _check(self, X: Any, y: Any, reset: bool) -> tuple[Any, Array]:
        options = {"dtype": NUMPY_FLOAT_DTYPES, "multi_output": True, "y_numeric": True, "accept_sparse": self._sparse}
        X, y = validate_data(self, as_csr(X), y, reset=reset, **options)
        if reset:
            self._flat = y.ndim == 1
        return X, y.astype(np.float64, copy=False).reshape(len(y), -1)

    def _start_outputs(self, y: Array, weight: Any) -> int:
        return int(y.shape[1])

    def _targets(self, y: Array, removes: bool = False) -> Array:
        return y

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn more samples, all or none. X: (B, J); y: (B,) or (B, K)."""
        self._learn_more(X, y, None, sample_weight)
        return self

    def _shown(self) -> slice | int:
        return 0 if self._flat else slice(None)

    def predict(self, X: Any) -> Array:
        """Predict targets (B,) or (B, K)."""
        scores: Array = self._scores(X).cpu().numpy()
        return scores[:, 0] if self._flat else scores


def as_csr(X: Any) -> Any:
    """Convert a sparse tensor to a CSR matrix of scipy, and return anything else unchanged."""
    rows = checks.sparse_features(X, X.device) if isinstance(X, Tensor) else None
    if rows is None:
        return X
    from scipy.sparse import csr_matrix

    places = rows.indices().cpu().numpy()
    return csr_matrix((rows.values().cpu().numpy(), (places[0], places[1])), shape=tuple(rows.shape))


def dense_rows(X: Any) -> Array:
    """Rows as an array."""
    rows: Array = X if isinstance(X, np.ndarray) else X.toarray()
    return rows
