"""Estimators on kernel machines."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from torchlssvm.analysis.label_errors import LabelErrors, from_scores
from torchlssvm.functional import checks
from torchlssvm.functional.modes import all_or_nothing
from torchlssvm.kernel_machines import KernelLSSVM, OneVsOne
from torchlssvm.kernels import RBF, Laplacian, Linear, Polynomial
from torchlssvm.linear.diagnostics.calibration import Calibration
from torchlssvm.linear.diagnostics.calibration import fit as fit_calibration
from torchlssvm.linear.linear_head import check_class_weight
from torchlssvm.sklearn.common import NAME_CLASSES, NUMPY_FLOAT_DTYPES, Array, Classifier
from torchlssvm.svm import IncrementalSVM

FOLDS = 5
"""Number of folds for out-of-sample scores, for machines in which leaving out each single sample would take a separate path."""


def variance(X: Array, weight: Array | None) -> float:
    """Return the variance of all entries of X (n, J). A row with weight 2 counts like two rows. weight: (n,)."""
    if weight is None:
        return float(X.var())
    mean = weight @ X.mean(1) / weight.sum()
    return float(weight @ np.square(X - mean).mean(1) / weight.sum())


class KernelClassifier(Classifier, BaseEstimator):
    """The base of the estimators on kernel machines: a kernel by its name."""

    machine_: Any
    _labels: Array  # (n,) class indices in the order of ids_
    _keeps_rows = False
    _X: Array  # (n, J), where rows are kept

    def _kernel(self, X: Array, weight: Array | None) -> Any:
        if not isinstance(self.kernel, str):
            return self.kernel
        gamma = self.gamma
        if isinstance(gamma, str):
            if gamma not in ("scale", "auto"):
                raise ValueError(f"gamma must be 'scale', 'auto' or a number > 0, got {gamma!r}")
            spread = X.shape[1] * (variance(X, weight) if gamma == "scale" else 1.0)
            gamma = 1.0 / spread if spread > 0 else 1.0
        made: dict[str, Any] = {
            "linear": Linear,
            "rbf": lambda: RBF(gamma=gamma),
            "laplacian": lambda: Laplacian(gamma=gamma),
            "poly": lambda: Polynomial(self.degree, gamma=gamma, coef0=self.coef0),
        }
        if self.kernel not in made:
            raise ValueError(
                f"kernel must be one of {', '.join(made)}, or a function (x1, x2) -> Gram; got {self.kernel!r}"
            )
        return made[self.kernel]()

    def _learn(self, X: Any, y: Any, sample_weight: Any, first: bool, classes: Any = None) -> Self:
        with all_or_nothing(self):
            X, y = validate_data(self, X, y, dtype=NUMPY_FLOAT_DTYPES, reset=first)
            weight = sample_weight
            if weight is not None:
                weight = _check_sample_weight(weight, X, dtype=np.float64, ensure_non_negative=True)
            if first:
                self._learn_classes(y if classes is None else classes, weight if classes is None else None)
            index = self._encode(y, advice=NAME_CLASSES)
            if weight is not None:  # samples of weight zero are ignored
                X, index, weight = X[weight > 0], index[weight > 0], weight[weight > 0]
            held = np.zeros(0, dtype=np.int64) if first else self._labels
            labels = np.concatenate([held, index])
            machine = self._machine(self._kernel(X, weight), len(self.classes_)) if first else self.machine_
            if first:
                self._set_C(machine, labels)
            more = {} if weight is None else {"weight": self._here(weight)}
            machine.add(self._here(X), self._here(index), **more)
            self.machine_, self._labels, self.ids_ = machine, labels, machine.ids.cpu().numpy()
            if self._keeps_rows:
                self._X = X.copy() if first else np.concatenate([self._X, X])
        self._follow_counts(first)
        return self

    def partial_unfit(self, ids: Any) -> Self:
        """Unlearn the samples with these ids (B,) of ``ids_`` exactly. Balanced class weights are updated as well."""
        check_is_fitted(self, "machine_")
        self.machine_.remove(ids)
        kept = np.isin(self.ids_, self.machine_.ids.cpu().numpy())
        self.ids_, self._labels = self.ids_[kept], self._labels[kept]
        if self._keeps_rows:
            self._X = self._X[kept]
        self._follow_counts(False)
        return self

    def _follow_counts(self, solved: bool) -> None:
        """Compute balanced weights again after a change of samples. The calibration is fitted again when it is next needed."""
        self._fitted_maps: list[Calibration] = []  # a list: predictions may not set attributes
        if not solved and isinstance(self.class_weight, str) and len(self._labels):
            self._set_C(self.machine_, self._labels)

    def _class_C(self, labels: Array) -> Array | None:
        """Return C times the weight of each class (K,), or None without class weights. labels: (n,), of all samples."""
        weight = self._check_class_weight(self.class_weight)
        if weight is None:
            return None
        if isinstance(weight, str):
            checks.one_of(weight, "class_weight (or a dict)", ("balanced",))
            counts = np.bincount(labels, minlength=len(self.classes_))
            weight = len(labels) / (np.count_nonzero(counts) * np.maximum(counts, 1))
        out: Array = self.C * np.asarray(check_class_weight(weight, len(self.classes_), torch.device("cpu")))
        return out

    def label_errors(self, ids: Any = None) -> LabelErrors:
        """Rank the samples by how suspicious their labels are, based on scores of machines that never saw them.

        ``found.order`` contains indices into ``ids_``, the most suspicious first. Pass ``ids`` (n,) to name the samples in
        ``found.events``.
        """
        check_is_fitted(self, "machine_")
        labels = torch.from_numpy(self._labels)
        return from_scores(self._left_out_scores().cpu(), labels, ids, classes=self.classes_.tolist())

    def predict_proba(self, X: Any) -> Array:
        """Predict probabilities (B, K) with a temperature that is fitted to out-of-sample scores."""
        scores = self._scores(X).cpu()
        if not self._fitted_maps:
            labels = torch.from_numpy(self._labels)
            weight = torch.ones(len(labels), dtype=torch.float64)
            self._fitted_maps.append(fit_calibration(self._left_out_scores().cpu(), labels, weight, "temperature"))
        out: Array = self._fitted_maps[0](scores).numpy()
        return out

    if TYPE_CHECKING:

        def _machine(self, kernel: Any, classes: int) -> Any: ...

        def _set_C(self, machine: Any, labels: Array) -> None: ...

        def _left_out_scores(self) -> Tensor: ...

    def _here(self, values: Array) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(values), device=self.device)

    def _scores(self, X: Any) -> Tensor:
        check_is_fitted(self, "machine_")
        X = validate_data(self, X, reset=False, dtype=NUMPY_FLOAT_DTYPES)
        scores: Tensor = self.machine_(self._here(X))
        return scores


class KernelLSSVMClassifier(KernelClassifier):
    """Kernel least-squares SVM classifier that unlearns samples exactly.

    ``machine_`` is the :class:`~torchlssvm.KernelLSSVM`. ``ids_`` holds the ids of its samples, in the order of addition.

    Args:
        kernel: ``"rbf"``, ``"linear"``, ``"poly"``, ``"laplacian"``, a kernel of :mod:`torchlssvm.kernels` or a function.
        C: the penalty of an error.
        class_weight: factors of C for each class: None, ``"balanced"`` (n / (K n_k) for K classes) or a dict from labels to
            weights. Balanced weights are computed again after each change of samples, which takes one solve.
        gamma: ``"scale"`` (1 / (J var(X)), as in scikit-learn's SVC), ``"auto"`` (1 / J) or a number. ``"scale"`` uses the
            samples of ``fit`` or of the first ``partial_fit``, and does not change later.
        degree: the degree of ``"poly"``.
        coef0: the constant term of ``"poly"``.
        bias: whether the model has an intercept b.
        device: the device of the machine.
    """

    def __init__(
        self, kernel: Any = "rbf", *, C: float = 1.0, gamma: Any = "scale", degree: int = 3, coef0: float = 1.0,
        class_weight: Any = None, bias: bool = True, device: Any = None,
    ):  # fmt: skip
        self.kernel, self.C, self.gamma, self.degree, self.coef0 = kernel, C, gamma, degree, coef0
        self.class_weight, self.bias, self.device = class_weight, bias, device

    def fit(self, X: Any, y: Any) -> Self:
        """Learn from scratch. X: (n, J); y: (n,)."""
        return self._learn(X, y, None, True)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Self:
        """Learn more samples. The first call needs all ``classes``, or two of them in y. New ids are appended."""
        return self._learn(X, y, None, not hasattr(self, "machine_"), classes)

    def _machine(self, kernel: Any, classes: int) -> Any:
        return KernelLSSVM(kernel, C=self.C, num_classes=classes, bias=self.bias, device=self.device)

    def _set_C(self, machine: Any, labels: Array) -> None:
        C = self._class_C(labels)
        if C is not None:
            machine.set_C(torch.from_numpy(C))

    def _left_out_scores(self) -> Tensor:
        scores: Tensor = self.machine_.leave_one_out()
        return scores


class IncrementalSVC(KernelClassifier):
    """Support vector classifier that learns and unlearns samples exactly. Several classes are separated one against one.

    ``machine_`` is the :class:`~torchlssvm.IncrementalSVM`, and ``ids_`` the ids of its samples. Probabilities and label errors
    are computed from out-of-sample scores: five copies of the machine each unlearn a fifth of each class and score that fifth.

    C is the upper bound of the coefficients. The other arguments are those of :class:`KernelLSSVMClassifier`.
    """

    def __init__(
        self, kernel: Any = "rbf", *, C: float = 1.0, gamma: Any = "scale", degree: int = 3, coef0: float = 1.0,
        class_weight: Any = None, device: Any = None,
    ):  # fmt: skip
        self.kernel, self.C, self.gamma, self.degree, self.coef0 = kernel, C, gamma, degree, coef0
        self.class_weight, self.device = class_weight, device

    _keeps_rows = True

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from scratch. X: (n, J); y: (n,); sample_weight: (n,) factors of C, where 0 ignores a sample."""
        return self._learn(X, y, sample_weight, True)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Learn more samples. The first call needs all ``classes``, or two of them in y. New ids are appended."""
        return self._learn(X, y, sample_weight, not hasattr(self, "machine_"), classes)

    def _machine(self, kernel: Any, classes: int) -> Any:
        machine = IncrementalSVM(kernel, C=self.C, device=self.device)
        return machine if classes == 2 else OneVsOne(machine, classes)

    def _set_C(self, machine: Any, labels: Array) -> None:
        C = self._class_C(labels)
        if C is None:
            return
        if len(C) == 2:
            machine.set_C(tuple(C.tolist()))
            return
        for pair, (i, j) in zip(machine.machines, machine.tasks, strict=True):
            pair.set_C((float(C[j]), float(C[i])))  # the first of a pair is class 1 of its machine

    def _left_out_scores(self) -> Tensor:
        by_class = np.argsort(self._labels, kind="stable")
        fold = np.empty_like(by_class)
        fold[by_class] = np.arange(len(by_class)) % FOLDS
        scores = torch.zeros(len(self.ids_), len(self.classes_), dtype=torch.float64)
        for f in np.unique(fold):
            without = copy.deepcopy(self.machine_).remove(torch.from_numpy(self.ids_[fold == f]))
            scores[torch.from_numpy(fold == f)] = without(self._here(self._X[fold == f])).cpu()
        return scores
