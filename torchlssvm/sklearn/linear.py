"""Estimators on the linear heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from torchlssvm.linear import LinearHead, LSSVMHead, MarginHead
from torchlssvm.sklearn.common import FLOAT_DTYPES, Array, Classifier

if TYPE_CHECKING:
    from typing_extensions import Self


class LinearEstimator(BaseEstimator):
    """The base of the estimators on a linear head."""

    head_: LinearHead

    def _make(self, kind: type[LinearHead], in_features: int, outputs: int, **options: Any) -> LinearHead:
        return kind(
            in_features, outputs, rho=self.rho, intercept=self.intercept, grid=self.grid, normalize=self.normalize,
            scale=self.scale, device=self.device, **options,
        )  # fmt: skip

    def _here(self, values: Array) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(values), device=self.head_.device)

    def _weight(self, sample_weight: Any, X: Array) -> Tensor | None:
        if sample_weight is None:
            return None
        return self._here(_check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True))

    def _select(self, X: Tensor, y: Tensor, weight: Tensor | None) -> None:
        """Choose rho by exact leave-one-out (or GCV) if ``alphas`` asks for it."""
        self.alpha_ = float(self.rho)
        if self.alphas is None:
            return
        if isinstance(self.alphas, str) and self.alphas != "path":
            raise ValueError(f"alphas must be None, 'path' or a list of values > 0, got {self.alphas!r}")
        values = None if isinstance(self.alphas, str) else self.alphas
        if self.selection == "gcv":
            path = self.head_.select_rho(values, "gcv")
        else:
            if weight is not None and not bool((weight > 0).all()):
                keep = weight > 0
                X, y, weight = X[keep], y[keep], weight[keep]
            path = self.head_.select_rho(values, self.selection, X, y, weight=weight)
        self.alpha_, self.path_ = path.rho, path

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
        check_is_fitted(self, "head_")
        X = validate_data(self, X, reset=False, dtype=FLOAT_DTYPES)
        scores: Tensor = self.head_(self._here(X))
        return scores


class LinearClassifier(Classifier, LinearEstimator):
    """The base of the classifiers on a linear head."""

    def _start(self, in_features: int) -> None:
        """Make an empty head for ``classes_``."""
        raise NotImplementedError

    def _class_weight(self) -> Any:
        """The class weights as a head takes them: a dict from labels becomes a tensor (K,)."""
        weight = self.class_weight
        if not isinstance(weight, dict):
            return weight
        return torch.tensor([float(weight.get(c, 1.0)) for c in self.classes_.tolist()])

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from scratch. X: (n, J); y: (n,); sample_weight: (n,)."""
        X, y = validate_data(self, X, y, dtype=FLOAT_DTYPES)
        if sample_weight is not None:
            sample_weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        self._learn_classes(y, sample_weight)
        self._start(X.shape[1])
        x, labels, weight = self._here(X), self._here(self._encode(y)), self._weight(sample_weight, X)
        self.head_.add(x, labels, weight=weight)
        self._select(x, labels, weight)
        if self.calibration is not None:
            if weight is not None:
                x, labels, weight = x[weight > 0], labels[weight > 0], weight[weight > 0]
            self.head_.calibrate(x, labels, self.calibration, weight=weight)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Learn more samples; the first call needs ``classes``, all that will come, or two of them in y."""
        first = not hasattr(self, "head_")
        X, y = validate_data(self, X, y, dtype=FLOAT_DTYPES, reset=first)
        if first:
            self._learn_classes(y if classes is None else classes)
            self._start(X.shape[1])
            self.alpha_ = float(self.rho)
        self.head_.add(self._here(X), self._here(self._encode(y)), weight=self._weight(sample_weight, X))
        return self

    def partial_unfit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Unlearn samples that were learned, exactly; rho stays, a calibration becomes void."""
        check_is_fitted(self, "head_")
        X, y = validate_data(self, X, y, dtype=FLOAT_DTYPES, reset=False)
        self.head_.remove(self._here(X), self._here(self._encode(y)), weight=self._weight(sample_weight, X))
        return self

    def predict_proba(self, X: Any) -> Array:
        """Predict calibrated probabilities (B, K)."""
        check_is_fitted(self, "head_")
        X = validate_data(self, X, reset=False, dtype=FLOAT_DTYPES)
        out: Array = self.head_.predict_proba(self._here(X)).cpu().numpy()
        return out

    def _binary(self) -> bool:
        return len(self.classes_) == 2


