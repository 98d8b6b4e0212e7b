"""Many samples at once, when some are copies of others or lie in their span: against libsvm and the conditions themselves."""

import numpy as np
import pytest
import torch
from sklearn.svm import SVC

from tests.svm_truth import kkt, rbf
from torchlssvm import IncrementalSVM
from torchlssvm.functional import svm_block
from torchlssvm.kernels import RBF, Linear
from torchlssvm.machines import svm_engine
from torchlssvm.machines.svm_exchange import anew, exchange

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


def test_copies_are_pivoted_and_do_not_need_a_walk(monkeypatch):
    x, y = copies(330, "equal", d=10)
    svm = IncrementalSVM(RBF(gamma=GAMMA), C=1.0).fit(x[:280], y[:280])

    def fail(*args, **kwargs):
        raise AssertionError("a walk")

    monkeypatch.setattr(svm_engine.Engine, "_approach", fail)
    monkeypatch.setattr(svm._engine.walker, "walk", fail)
    svm.add(x[280:], y[280:], method="pivot")
    svm.set_C(2.0)
    svm.remove(list(range(40)), method="pivot")
    assert svm._engine.last == "pivot"
    check(svm, x[40:], y[40:], np.full(290, 2.0), svm.kernel)
    S = svm._engine.margin.slot  # no two of them the same
    rows = svm._engine.samples.x[list(S)]
    assert len(torch.unique(rows, dim=0)) == len(S)


def test_copies_with_weights_and_with_bounds_per_class():
    x, y = copies(300, "either", seed=1)
    weight = torch.from_numpy(np.random.RandomState(2).uniform(0.2, 3.0, 300))
    svm = IncrementalSVM(RBF(gamma=GAMMA), C=1.0).fit(x[:220], y[:220], weight[:220])
    svm.add(x[220:], y[220:], weight[220:], method="pivot")
    check(svm, x, y, weight.numpy(), svm.kernel)
    svm.set_C((1.0, 4.0))
    check(svm, x, y, (weight * torch.where(y == 1, 4.0, 1.0)).numpy(), svm.kernel)


def test_copies_in_a_precomputed_kernel():
    x, y = copies(300, "either", seed=3)
    K = torch.from_numpy(rbf(x.numpy(), x.numpy(), GAMMA))
    svm = IncrementalSVM("precomputed", C=2.0).fit(K[:240, :240], y[:240])
    svm.add(K[240:], y[240:], method="pivot")
    check(svm, x, y, np.full(300, 2.0), RBF(gamma=GAMMA))


def test_a_pivot_that_fails_on_the_way_changes_nothing(monkeypatch):
    x, y = copies(330, "equal")
    svm = IncrementalSVM(RBF(gamma=GAMMA), C=1.0).fit(x, y)
    engine = svm._engine
    s, m = engine.samples, engine.margin
    before, b, members = engine.snapshot()["vectors"], svm.b, sorted(m.slot)
    order = [m.slot[i] for i in members]
    R = m.R[order][:, order]
    monkeypatch.setattr(svm_engine.Pivoting, "_found", lambda *args: None)
    assert not engine._pivot(list(range(30)))
    np.testing.assert_array_equal(engine.snapshot()["vectors"], before)
    assert svm.b == b
    assert sorted(m.slot) == members
    order = [m.slot[i] for i in members]
    torch.testing.assert_close(m.R[order][:, order], R, rtol=1e-8, atol=1e-8)
    assert svm.kkt_violation() <= 1e-12
    assert s.n == 330


def test_rows_in_the_cache_follow_a_batch_that_is_solved_anew():
    x, y = copies(700, "equal")
    svm = IncrementalSVM(RBF(gamma=GAMMA), C=5.0).fit(x[:500], y[:500])
    for i in range(480):
        svm.remove([i])
    svm.add(x[500:], y[500:])  # many more than are left, in buffers that need not grow
    assert svm._engine.last == "solve"
    s = svm._engine.samples
    for i in list(s.rows.row_of):
        torch.testing.assert_close(s.rows.get(i, s.n), s.compute(i), rtol=0, atol=1e-14)
    svm.set_C(10.0)
    svm.remove(svm.ids[svm.alpha > 0][:5].tolist())
    assert svm.kkt_violation() <= 1e-11


