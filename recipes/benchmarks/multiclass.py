"""Compare one-against-the-rest with one-against-one by accuracy and time of LSSVMClassifier on four data sets.

    OMP_NUM_THREADS=1 python recipes/benchmarks/multiclass.py

The data sets are iris, wine, digits and covtype (20,000 samples from the folder that TORCHLSSVM_DATA names, skipped without
it). Accuracies are means of five folds. The rule of ``multiclass="auto"`` (pairs for 3 to 10 classes and at most 512 features)
is based on this table.
"""

from __future__ import annotations

import gzip
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits, load_iris, load_wine
from sklearn.model_selection import StratifiedKFold, cross_val_score

from torchlssvm.sklearn import LSSVMClassifier

COVTYPE_SAMPLES = 20_000
"""Samples of covtype: five folds then take seconds."""


def covtype(folder: Path) -> tuple[Any, Any]:
    """Draw samples of covtype (54 features, 7 classes), always the same ones."""
    with gzip.open(folder / "covtype" / "covtype.data.gz") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    rows = np.random.default_rng(0).permutation(len(table))[:COVTYPE_SAMPLES]
    return table[rows, :-1].astype(np.float64), table[rows, -1].astype(np.int64)


def main() -> dict[str, dict[str, float]]:
    sets = {load.__name__[5:]: load(return_X_y=True) for load in (load_iris, load_wine, load_digits)}
    folder = os.environ.get("TORCHLSSVM_DATA")
    if folder:
        sets["covtype"] = covtype(Path(folder))
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    print("| data | n, J, K | one against the rest, % | one against one, % | seconds of a fit |\n|---|---|---|---|---|")
    results: dict[str, dict[str, float]] = {}
    for name, (X, y) in sets.items():
        found: dict[str, float] = {}
        for kind in ("ovr", "ovo"):
            model = LSSVMClassifier(multiclass=kind, scale="std")
            found[kind] = float(cross_val_score(model, X, y, cv=folds).mean())
            start = time.perf_counter()
            model.fit(X, y).predict(X[:1])
            found[f"{kind}_seconds"] = time.perf_counter() - start
        size = f"{X.shape[0]:,}, {X.shape[1]}, {len(np.unique(y))}"
        both = f"{found['ovr_seconds']:.3f}, {found['ovo_seconds']:.3f}"
        print(f"| {name} | {size} | {100 * found['ovr']:.1f} | {100 * found['ovo']:.1f} | {both} |", flush=True)
        results[name] = found
    return results


if __name__ == "__main__":
    main()
