"""Feature maps as scikit-learn transformers, for a Pipeline."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from torchlssvm.features import Nystroem, RandomFourier, RandomReLU
from torchlssvm.functional import checks
from torchlssvm.kernels import RBF
from torchlssvm.sklearn.common import NUMPY_FLOAT_DTYPES, Array


def map_rows(module: torch.nn.Module, X: Any, batch_size: int, device: Any) -> Array:
    """Features (B, M), float64, of samples (B, ...), a batch at a time."""
    with torch.inference_mode():
        parts = [
            module(torch.as_tensor(X[a : a + batch_size], device=device)).double().cpu().numpy()
            for a in range(0, len(X), batch_size)
        ]
    out: Array = np.concatenate(parts)
    return out


class RandomFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Map rows to many random features, which helps if there are many classes and few columns.

    Args:
        n_components: the number of output features.
        kind: ``"relu"`` (:class:`~torchlssvm.features.RandomReLU`), ``"fourier"`` (:class:`~torchlssvm.features.RandomFourier`,
            for the RBF kernel) or ``"nystroem"`` (:class:`~torchlssvm.features.Nystroem`, for the RBF kernel). The map of
            ``"nystroem"`` contains rows of X, so fit it again after an erasure.
        gamma: the gamma of the RBF kernel: a number, ``"auto"`` (1 / J, which suits standardized columns) or ``"scale"``
            (1 / (J var(X))). ``"scale"`` depends on all rows of X, so fit the map again after an erasure. ``"relu"`` does not
            use gamma.
        seed: the seed of the map. The same seed gives the same map on every machine.
        batch_size: the number of rows mapped at a time.
        device: the device of the map.

    >>> from sklearn.datasets import load_digits
    >>> from sklearn.pipeline import make_pipeline
    >>> from torchlssvm.sklearn import LSSVMClassifier
    >>> X, y = load_digits(return_X_y=True)
    >>> clf = make_pipeline(RandomFeatures(500), LSSVMClassifier()).fit(X[:1000], y[:1000])
    >>> bool(clf.score(X[1000:], y[1000:]) > 0.94)
    True
    """

    def __init__(
        self, n_components: int = 2000, kind: str = "relu", *, gamma: Any = "auto", seed: int = 0, batch_size: int = 1024,
        device: Any = None,
    ):  # fmt: skip
        self.n_components, self.kind, self.gamma, self.seed = n_components, kind, gamma, seed
        self.batch_size, self.device = batch_size, device

    def fit(self, X: Any, y: Any = None) -> Self:
        """Draw the map for rows like X (n, J)."""
        X = validate_data(self, X, dtype=NUMPY_FLOAT_DTYPES)
        J, M = X.shape[1], self.n_components
        kind = checks.one_of(self.kind, "kind", ("relu", "fourier", "nystroem"))
        self._n_features_out = M
        self.module_: torch.nn.Module
        if kind == "relu":
            self.module_ = RandomReLU(J, M, seed=self.seed, device=self.device)
            return self
        spread = J * (float(X.var()) or 1.0 / J) if self.gamma == "scale" else J
        gamma = checks.positive(1.0 / spread if self.gamma in ("auto", "scale") else self.gamma, "gamma")
        if kind == "fourier":
            self.module_ = RandomFourier(J, M, gamma=gamma, seed=self.seed, device=self.device)
        else:
            rows = torch.as_tensor(X, device=self.device)
            self.module_ = Nystroem(RBF(gamma=gamma), M, seed=self.seed, device=self.device).fit(rows)
        return self

    def transform(self, X: Any) -> Array:
        """Return the features (B, M) of rows (B, J)."""
        check_is_fitted(self, "module_")
        X = validate_data(self, X, reset=False, dtype=NUMPY_FLOAT_DTYPES)
        return map_rows(self.module_, X, self.batch_size, self.device)


class ModuleTransformer(TransformerMixin, BaseEstimator):
    """A transformer that applies a frozen network, a :class:`~torchlssvm.features.LayerTaps` or any module to batches.

    Args:
        module: a module that maps batches (B, ...) to features (B, J). It stays in evaluation mode.
        batch_size: the number of samples mapped at a time.
        device: the device to which batches are moved. The module must be on this device.

    >>> from torchlssvm.sklearn import ModuleTransformer
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))
    >>> ModuleTransformer(net).fit_transform(np.zeros((3, 3, 4), dtype=np.float32)).shape
    (3, 5)
    """

    def __init__(self, module: Any, *, batch_size: int = 64, device: Any = None):
        self.module, self.batch_size, self.device = module, batch_size, device

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def fit(self, X: Any, y: Any = None) -> Self:
        """Do nothing, because the transformer learns nothing from X."""
        return self

    def transform(self, X: Any) -> Array:
        """Return the features (B, J) of samples (B, ...)."""
        return map_rows(self.module.eval(), X, self.batch_size, self.device)
