"""Estimators on kernel machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from torchlssvm.kernel_machines import KernelLSSVM, OneVsOne
from torchlssvm.kernels import RBF, Laplacian, Linear, Polynomial
from torchlssvm.sklearn.common import NUMPY_FLOAT_DTYPES, Array, Classifier
from torchlssvm.svm import IncrementalSVM


def variance(X: Array, weight: Array | None) -> float:
    """Variance of all entries of X (n, J), with weights (n,) of the rows: the same for a row of weight 2 and for two rows."""
    if weight is None:
        return float(X.var())
    mean = weight @ X.mean(1) / weight.sum()
    return float(weight @ np.square(X - mean).mean(1) / weight.sum())


class KernelClassifier(Classifier, BaseEstimator):
    """The base of the estimators on kernel machines: a kernel by its name."""

    machine_: Any

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
        X, y = validate_data(self, X, y, dtype=NUMPY_FLOAT_DTYPES, reset=first)
        weight = sample_weight
        if weight is not None:
            weight = _check_sample_weight(weight, X, dtype=np.float64, ensure_non_negative=True)
        if first:
            self._learn_classes(y if classes is None else classes, weight if classes is None else None)
        index = self._encode(y)
        if weight is not None:  # a sample of weight zero is none
            X, index, weight = X[weight > 0], index[weight > 0], weight[weight > 0]
        machine = self._machine(self._kernel(X, weight), len(self.classes_)) if first else self.machine_
        more = {} if weight is None else {"weight": self._here(weight)}
        machine.add(self._here(X), self._here(index), **more)
        self.machine_, self.ids_ = machine, machine.ids.cpu().numpy()
        return self

    def partial_unfit(self, ids: Any) -> Self:
        """Unlearn samples by their ids, which are in ``ids_``, exactly. ids: (B,)."""
        check_is_fitted(self, "machine_")
        self.machine_.remove(torch.as_tensor(np.asarray(ids, dtype=np.int64).reshape(-1)))
        self.ids_ = self.machine_.ids.cpu().numpy()
        return self

    if TYPE_CHECKING:

        def _machine(self, kernel: Any, classes: int) -> Any: ...

    def _here(self, values: Array) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(values), device=self.device)

    def _scores(self, X: Any) -> Tensor:
        check_is_fitted(self, "machine_")
        X = validate_data(self, X, reset=False, dtype=NUMPY_FLOAT_DTYPES)
        scores: Tensor = self.machine_(self._here(X))
        return scores


class KernelLSSVMClassifier(KernelClassifier):
    """Kernel LS-SVM. ``machine_`` is the :class:`~torchlssvm.KernelLSSVM`, ``ids_`` are its samples in the order of adding.

    Args:
        kernel: ``"rbf"``, ``"linear"``, ``"poly"``, ``"laplacian"``, a kernel of :mod:`torchlssvm.kernels` or a function.
        C: the penalty of an error.
        gamma: ``"scale"`` (1 / (J var(X)), as scikit-learn's SVC; of the first samples, if more come), ``"auto"`` (1 / J) or a
            number.
        degree: of ``"poly"``.
        coef0: of ``"poly"``.
        bias: whether there is a b.
        device: where the machine lives.
    """

    def __init__(
        self, kernel: Any = "rbf", *, C: float = 1.0, gamma: Any = "scale", degree: int = 3, coef0: float = 1.0,
        bias: bool = True, device: Any = None,
    ):  # fmt: skip
        self.kernel, self.C, self.gamma, self.degree, self.coef0 = kernel, C, gamma, degree, coef0
        self.bias, self.device = bias, device

    def fit(self, X: Any, y: Any) -> Self:
        """Learn from scratch. X: (n, J); y: (n,)."""
        return self._learn(X, y, None, True)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Self:
        """Learn more samples; the first call needs ``classes``, all that will come, or two of them in y. New ids come last."""
        return self._learn(X, y, None, not hasattr(self, "machine_"), classes)

    def _machine(self, kernel: Any, classes: int) -> Any:
        return KernelLSSVM(kernel, C=self.C, num_classes=classes, bias=self.bias, device=self.device)


class IncrementalSVC(KernelClassifier):
    """The exact incremental SVM; many classes one against one. ``machine_`` and ``ids_`` as in ``KernelLSSVMClassifier``.

    Args:
        kernel: ``"rbf"``, ``"linear"``, ``"poly"``, ``"laplacian"``, a kernel of :mod:`torchlssvm.kernels` or a function.
        C: the bound of the coefficients.
        gamma: ``"scale"`` (1 / (J var(X)), as scikit-learn's SVC; of the first samples, if more come), ``"auto"`` (1 / J) or a
            number.
        degree: of ``"poly"``.
        coef0: of ``"poly"``.
        device: where the machine lives.
    """

    def __init__(
        self, kernel: Any = "rbf", *, C: float = 1.0, gamma: Any = "scale", degree: int = 3, coef0: float = 1.0,
        device: Any = None,
    ):  # fmt: skip
        self.kernel, self.C, self.gamma, self.degree, self.coef0 = kernel, C, gamma, degree, coef0
        self.device = device

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from scratch. X: (n, J); y: (n,); sample_weight: (n,) factors of C, a sample of weight zero is none."""
        return self._learn(X, y, sample_weight, True)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Learn more samples; the first call needs ``classes``, all that will come, or two of them in y. New ids come last."""
        return self._learn(X, y, sample_weight, not hasattr(self, "machine_"), classes)

    def _machine(self, kernel: Any, classes: int) -> Any:
        machine = IncrementalSVM(kernel, C=self.C, device=self.device)
        return machine if classes == 2 else OneVsOne(machine, classes)
