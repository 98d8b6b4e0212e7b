"""The base of the classifiers: labels and prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.wording import listed

NUMPY_FLOAT_DTYPES = (np.float64, np.float32)
Array = NDArray[Any]

NAME_CLASSES = "name all classes in the first call, partial_fit(X, y, classes=...)"
"""What to do about an unknown label of a sample to learn."""


class Classifier(ClassifierMixin):
    """The base of the classifiers. It converts labels to indices and back, and predicts classes from scores (B, K)."""

    classes_: Array
    _indicator: bool = False
    """True if samples have several labels, given as an array (n, K) of 0 and 1. ``classes_`` are then 0, 1, ..., K - 1."""

    def _encode(
        self, y: Any, refusal: type[ValueError] = ValueError, advice: str = "no sample was learned with this label"
    ) -> Array:
        if self._indicator:
            given = torch.from_numpy(np.ascontiguousarray(y))
            labels, _ = checks.targets(given, given, len(self.classes_), "multilabel")
            checks.binary(labels)
            return labels.numpy()
        index = np.searchsorted(self.classes_, y)
        index = np.clip(index, 0, len(self.classes_) - 1)
        unknown = self.classes_[index] != y
        if np.any(unknown):
            label, *_ = np.asarray(y)[unknown].tolist()
            classes = listed([repr(name) for name in self.classes_.tolist()])
            raise refusal(f"y holds {label!r}, which is not among classes {classes}: {advice}. Nothing was changed.")
        encoded: Array = index.astype(np.int64)
        return encoded

    def _learn_classes(self, y: Any, sample_weight: Any = None) -> None:
        check_classification_targets(y)
        self.classes_ = unique_labels(y)
        present = y if np.ndim(sample_weight) == 0 else np.asarray(y)[np.asarray(sample_weight) > 0]
        if len(np.unique(present)) < 2:
            raise ValueError("the data holds only one class: at least two classes are needed")

    def _check_class_weight(self, weight: Any) -> Any:
        """Convert a dict of class weights to an array (K,). Raises ValueError for an unknown label. Others do not change."""
        if not isinstance(weight, dict):
            return weight
        known = self.classes_.tolist()
        unknown = [label for label in weight if label not in known]
        if unknown:
            raise ValueError(f"class_weight names {unknown[0]!r}, which is not among classes {self.classes_!r}")
        return np.array([float(weight.get(label, 1.0)) for label in known])

    if TYPE_CHECKING:

        def _scores(self, X: Any) -> Tensor: ...

    def decision_function(self, X: Any) -> Array:
        """Return scores (B, K), or the scores (B,) of the second class if there are two classes."""
        scores: Array = self._scores(X).cpu().numpy()
        return scores[:, 1] if len(self.classes_) == 2 and not self._indicator else scores

    def predict(self, X: Any) -> Array:
        """Predict classes (B,), or zeros and ones (B, K) if samples have several labels."""
        if self._indicator:
            labels: Array = (self._scores(X) > 0).cpu().numpy().astype(np.int64)
            return labels
        best: Array = self._scores(X).argmax(1).cpu().numpy()
        out: Array = self.classes_[best]
        return out
