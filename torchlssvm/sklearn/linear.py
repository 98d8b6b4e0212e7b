"""Estimators on the linear heads."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.multiclass import unique_labels
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from torchlssvm.analysis.label_errors import LabelErrors, from_scores
from torchlssvm.errors import NotFittedError
from torchlssvm.functional.checks import sparse_features
from torchlssvm.linear import LinearHead, LSSVMHead, MarginHead
from torchlssvm.linear.diagnostics.rho_rule import LEAST_SAMPLES
from torchlssvm.sklearn.common import NUMPY_FLOAT_DTYPES, Array, Classifier, unchanged_on_error
from torchlssvm.sklearn.dual_head import DualHead

MOST_PAIRED_CLASSES, MOST_PAIRED_FEATURES = 10, 512
"""Classes and features up to which classes are told apart pair by pair unless asked otherwise: 45 solves of 512 features, which
take about as long as one of 1,800, and sums per class of 10 x 513 x 513 numbers, 21 MB."""


def choose_multiclass(classes: int, features: int) -> str:
    """Return "ovo" for a few classes of not too many features, where pairs are more accurate and still cheap; else "ovr"."""
    return "ovo" if 3 <= classes <= MOST_PAIRED_CLASSES and features <= MOST_PAIRED_FEATURES else "ovr"


WIDE_FEATURES = 512
"""More features than this, and than samples, are solved in the dual without a grid: with fewer the sums cost little."""


class LinearEstimator(BaseEstimator):
    """The base of the estimators on a linear head."""

    head_: Any  # a linear head, or a DualHead
    _sparse: str | bool = False
    """Sparse matrices that are taken, as scikit-learn names them."""
    _takes_labels: bool = False
    """True for classifiers, whose targets are class indices."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = bool(self._sparse)
        return tags

    if TYPE_CHECKING:

        def _check(self, X: Any, y: Any, reset: bool) -> tuple[Any, Array]:
            """Rows and labels or targets, as scikit-learn checks them."""

        def _start_outputs(self, y: Array, weight: Any) -> int:
            """Learn the classes or targets of the first samples; return the number of outputs."""

        def _targets(self, y: Array) -> Array:
            """Labels or targets as a head takes them."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from scratch. X: (n, J); y: (n,) labels, or targets (n,) or (n, K); sample_weight: (n,)."""
        with unchanged_on_error(self):
            X, y = self._check(X, y, True)
            if sample_weight is not None:
                sample_weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            outputs = self._start_outputs(y, sample_weight)
            targets = self._targets(y)
            if self._is_dual(X, sample_weight):
                self.head_ = DualHead(X.shape[1], outputs, self.rho, self.intercept, labels=self._takes_labels)
                self._add(X, targets, None)
                return self
            self.head_ = self._new_head(X.shape[1], outputs)
            weight = self._weight(sample_weight, X)
            self._add(X, targets, weight)
            if self._needs_rows():
                self._judge(self._here(dense_rows(X)), self._here(targets), weight)
            return self

    def _learn_more(self, X: Any, y: Any, classes: Any, sample_weight: Any) -> None:
        """Learn samples beside those held, all or none; classes: all that will come, of a classifier."""
        with unchanged_on_error(self):
            first = not hasattr(self, "head_")
            X, y = self._check(X, y, first)
            if first:
                self.head_ = self._new_head(X.shape[1], self._start_outputs(y if classes is None else classes, None))
            elif classes is not None and not np.array_equal(self.classes_, unique_labels(classes)):
                raise ValueError(f"classes={classes!r} is not the same as on the first call: {self.classes_!r}")
            self._check_weights(sample_weight)
            self._add(X, self._targets(y), self._weight(sample_weight, X))

    def partial_unfit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Unlearn samples that were learned, exactly; a calibration becomes void until ``calibrate`` makes it again."""
        check_is_fitted(self, "head_")
        X, y = self._check(X, y, False)
        self._check_weights(sample_weight)
        self._remove(X, self._targets(y), self._weight(sample_weight, X))
        self._judge_sums()
        return self

    def _needs_rows(self) -> bool:
        """True if something is chosen or fitted from all rows at once."""
        wanted = self.alphas is not None or getattr(self, "calibration", None) is not None
        return wanted or getattr(self, "store_loo", False)

    def _is_dual(self, X: Any, sample_weight: Any = None) -> bool:
        """True for few samples of many features that a DualHead can take: no grid, no weights, no normalization."""
        plain = ("alphas", "normalize", "scale", "class_weight", "calibration", "device", "grid")
        wanted = all(getattr(self, name, None) is None for name in plain) and not getattr(self, "store_loo", False)
        return (
            wanted and bool(self._sparse) and sample_weight is None and self.intercept in ("free", "none")
            and WIDE_FEATURES < X.shape[1] > X.shape[0] and getattr(self, "multiclass", "auto") in ("auto", "ovr")
        )  # fmt: skip

    def _add(self, X: Any, y: Array, weight: Tensor | None) -> None:
        """Learn checked samples, all or none."""
        dual = self.head_
        if not isinstance(dual, DualHead):
            dual.add(self._rows(X), self._here(y), weight=weight)
        elif dual.n + X.shape[0] <= dual.in_features:
            dual.add(X, y)
        else:  # as many samples as features: sums are smaller now
            head = self._new_head(dual.in_features, dual.num_classes)
            for rows, labels in ((dual.rows, dual.y), (X, y)):
                head.add(rows, torch.from_numpy(np.ascontiguousarray(labels)))
            self.head_ = head

    def _remove(self, X: Any, y: Array, weight: Tensor | None) -> None:
        """Unlearn checked samples."""
        if isinstance(self.head_, DualHead):
            self.head_.remove(X, y)
            return
        self.head_.remove(self._rows(X), self._here(y), weight=weight)

    def _new_head(self, in_features: int, outputs: int) -> LinearHead:
        """Make an empty head that keeps sums."""
        return self._make(LSSVMHead, in_features, outputs)

    def _make(
        self, kind: type[LSSVMHead] | type[MarginHead], in_features: int, outputs: int, **options: Any
    ) -> LinearHead:
        return kind(
            in_features, outputs, rho=self.rho if self.alphas is None else 1.0, intercept=self.intercept, grid=self.grid,
            normalize=self.normalize, scale=self.scale, device=self.device, **options,
        )  # fmt: skip

    def _here(self, values: Array) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(values), device=self.head_.device)

    def _rows(self, X: Any) -> Any:
        """Rows as the head takes them: a sparse matrix as it is."""
        return self._here(X) if isinstance(X, np.ndarray) else X

    def _weight(self, sample_weight: Any, X: Array) -> Tensor | None:
        if sample_weight is None:
            return None
        return self._here(_check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True))

    @property
    def alpha_(self) -> float:
        """The regularization in use: rho as given, or as chosen from the data."""
        return float(self.head_.rho)

    def _candidates(self) -> Any:
        """Values of ``alphas``; None for a path."""
        if isinstance(self.alphas, str) and self.alphas != "path":
            raise ValueError(f"alphas must be None, 'path' or a list of values > 0, got {self.alphas!r}")
        return None if isinstance(self.alphas, str) else self.alphas

    def _judge(self, X: Tensor, y: Tensor, weight: Tensor | None) -> None:
        """Make what options ask for from all rows: rho out of ``alphas``, leave-one-out scores, a calibration."""
        if weight is not None and not bool((weight > 0).all()):
            keep = weight > 0
            X, y, weight = X[keep], y[keep], weight[keep]
        if self.alphas is not None:
            values = self._candidates()
            needs_samples = self.selection != "gcv" and not self.head_.keeps_rows
            samples: dict[str, Any] = {"x": X, "y": y, "weight": weight} if needs_samples else {}
            self.path_ = self.head_.select_rho(values, self.selection, **samples)
        if getattr(self, "store_loo", False):
            self.leave_one_out_ = self.head_.leave_one_out(X, y, weight).cpu().numpy()
        if getattr(self, "calibration", None) is not None:
            self.head_.calibrate(X, y, self.calibration, weight=weight)

    def _check_weights(self, sample_weight: Any) -> None:
        """ValueError for sample weights where rows are kept: rows are kept without weights."""
        if sample_weight is not None and isinstance(self.head_, DualHead):
            raise ValueError(
                "this estimator was fitted on fewer samples than features and keeps its rows, without weights: begin with "
                "partial_fit, or with sample_weight, to sum them instead"
            )

    def _judge_sums(self) -> None:
        """Choose rho after a change of samples, where that can be done from sums."""
        self.__dict__.pop("leave_one_out_", None)  # they are of other samples
        if isinstance(self.head_, DualHead):
            return
        self.head_.data_choices.reopen_rho()  # with rho="gcv": chosen when it is next read
        if self.alphas is None:
            return
        values = self._candidates()
        if self.selection == "gcv" or self.head_.keeps_rows:  # nothing else is needed
            if self.head_.n >= LEAST_SAMPLES:
                self.path_ = self.head_.select_rho(values, self.selection)
        elif not hasattr(self, "path_"):  # after a fit, the value that it chose stays
            warnings.warn(
                "partial_fit does not choose among alphas by leave-one-out, which needs all samples at hand: rho is 1. "
                "selection='gcv' chooses from the sums, and so does rho='gcv' with alphas=None",
                stacklevel=3,
            )

    @property
    def coef_(self) -> Array:
        """w as scikit-learn has it: (J,) or (1, J) for one output, else (K, J)."""
        weight: Array = self.head_.weight.cpu().numpy()
        return weight[1:] if self._binary() else weight[0] if self._single() else weight

    @property
    def intercept_(self) -> Any:
        """b, in the same order."""
        bias: Array = self.head_.bias.cpu().numpy()
        return bias[1:] if self._binary() else float(bias[0]) if self._single() else bias

    def _binary(self) -> bool:
        return False

    def _single(self) -> bool:
        return False

    def _scores(self, X: Any) -> Tensor:
        return self._answer(X, "forward")

    def _answer(self, X: Any, verb: str) -> Tensor:
        """Check X and pass its rows to a method of the head."""
        check_is_fitted(self, "head_")
        X = validate_data(self, as_csr(X), reset=False, dtype=NUMPY_FLOAT_DTYPES, accept_sparse=self._sparse)
        ask = self.head_ if verb == "forward" else getattr(self.head_, verb)
        return ask(X if isinstance(self.head_, DualHead) else self._rows(X))  # type: ignore[no-any-return]


class LinearClassifier(Classifier, LinearEstimator):
    """The base of the classifiers on a linear head."""

    def _class_weight(self) -> Any:
        """The class weights as a head takes them: a dict from labels becomes a tensor (K,)."""
        weight = self.class_weight
        if not isinstance(weight, dict):
            return weight
        return torch.tensor([float(weight.get(c, 1.0)) for c in self.classes_.tolist()])

    _takes_labels = True

    def _check(self, X: Any, y: Any, reset: bool) -> tuple[Any, Array]:
        X, y = validate_data(self, as_csr(X), y, dtype=NUMPY_FLOAT_DTYPES, reset=reset, accept_sparse=self._sparse)
        return X, y

    def _start_outputs(self, y: Array, weight: Any) -> int:
        self._learn_classes(y, weight)
        return len(self.classes_)

    def _targets(self, y: Array) -> Array:
        return self._encode(y)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Learn more samples, all or none; the first call needs ``classes``, all that will come, or two of them in y."""
        self._learn_more(X, y, classes, sample_weight)
        self._judge_sums()
        return self

    def calibrate(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the probabilities again on all samples held, after ``partial_fit`` or ``partial_unfit``. X: (n, J); y: (n,)."""
        check_is_fitted(self, "head_")
        X, y = validate_data(self, X, y, dtype=NUMPY_FLOAT_DTYPES, reset=False)
        if isinstance(self.head_, DualHead):
            raise ValueError("calibration needs calibration='temperature', 'platt' or 'isotonic' before fit")
        weight = self._weight(sample_weight, X)
        self.head_.calibrate(self._here(X), self._here(self._encode(y)), self.calibration, weight=weight)
        return self

    def label_errors(self, X: Any, y: Any) -> LabelErrors:
        """Rank samples held by how suspicious their labels are, by exact leave-one-out scores. X: (n, J); y: (n,).

        Labels in the result are numbers of ``classes_``; ``found.order`` are rows of X, the most suspicious first.
        """
        check_is_fitted(self, "head_")
        X, y = self._check(X, y, False)
        if isinstance(self.head_, DualHead):
            encoded = self._encode(y)
            return from_scores(self.head_.leave_one_out(X, encoded), torch.from_numpy(encoded))
        X, labels = dense_rows(X), self._here(self._encode(y))
        return from_scores(self.head_.leave_one_out(self._here(X), labels, pairs="least"), labels)

    def predict_proba(self, X: Any) -> Array:
        """Predict probabilities (B, K), calibrated where ``calibration`` was asked for."""
        check_is_fitted(self, "head_")
        try:
            out: Array = self._answer(X, "predict_proba").cpu().numpy()
        except NotFittedError as error:
            raise NotFittedError(
                "samples have changed since the probabilities were calibrated, and those that are gone have shaped them: call "
                "calibrate(X, y) with the samples that are left, fit anew, or use calibration=None"
            ) from error
        return out

    def _binary(self) -> bool:
        return len(self.classes_) == 2


class LSSVMClassifier(LinearClassifier):
    """Least-squares SVM (ridge) classifier with exact ``partial_fit`` and ``partial_unfit``.

    Streams, runs on a GPU, and with ``alphas="path"`` chooses its regularization by exact leave-one-out out of 100 values: a
    stand-in for ``RidgeClassifierCV`` that does not hold X.

    X may be sparse (scipy's or torch's CSR): its rows are summed as they are, unless ``alphas``,
    ``calibration`` or ``store_loo`` ask for all rows at once. **Few samples of many features, n < J and J > 512, are solved in
    the dual where nothing but rho and the intercept is asked for: the estimator then keeps a copy of its rows,** until
    ``partial_fit`` brings more than J of them, and ``head_`` is a ``DualHead``. On a grid, sums are kept whatever n is: 4 J^2
    bytes, and 8 J^2 to solve.

    **Sums are float64 by default (grid=None): after ``partial_unfit`` the classifier is the one that never saw the samples to
    rounding (1e-12), not to the bit, and has no digest; samples that were never learned are refused only where the sums show
    it. ``grid="auto"`` makes it exact to the bit, and refuses them always.**

    Args:
        rho: the regularization, scikit-learn's alpha: ``"gcv"`` (chosen by generalized cross-validation, again after each
            ``partial_fit`` and ``partial_unfit`` when it is next read) or a number; ``alpha_`` is the value in use.
        alphas: None (rho as it is), ``"path"`` (100 values around the scale of the data) or a list of values.
        selection: ``"loo"`` or ``"gcv"``, how ``fit`` chooses among ``alphas``; ``partial_fit`` can by ``"gcv"`` only.
        intercept: ``"free"``, ``"penalized"`` or ``"none"``.
        class_weight: None, ``"balanced"``, ``"complement"`` or a dict from labels to weights.
        multiclass: ``"ovr"`` (one against the rest), ``"ovo"`` (each pair), or ``"auto"``: pairs for 3 to 10 classes and at
            most 512 features (45 solves, and sums of 21 MB), else ``"ovr"``. ``multiclass_`` is the one in use.
        calibration: None (``predict_proba`` gives (1 + score) / 2, projected), or ``"temperature"``, ``"platt"``,
            ``"isotonic"``: fitted by ``fit`` on leave-one-out scores. ``predict`` goes by ``decision_function``; with
            the last two the most probable class may be another near the border, as with scikit-learn's ``SVC``.
        normalize: None, ``"l2"`` or ``"sqrt"``, for each row; ``coef_`` is then of the normalized rows.
        scale: None or ``"std"``: standardised features, as behind a ``StandardScaler``, but ``partial_unfit``, which needs a
            ``grid`` then, takes its samples out of the scale too; ``coef_`` is of the features as they come.
        grid: None (float64 sums), a number (the largest feature), a :class:`~torchlssvm.FixedPoint` or ``"auto"``: with one of
            the last three, removing is exact to the bit.
        store_loo: keep the exact leave-one-out scores of the samples of ``fit`` in ``leave_one_out_`` (n, K).
        device: where the head lives.
    """

    def __init__(
        self, rho: Any = "gcv", *, alphas: Any = None, selection: str = "loo", intercept: str = "free",
        class_weight: Any = None, multiclass: str = "auto", calibration: str | None = None, normalize: str | None = None,
        scale: str | None = None,
        grid: Any = None, store_loo: bool = False, device: Any = None,
    ):  # fmt: skip
        self.rho, self.alphas, self.selection, self.intercept = rho, alphas, selection, intercept
        self.class_weight, self.multiclass, self.calibration = class_weight, multiclass, calibration
        self.normalize, self.scale, self.grid, self.store_loo, self.device = normalize, scale, grid, store_loo, device

    _sparse = "csr"

    @property
    def multiclass_(self) -> str:
        """One class against the rest, "ovr", or against each other one, "ovo", as in use."""
        kind: str = self.head_.multiclass
        return kind

    def _new_head(self, in_features: int, outputs: int) -> LinearHead:
        weight, kind = self._class_weight(), self.multiclass
        return self._make(
            LSSVMHead, in_features, outputs, class_weight=weight,
            multiclass=choose_multiclass(outputs, in_features) if kind == "auto" else kind,
            per_class=weight is not None or None,
        )  # fmt: skip

    def _binary(self) -> bool:
        return len(self.classes_) == 2 and self.multiclass_ == "ovr"


class MarginClassifier(LinearClassifier):
    """Squared-hinge SVM, one class against the rest, with exact ``partial_fit`` and ``partial_unfit``.

    A stand-in for ``LinearSVC(loss="squared_hinge")`` whose samples can be taken out again: the result is that of a fit on the
    others. It holds its samples, as integers on a grid; ``sample_weight`` are therefore integers, numbers of copies.

    Args:
        rho: the regularization: ``LinearSVC`` has C = 1 / (2 rho).
        alphas: None (rho as it is), ``"path"`` (nine values around the scale of the data) or a list of values.
        selection: ``"kfold"`` or ``"loo"``, how ``fit`` chooses among ``alphas``.
        intercept: ``"free"``, ``"penalized"`` (as ``LinearSVC`` has it) or ``"none"``.
        class_weight: None, ``"balanced"``, ``"complement"`` or a dict from labels to weights.
        calibration: None, or ``"temperature"``, ``"platt"``, ``"isotonic"``: as for :class:`LSSVMClassifier`.
        normalize: None, ``"l2"`` or ``"sqrt"``, for each row; ``coef_`` is then of the normalized rows.
        scale: None or ``"std"``: standardised features, derived again after ``partial_unfit``.
        grid: ``"auto"`` or a :class:`~torchlssvm.FixedPoint`.
        device: where the head lives.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> clf = MarginClassifier().fit(X, y)
    >>> bool(clf.score(X, y) > 0.9), clf.partial_unfit(X[:10], y[:10]).head_.n
    (True, 140)
    """

    def __init__(
        self, rho: Any = 1.0, *, alphas: Any = None, selection: str = "kfold", intercept: str = "free",
        class_weight: Any = None, calibration: str | None = None, normalize: str | None = None, scale: str | None = None,
        grid: Any = "auto", device: Any = None,
    ):  # fmt: skip
        self.rho, self.alphas, self.selection, self.intercept = rho, alphas, selection, intercept
        self.class_weight, self.calibration = class_weight, calibration
        self.normalize, self.scale, self.grid, self.device = normalize, scale, grid, device

    def _new_head(self, in_features: int, outputs: int) -> LinearHead:
        return self._make(MarginHead, in_features, outputs, class_weight=self._class_weight())


class LSSVMRegressor(RegressorMixin, LinearEstimator):
    """Ridge regression with exact ``partial_fit`` and ``partial_unfit``; one or several targets.

    X may be sparse, and n < J with J > 512 is solved in the dual on rows that are kept, as by ``LSSVMClassifier``.

    **Sums are float64 by default (grid=None): after ``partial_unfit`` the weights are those that never saw the samples to
    rounding (1e-12), not to the bit. ``grid="auto"`` makes them exact to the bit.**

    Args:
        rho: the regularization, scikit-learn's alpha: ``"gcv"`` (chosen by generalized cross-validation, again after each
            ``partial_fit`` and ``partial_unfit`` when it is next read) or a number; ``alpha_`` is the value in use.
        alphas: None (rho as it is), ``"path"`` (100 values around the scale of the data) or a list of values.
        selection: ``"loo"`` or ``"gcv"``, how ``fit`` chooses among ``alphas``; ``partial_fit`` can by ``"gcv"`` only.
        intercept: ``"free"``, ``"penalized"`` or ``"none"``.
        normalize: None, ``"l2"`` or ``"sqrt"``, for each row.
        scale: None or ``"std"``: standardised features, derived again after ``partial_unfit``.
        grid: None (float64 sums), a number (the largest feature), a :class:`~torchlssvm.FixedPoint` or ``"auto"``: with one of
            the last three, removing is exact to the bit.
        store_loo: keep the exact leave-one-out predictions of the samples of ``fit`` in ``leave_one_out_`` (n, K).
        device: where the head lives.
    """

    def __init__(
        self, rho: Any = "gcv", *, alphas: Any = None, selection: str = "loo", intercept: str = "free",
        normalize: str | None = None, scale: str | None = None, grid: Any = None, store_loo: bool = False, device: Any = None,
    ):  # fmt: skip
        self.rho, self.alphas, self.selection, self.intercept = rho, alphas, selection, intercept
        self.normalize, self.scale, self.grid, self.store_loo, self.device = normalize, scale, grid, store_loo, device

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    _sparse = "csr"

    def _check(self, X: Any, y: Any, reset: bool) -> tuple[Any, Array]:
        options = {"dtype": NUMPY_FLOAT_DTYPES, "multi_output": True, "y_numeric": True, "accept_sparse": self._sparse}
        X, y = validate_data(self, as_csr(X), y, reset=reset, **options)
        if reset:
            self._flat = y.ndim == 1
        return X, y.astype(np.float64, copy=False).reshape(len(y), -1)

    def _start_outputs(self, y: Array, weight: Any) -> int:
        return int(y.shape[1])

    def _targets(self, y: Array) -> Array:
        return y

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn more samples, all or none. X: (B, J); y: (B,) or (B, K)."""
        self._learn_more(X, y, None, sample_weight)
        self._judge_sums()
        return self

    def _single(self) -> bool:
        return bool(self._flat)

    def predict(self, X: Any) -> Array:
        """Predict targets (B,) or (B, K)."""
        scores: Array = self._scores(X).cpu().numpy()
        return scores[:, 0] if self._flat else scores


def as_csr(X: Any) -> Any:
    """A sparse tensor as scipy has it, in CSR form; anything else as it is."""
    rows = sparse_features(X, X.device) if isinstance(X, Tensor) else None
    if rows is None:
        return X
    from scipy.sparse import csr_matrix

    places = rows.indices().cpu().numpy()
    return csr_matrix((rows.values().cpu().numpy(), (places[0], places[1])), shape=tuple(rows.shape))


def dense_rows(X: Any) -> Array:
    """Rows as an array."""
    rows: Array = X if isinstance(X, np.ndarray) else X.toarray()
    return rows
