"""The kernel that a machine owns, kernels made of others on data far from the origin, and arrays that shrink."""

import copy

import numpy as np
import pytest
import torch

from tests.svm.truth import kkt, rbf
from torchlssvm import IncrementalSVM
from torchlssvm.kernels import RBF


def points(n=90, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=generator, dtype=torch.float64), (
        torch.rand(n, generator=generator) > 0.5
    ).long()


def test_a_machine_owns_its_kernel():
    x, y = points()
    kernel = RBF(gamma=0.5)
    svm, other = IncrementalSVM(kernel, C=3.0).fit(x, y), IncrementalSVM(kernel, C=3.0)
    kernel.gamma = 9.0
    other.load_state_dict(IncrementalSVM(RBF(gamma=2.0), C=3.0).fit(x, y).state_dict())
    assert svm.kkt_violation() < 1e-12
    assert (svm.kernel.gamma, other.kernel.gamma, kernel.gamma) == (0.5, 2.0, 9.0)


@pytest.mark.parametrize("how", ["a parameter", "another kernel"])
def test_a_kernel_that_changes_is_noticed(how):
    x, y = points()
    svm = IncrementalSVM(RBF(gamma=0.5), C=3.0).fit(x[:80], y[:80])
    if how == "a parameter":
        svm.kernel.gamma = 2.0
    else:
        svm.kernel = RBF(gamma=2.0)
    assert svm.kkt_violation() > 0.1
    svm.add(x[80:], y[80:])
    assert svm.kkt_violation() < 1e-12
    torch.testing.assert_close(svm.alpha, IncrementalSVM(RBF(gamma=2.0), C=3.0).fit(x, y).alpha, rtol=0, atol=1e-9)


@pytest.mark.parametrize("distance", [1e4, 1e6])
@pytest.mark.parametrize(
    "make", [lambda k: k, lambda k: 1.0 * k, lambda k: 0.5 * k + 0.5 * k], ids=["plain", "scaled", "sum"]
)
def test_two_clusters_far_apart(distance, make):
    x, y = points()
    x[45:] += distance
    svm = IncrementalSVM(make(RBF(gamma=0.5)), C=3.0).fit(x[:60], y[:60])
    for i in range(60, 90):
        svm.add(x[i : i + 1], y[i : i + 1])
    K = rbf(x.numpy(), x.numpy(), 0.5)
    assert kkt(K, 2.0 * y.numpy() - 1, np.full(90, 3.0), svm.alpha.numpy(), svm.b) < 1e-12
    torch.testing.assert_close((2.0 * y - 1) * svm.decision(x) - 1, svm.g, rtol=0, atol=1e-12)


def test_a_common_offset_and_most_samples_gone():
    x, y = points()
    svm = IncrementalSVM(2.0 * RBF(gamma=0.5), C=3.0).fit(x + 1000.0, y)
    for i in range(70):
        svm.remove([i])
    assert svm.kkt_violation() < 1e-12


def test_arrays_shrink():
    x, y = points(3000)
    svm = IncrementalSVM(RBF(gamma=0.5), C=3.0).fit(x, y)
    svm.remove(svm.ids[60:])
    small = copy.deepcopy(svm)
    assert svm._solver.samples.capacity < 1000
    assert svm.add(x[:1], y[:1]).tolist() == [3000] == small.add(x[:1], y[:1]).tolist()
    torch.testing.assert_close(svm.alpha, small.alpha, rtol=0, atol=1e-10)
    assert svm.kkt_violation() < 1e-12