# -- the block forms of (13) and (14) ----------------------------------------------------------------------------------


def jacobian(Q, y):
    A = torch.zeros(len(y) + 1, len(y) + 1, dtype=torch.float64)
    A[0, 1:], A[1:, 0], A[1:, 1:] = y, y, Q
    return A


def problem(n, seed=0):
    x, labels = copies(n, "equal", seed)
    y = 2.0 * labels.double() - 1
    return torch.from_numpy(rbf(x.numpy(), x.numpy(), GAMMA)) * torch.outer(y, y), y, x


def test_independent_is_what_one_at_a_time_finds():
    Q, _y, x = problem(150)
    seen, first = set(), []
    for i, row in enumerate(x.tolist()):  # a copy is what has been seen before
        if tuple(row) not in seen:
            first.append(i)
        seen.add(tuple(row))
    kept, L = svm_block.independent(Q, torch.full((150,), 1e-11, dtype=torch.float64))
    assert kept.tolist() == first
    assert len(first) < 150
    torch.testing.assert_close(L @ L.T, Q[kept][:, kept], rtol=0, atol=1e-12)


def test_blocks_of_R_are_those_of_the_inverse():
    Q, y, _x = problem(90, seed=4)
    kept, R = svm_block.inverse(Q, y, 1e-11)
    Q, y = Q[kept][:, kept], y[kept]
    torch.testing.assert_close(R, torch.linalg.inv(jacobian(Q, y)), rtol=1e-8, atol=1e-8)
    out = torch.tensor([3, 8, 20])
    rest = torch.tensor([i for i in range(len(y)) if i + 1 not in out.tolist()])
    expected = torch.linalg.inv(jacobian(Q[rest][:, rest], y[rest]))
    shrunk = R.clone()
    assert svm_block.shrink_(shrunk, out)
    at = torch.cat([torch.zeros(1, dtype=torch.int64), rest + 1])
    torch.testing.assert_close(shrunk[at][:, at], expected, rtol=1e-8, atol=1e-8)
    assert float(shrunk[out].abs().max()) == 0.0
    H = jacobian(Q, y)[:, out]
    own = H[out].clone()
    H[out] = 0.0
    V, Gamma, _ = svm_block.schur(shrunk, H, own)
    torch.testing.assert_close(svm_block.grow_(shrunk, V, torch.linalg.cholesky(Gamma), out), R, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("count", [3, 60])  # R is updated, and made anew
def test_an_exchange_leaves_R_and_A_as_a_dense_inverse_has_them(count):
    x, y = copies(300, "equal")
    svm = IncrementalSVM(RBF(gamma=GAMMA), C=1.0).fit(x, y)
    s, m = svm._engine.samples, svm._engine.margin
    out = sorted(m.slot)[:count]
    into = [i for i in range(300) if i not in m.slot][:count]
    members = set(m.slot) - set(out) | set(into)
    rejected = exchange(m, out, into, s.block(torch.tensor(into)).numpy())
    assert set(m.slot) == members - set(rejected)
    for _ in range(2):
        at = torch.tensor(list(m.slot))
        used = [0, *m.slot.values()]
        A = jacobian(s.block(at, at), s.y[at])
        torch.testing.assert_close(m.A[used][:, used], A, rtol=0, atol=1e-14)
        torch.testing.assert_close(m.R[used][:, used] @ A, torch.eye(len(A), dtype=torch.float64), rtol=0, atol=1e-8)
        free = [k for k in range(m.slots) if k not in used]
        assert float(m.R[free].abs().sum() + m.R[:, free].abs().sum() + m.A[free].abs().sum()) == 0.0
        assert anew(m) == []
