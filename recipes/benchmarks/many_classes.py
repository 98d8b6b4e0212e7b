"""Compare least squares, a random lift and logistic regression on many classes and few features.

    OMP_NUM_THREADS=1 python recipes/benchmarks/many_classes.py features.npz [--only rules]

The recipe prints the accuracy of each method and how well it finds wrong labels. The file must contain x_train, y_train,
x_test, y_test and layers_train, layers_test (n, layers, J), for example sentence vectors of Banking77 from an encoder with six
layers. The results are in docs/benchmarks/random_features.md and docs/benchmarks/choosing.md.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline

from torchlssvm import LSSVMHead
from torchlssvm.analysis.label_errors import find_label_errors
from torchlssvm.sklearn import LSSVMClassifier, RandomFeatures


def feature_sets(data: Any) -> dict[int, tuple[Any, Any]]:
    """Training and test features by their number: the last layer, random projections of it, and several layers."""
    x, test = data["x_train"].astype(np.float64), data["x_test"].astype(np.float64)
    rng, sets = np.random.default_rng(0), {}
    for J in (96, 192):
        P = rng.normal(size=(x.shape[1], J)) / np.sqrt(J)
        sets[J] = (x @ P, test @ P)
    sets[x.shape[1]] = (x, test)
    for layers in (2, 3, 6):
        parts = [data[f"layers_{name}"][:, -layers:].astype(np.float64) for name in ("train", "test")]
        unit = [(p / np.linalg.norm(p, axis=2, keepdims=True)).reshape(len(p), -1) for p in parts]
        sets[unit[0].shape[1]] = (unit[0], unit[1])
    return sets


def wrong_labels(x: Any, y: Any) -> None:
    """Give one sample in twenty another label, and print the average precision of each ranking."""
    K, rng = int(y.max()) + 1, np.random.default_rng(0)
    given, wrong = y.copy(), rng.choice(len(y), len(y) // 20, replace=False)
    given[wrong] = (y[wrong] + rng.integers(1, K, len(wrong))) % K
    head = LSSVMHead(x.shape[1], K, rho="gcv").add(x, given)
    for name, lift in (("leave-one-out", None), ("leave-one-out of 2,000 random features", 2000)):
        margins = find_label_errors(head, torch.from_numpy(x), torch.from_numpy(given), lift=lift).margins
        print(f"| {name} | {average_precision_score(given != y, -margins.numpy()):.3f} |", flush=True)
    for C in (1.0, 10.0):
        logistic = LogisticRegression(C=C, max_iter=200)
        p = cross_val_predict(logistic, x, given, cv=5, method="predict_proba")
        score = average_precision_score(given != y, -p[np.arange(len(y)), given])
        print(f"| logistic regression, 5-fold self-confidence, C = {C:g} | {score:.3f} |", flush=True)


def rules(data: Any) -> None:
    """Print the accuracy of least squares and of the discriminant, both from the same sums, with rho by GCV."""
    y, truth = torch.from_numpy(data["y_train"]).long(), torch.from_numpy(data["y_test"]).long()
    print("| features | least squares | discriminant |\n|---|---|---|")
    for J, (x, test) in feature_sets(data).items():
        heads = [LSSVMHead(J, int(y.max()) + 1, rule=rule).add(x, y) for rule in ("least_squares", "lda")]
        right = [(head.predict(torch.from_numpy(test)) == truth).double().mean() for head in heads]
        print(f"| {J:,} | " + " | ".join(f"{100 * share:.1f}" for share in right) + " |", flush=True)


def main(path: str, only_rules: bool) -> None:
    warnings.simplefilter("ignore")
    data = np.load(path)
    rules(data)
    if only_rules:
        return
    y, truth = data["y_train"], data["y_test"]
    print("| classes | features | least squares | RandomFeatures(2000) | logistic regression |\n|---|---|---|---|---|")
    for K in (20, 40, int(y.max()) + 1):
        for J, (x, test) in feature_sets(data).items():
            a, b = y < K, truth < K
            models = (
                LSSVMClassifier(multiclass="ovr"),
                make_pipeline(RandomFeatures(2000), LSSVMClassifier(multiclass="ovr")),
                LogisticRegression(C=10.0, max_iter=150),
            )
            scores = [100 * model.fit(x[a], y[a]).score(test[b], truth[b]) for model in models]
            print(f"| {K} | {J:,} | " + " | ".join(f"{score:.1f}" for score in scores) + " |", flush=True)
    wrong_labels(data["x_train"].astype(np.float64), y)


if __name__ == "__main__":
    main(sys.argv[1], "rules" in sys.argv[2:])