class LSSVMClassifier(LinearClassifier):
    """Least-squares SVM (ridge) classifier with exact ``partial_fit`` and ``partial_unfit``.

    Streams, runs on a GPU, and with ``alphas="path"`` chooses its regularization by exact leave-one-out out of 100 values: a
    stand-in for ``RidgeClassifierCV`` that does not hold X.

    Args:
        rho: the regularization, scikit-learn's alpha.
        alphas: None (rho as it is), ``"path"`` (100 values around the scale of the data) or a list of values.
        selection: ``"loo"`` or ``"gcv"``, how ``fit`` chooses among ``alphas``.
        intercept: ``"free"``, ``"penalized"`` or ``"none"``.
        class_weight: None, ``"balanced"``, ``"complement"`` or a dict from labels to weights.
        multiclass: ``"ovr"`` or ``"ovo"``.
        calibration: None (``predict_proba`` gives (1 + score) / 2, projected), or ``"temperature"``, ``"platt"``,
            ``"isotonic"``: fitted by ``fit`` on leave-one-out scores. ``predict`` goes by ``decision_function``; with
            the last two the most probable class may be another near the border, as with scikit-learn's ``SVC``.
        normalize: None, ``"l2"`` or ``"sqrt"``, for each row; ``coef_`` is then of the rows made ready.
        scale: None or ``"std"``: standardised features, as behind a ``StandardScaler``, but ``partial_unfit`` takes its
            samples out of the scale too; ``coef_`` is of the features as they come.
        grid: None (float64 sums), a :class:`~torchlssvm.FixedPoint` or ``"auto"``: then removing is exact to the bit.
        device: where the head lives.
    """

    def __init__(
        self, rho: Any = 1.0, *, alphas: Any = None, selection: str = "loo", intercept: str = "free", class_weight: Any = None,
        multiclass: str = "ovr", calibration: str | None = None, normalize: str | None = None, scale: str | None = None,
        grid: Any = None, device: Any = None,
    ):  # fmt: skip
        self.rho, self.alphas, self.selection, self.intercept = rho, alphas, selection, intercept
        self.class_weight, self.multiclass, self.calibration = class_weight, multiclass, calibration
        self.normalize, self.scale, self.grid, self.device = normalize, scale, grid, device

    def _start(self, in_features: int) -> None:
        weight = self._class_weight()
        self.head_ = self._make(
            LSSVMHead, in_features, len(self.classes_), class_weight=weight, multiclass=self.multiclass,
            per_class=weight is not None or None,
        )  # fmt: skip

    def _binary(self) -> bool:
        return len(self.classes_) == 2 and self.multiclass == "ovr"


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
        normalize: None, ``"l2"`` or ``"sqrt"``, for each row; ``coef_`` is then of the rows made ready.
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

    def _start(self, in_features: int) -> None:
        self.head_ = self._make(MarginHead, in_features, len(self.classes_), class_weight=self._class_weight())


class LSSVMRegressor(RegressorMixin, LinearEstimator):
    """Ridge regression with exact ``partial_fit`` and ``partial_unfit``; one or several targets.

    Args:
        rho: the regularization, scikit-learn's alpha.
        alphas: None (rho as it is), ``"path"`` (100 values around the scale of the data) or a list of values.
        selection: ``"loo"`` or ``"gcv"``.
        intercept: ``"free"``, ``"penalized"`` or ``"none"``.
        normalize: None, ``"l2"`` or ``"sqrt"``, for each row.
        scale: None or ``"std"``: standardised features, derived again after ``partial_unfit``.
        grid: None (float64 sums), a :class:`~torchlssvm.FixedPoint` or ``"auto"``: then removing is exact to the bit.
        device: where the head lives.
    """

    def __init__(
        self, rho: Any = 1.0, *, alphas: Any = None, selection: str = "loo", intercept: str = "free",
        normalize: str | None = None, scale: str | None = None, grid: Any = None, device: Any = None,
    ):  # fmt: skip
        self.rho, self.alphas, self.selection, self.intercept = rho, alphas, selection, intercept
        self.normalize, self.scale, self.grid, self.device = normalize, scale, grid, device

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _check(self, X: Any, y: Any, reset: bool) -> tuple[Array, Array]:
        X, y = validate_data(self, X, y, dtype=FLOAT_DTYPES, multi_output=True, y_numeric=True, reset=reset)
        if reset:
            self._flat = y.ndim == 1
        return X, y.astype(np.float64, copy=False).reshape(len(y), -1)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from scratch. X: (n, J); y: (n,) or (n, K); sample_weight: (n,)."""
        X, y = self._check(X, y, True)
        self.head_ = self._make(LSSVMHead, X.shape[1], y.shape[1])
        x, target, weight = self._here(X), self._here(y), self._weight(sample_weight, X)
        self.head_.add(x, target, weight=weight)
        self._select(x, target, weight)
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn more samples. X: (B, J); y: (B,) or (B, K)."""
        first = not hasattr(self, "head_")
        X, y = self._check(X, y, first)
        if first:
            self.head_, self.alpha_ = self._make(LSSVMHead, X.shape[1], y.shape[1]), float(self.rho)
        self.head_.add(self._here(X), self._here(y), weight=self._weight(sample_weight, X))
        return self

    def partial_unfit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Unlearn samples that were learned, exactly; rho stays."""
        check_is_fitted(self, "head_")
        X, y = self._check(X, y, False)
        self.head_.remove(self._here(X), self._here(y), weight=self._weight(sample_weight, X))
        return self

    def _single(self) -> bool:
        return bool(self._flat)

    def predict(self, X: Any) -> Array:
        """Predict targets (B,) or (B, K)."""
        scores: Array = self._scores(X).cpu().numpy()
        return scores[:, 0] if self._flat else scores
