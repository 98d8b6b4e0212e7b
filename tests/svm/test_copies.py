"""Many samples at once, when some are copies of others or lie in their span: against libsvm and the conditions themselves."""

import numpy as np
import pytest
import torch
from sklearn.svm import SVC

from tests.svm.truth import kkt, rbf
from torchlssvm import IncrementalSVM
from torchlssvm.kernels import RBF, Linear

GAMMA = 0.4


def copies(n, labels, seed=0, d=4):
    """n samples, a third of them copies of others, with labels that are equal, opposite, or either."""
    rng = np.random.RandomState(seed)
    x = rng.randn(n, d)
    y = (x[:, 0] + 0.5 * rng.randn(n) > 0).astype(int)
    to, of = rng.permutation(n)[: n // 3], rng.randint(0, n, n // 3)
    x[to] = x[of]
    if labels != "either":
        y[to] = y[of] if labels == "equal" else 1 - y[of]
    return torch.from_numpy(x), torch.from_numpy(y)


def check(svm, x, y, u, kernel):
    """Conditions from a Gram matrix made here, and decision values of libsvm, which are unique though alpha is not."""
    K = rbf(x.numpy(), x.numpy(), GAMMA) if isinstance(kernel, RBF) else x.numpy() @ x.numpy().T
    sign = 2.0 * y.numpy() - 1
    alpha = svm.alpha.numpy()
    assert kkt(K, sign, u, alpha, svm.b) <= 1e-11
    C = u.max()
    libsvm = SVC(C=C, kernel="precomputed", tol=1e-10, cache_size=500).fit(K, sign, sample_weight=u / C)
    values = K @ (alpha * sign)
    truth = libsvm.decision_function(K) - libsvm.intercept_[0]
    assert np.abs(values - truth).max() < 1e-4 * max(1.0, np.abs(truth).max())


def test_copies_with_weights_and_with_bounds_per_class():
    x, y = copies(300, "either", seed=1)
    weight = torch.from_numpy(np.random.RandomState(2).uniform(0.2, 3.0, 300))
    svm = IncrementalSVM(RBF(gamma=GAMMA), C=1.0).fit(x[:220], y[:220], weight[:220])
    svm.add(x[220:], y[220:], weight[220:], method="pivot")
    check(svm, x, y, weight.numpy(), svm.kernel)
    svm.set_C((1.0, 4.0))
    check(svm, x, y, (weight * torch.where(y == 1, 4.0, 1.0)).numpy(), svm.kernel)


@pytest.mark.parametrize("labels", ["equal", "opposite", "either"])
@pytest.mark.parametrize("kernel", [RBF(gamma=GAMMA), Linear()], ids=["rbf", "linear"])
def test_batches_removals_and_changes_of_C_with_many_copies(kernel, labels):
    x, y = copies(330, labels)
    svm = IncrementalSVM(kernel, C=1.0).fit(x[:230], y[:230])
    check(svm, x[:230], y[:230], np.ones(230), kernel)
    svm.add(x[230:], y[230:], method="pivot")
    check(svm, x, y, np.ones(330), kernel)
    for C in (2.0, 8.0, 0.5):
        svm.set_C(C)
        check(svm, x, y, np.full(330, C), kernel)
    gone = torch.arange(20, 120)
    svm.remove(gone.tolist(), method="pivot")
    keep = torch.ones(330, dtype=torch.bool)
    keep[gone] = False
    check(svm, x[keep], y[keep], np.full(230, 0.5), kernel)


def test_rows_in_the_cache_follow_a_batch_that_is_solved_anew():
    x, y = copies(700, "equal")
    svm = IncrementalSVM(RBF(gamma=GAMMA), C=5.0).fit(x[:500], y[:500])
    for i in range(480):
        svm.remove([i])
    svm.add(x[500:], y[500:])  # many more than are left, in buffers that need not grow
    svm.set_C(10.0)
    svm.remove(svm.ids[svm.alpha > 0][:5].tolist())
    assert svm.kkt_violation() <= 1e-11
