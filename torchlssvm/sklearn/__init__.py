"""scikit-learn estimators that wrap the heads and kernel machines of this library. They need the extra ``torchlssvm[sklearn]``.

>>> from sklearn.datasets import load_iris
>>> from sklearn.model_selection import cross_val_score
>>> X, y = load_iris(return_X_y=True)
>>> clf = LSSVMClassifier(alphas="path").fit(X, y)  # rho by exact leave-one-out, out of 100 values
>>> bool(cross_val_score(clf, X, y).mean() > 0.8)
True
>>> clf.partial_unfit(X[:10], y[:10]).head_.n  # exactly the classifier that never saw them, with the same rho
140
"""

from torchlssvm.sklearn.kernel import IncrementalSVC, KernelLSSVMClassifier
from torchlssvm.sklearn.linear import LSSVMClassifier, LSSVMRegressor, MarginClassifier
from torchlssvm.sklearn.transformers import ModuleTransformer, RandomFeatures

__all__ = [
    "IncrementalSVC",
    "KernelLSSVMClassifier",
    "LSSVMClassifier",
    "LSSVMRegressor",
    "MarginClassifier",
    "ModuleTransformer",
    "RandomFeatures",
]
