"""The incremental SVM on Ringnorm, German credit and Splice: libsvm's solution, and a dense one, after a sequence of changes."""

import numpy as np
import pytest
import torch

from tests.svm.truth import exact, kkt, libsvm, rbf
from torchlssvm import IncrementalSVM
from torchlssvm.kernels import RBF

FILES = {
    "ringnorm": "ringnorm/ringnorm.csv.gz",
    "german": "german/german_numeric.csv.gz",
    "splice": "splice/splice.csv.gz",
}
NAMED = [pytest.param(name, marks=pytest.mark.data(file), id=name) for name, file in FILES.items()]
HELD, MORE = 600, 60


def read(path, name):
    table = np.loadtxt(path / FILES[name], delimiter=",", skiprows=1)
    table = table[np.random.RandomState(0).permutation(len(table))]
    x, label = table[:, :-1], table[:, -1]
    if name == "ringnorm":
        return x, (label > 0).astype(int)
    if name == "german":
        return (x - x.mean(0)) / x.std(0), (label > 1).astype(int)
    return np.concatenate([x == k for k in (1, 2, 3, 4)], 1).astype(float), (label > 0).astype(int)


def changed(kernel, C, x, y):
    """HELD samples, MORE added one at a time and in one go, as many removed, C there and back."""
    svm = IncrementalSVM(kernel, C=C)
    tx, ty = torch.from_numpy(x), torch.from_numpy(y).long()
    svm.fit(tx[:HELD], ty[:HELD])
    for i in range(HELD, HELD + 20):
        svm.add(tx[i : i + 1], ty[i : i + 1])
    svm.add(tx[HELD + 20 : HELD + MORE], ty[HELD + 20 : HELD + MORE])
    for i in range(20):
        svm.remove([i])
    svm.remove(list(range(20, MORE)))
    svm.set_C(2 * C).set_C(C, method="path")
    return svm


@pytest.mark.parametrize("C", [1.0, 10.0])
@pytest.mark.parametrize("name", NAMED)
def test_after_changes_it_is_the_solution_of_what_is_left(data_path, name, C):
    x, y = read(data_path, name)
    if name == "splice":  # copies of a sample make alpha ambiguous; the next test has them
        _, first = np.unique(np.concatenate([x, y[:, None]], 1), axis=0, return_index=True)
        keep = np.sort(first)
        x, y = x[keep], y[keep]
    gamma = 1 / (x.shape[1] * x.var())
    svm = changed(RBF(gamma=gamma), C, x, y)
    left = slice(MORE, HELD + MORE)
    K, sign, u = rbf(x[left], x[left], gamma), 2.0 * y[left] - 1, np.full(HELD, C)
    assert svm.kkt_violation() < 1e-12
    assert kkt(K, sign, u, svm.alpha.numpy(), svm.b) < 1e-12
    alpha, b = exact(K, sign, u)
    assert np.abs(svm.alpha.numpy() - alpha).max() < 1e-9
    assert abs(svm.b - b) < 1e-9
    # libsvm keeps its kernel in float32: given the same rounded kernel it agrees
    rounded = K.astype(np.float32).astype(np.float64)
    own = IncrementalSVM("precomputed", C=C).fit(torch.from_numpy(rounded), torch.from_numpy(y[left]))
    assert np.abs(own.alpha.numpy() - libsvm(rounded, sign, u)[0]).max() < 1e-8


@pytest.mark.data(FILES["splice"])
@pytest.mark.parametrize("C", [1.0, 10.0])
def test_with_copies_of_samples_the_decision_is_libsvms(data_path, C):
    """Splice has them, some with both labels: alpha is one of many, f is not."""
    x, y = read(data_path, "splice")
    _, times = np.unique(x, axis=0, return_counts=True)
    copied = {row.tobytes() for row in np.unique(x, axis=0)[times > 1]}
    order = np.argsort([row.tobytes() not in copied for row in x], kind="stable")  # copies first
    x, y = x[order], y[order]
    gamma = 1 / (x.shape[1] * x.var())
    svm = changed(RBF(gamma=gamma), C, x, y)
    left = slice(MORE, HELD + MORE)
    assert len(np.unique(x[left], axis=0)) < HELD - 50
    K, sign, u = rbf(x[left], x[left], gamma), 2.0 * y[left] - 1, np.full(HELD, C)
    assert kkt(K, sign, u, svm.alpha.numpy(), svm.b) < 1e-12
    rounded = K.astype(np.float32).astype(np.float64)
    own = IncrementalSVM("precomputed", C=C).fit(torch.from_numpy(rounded), torch.from_numpy(y[left]))
    alpha, b = libsvm(rounded, sign, u)
    f = rounded @ (alpha * sign) + b
    assert np.abs(own.decision(torch.from_numpy(rounded)).numpy() - f).max() < 1e-8
