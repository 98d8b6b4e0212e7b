"""Paths on a shared tableau: its columns against dense algebra, both ways of walking against each other and against refits."""

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from tests.test_incremental_svm import blobs
from torchlssvm import IncrementalSVM
from torchlssvm.errors import ConvergenceError
from torchlssvm.functional import loops, svm_tableau
from torchlssvm.functional.svm_tableau import Pivot
from torchlssvm.kernels import RBF, Linear
from torchlssvm.machines import svm_lockstep
from torchlssvm.machines import svm_tableau as machine
from torchlssvm.machines.svm_lockstep import Lockstep

ENDLESS = float("inf")


def bordered(seed, n=9):
    """M = [[0, y^T], [y, Q]]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    y = torch.where(torch.rand(n, generator=generator) < 0.5, -1.0, 1.0).double()
    M = torch.zeros(n + 1, n + 1, dtype=torch.float64)
    M[0, 1:] = M[1:, 0] = y
    M[1:, 1:] = torch.exp(-0.5 * torch.cdist(x, x) ** 2) * torch.outer(y, y)
    return M


def dense(M, P):
    """Every column of the tableau, as a row, from the inverse of M_PP."""
    n = len(M)
    O = [i for i in range(n) if i not in P]
    R = torch.linalg.inv(M[P][:, P])
    T = torch.zeros_like(M)
    for at, k in enumerate(P):
        T[k, P], T[k, O] = R[:, at], M[O][:, P] @ R[:, at]
    for k in O:
        beta = -R @ M[P, k]
        T[k, P], T[k, O] = beta, M[O, k] + M[O][:, P] @ beta
    return T


def pivots(M, P, keys):
    """The pivots of these events one after the other, each from a dense tableau, and the last tableau."""
    found = []
    for k in keys:
        u = dense(M, P)[k].clone()
        p, u[k] = float(u[k]), 1.0
        found.append((k, p, u))
        P = sorted(set(P) ^ {k})
    return found, dense(M, P)


events = st.lists(st.integers(2, 9), max_size=6)


@given(st.integers(0, 10_000), events, st.integers(2, 9))
def test_columns_after_pivots_are_those_of_the_new_sets(seed, keys, j):
    M, P = bordered(seed), [0, 1, 2, 3, 4, 5]
    found, want = pivots(M, P, keys)
    start = dense(M, P)
    u, size = start[[j, 6]].clone(), torch.zeros(2, dtype=torch.float64)
    # the second path has no events
    both = [
        Pivot(torch.tensor([k, 0]), torch.tensor([1 / p, 0.0], dtype=torch.float64), torch.stack([w, 0 * w]))
        for k, p, w in found
    ]
    if both:
        svm_tableau.column_(u, torch.tensor([j, 6]), size, both)
    scale = float(want.abs().max() + start.abs().max())
    torch.testing.assert_close(u[0], want[j], rtol=0, atol=1e-10 * scale**2)
    assert torch.equal(u[1], start[6])
    compiled = loops.load("svm_tableau_loops")
    if compiled is None:
        return
    W = torch.stack([w for _, _, w in found] or [start[0]]).numpy()
    ks = torch.tensor([k for k, _, _ in found], dtype=torch.int64).numpy()
    ps = torch.tensor([p for _, p, _ in found], dtype=torch.float64).numpy()
    last = max([e for e, k in enumerate(keys) if k == j], default=-1)
    base, factor = (W[last].copy(), 1 / ps[last]) if last >= 0 else (start[j].numpy(), 1.0)
    out = torch.empty_like(want[j])
    room = torch.zeros(len(keys) + 1, dtype=torch.float64).numpy()
    compiled.column(base, factor, last + 1, j, ks, ps, W, len(keys), room, out.numpy())
    torch.testing.assert_close(out, u[0], rtol=0, atol=1e-12 * scale**2)


@given(st.integers(0, 10_000))
def test_the_first_event_is_where_a_bound_is_met(seed):
    generator = torch.Generator().manual_seed(seed)
    rate = torch.randn(1, 20, generator=generator, dtype=torch.float64) * (torch.rand(20, generator=generator) < 0.8)
    x = torch.rand(1, 20, generator=generator, dtype=torch.float64)
    lower = torch.where(torch.rand(1, 20, generator=generator) < 0.3, -ENDLESS, 0.0).double()
    upper = torch.where(torch.rand(1, 20, generator=generator) < 0.3, ENDLESS, 1.0).double()
    inside = torch.rand(1, 20, generator=generator) < 0.5
    t, k = svm_tableau.first_event(rate, x, lower, upper, inside, torch.ones(1, dtype=torch.float64), 1e-15)
    if t < ENDLESS:
        end = x + t * rate
        assert bool((end >= lower - 1e-12).all() and (end <= upper + 1e-12).all())
        assert min(float(abs(end - lower)[0, k]), float(abs(end - upper)[0, k])) < 1e-12
    compiled = loops.load("svm_tableau_loops")
    if compiled is not None:
        arrays = [v[0].numpy() for v in (rate, x, lower, upper, inside.double())]
        step, at = compiled.first_event(*arrays, 1e-15, 1.0, ENDLESS)
        assert step == pytest.approx(float(t), rel=1e-14)
        assert at == (int(k) if t < ENDLESS else -1)


def test_rates_that_are_rounding_have_no_events():
    one = torch.ones(1, 2, dtype=torch.float64)
    rate, inside = torch.tensor([[1.0, -1e-15]]).double(), torch.tensor([[True, False]])
    t, k = svm_tableau.first_event(rate, one, 0 * one, torch.tensor([[3.0, 9.0]]).double(), inside, one[0, :1], 1e-14)
    assert (float(t), int(k)) == (2.0, 0)


def both_ways(svm, **options):
    """Leave-one-out compiled and with tensors."""
    compiled = svm.leave_one_out(**options).margin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "load", lambda name: None)
        return compiled, svm.leave_one_out(**options).margin


@st.composite
def problems(draw):
    """Small, with duplicates, one class nearly missing, C tiny or huge."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    n = draw(st.integers(5, 30))
    x = torch.randn(n, draw(st.integers(2, 4)), generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        x = x[torch.randint(max(3, n // 2), (n,), generator=generator)]
    if draw(st.booleans()):
        y = torch.zeros(n, dtype=torch.int64)
        y[: draw(st.integers(1, 2))] = 1
    else:
        y = torch.arange(n) % 2
    kernel = draw(st.sampled_from([RBF(sigma=1.0), RBF(sigma=0.2), Linear()]))
    return x, y, kernel, draw(st.sampled_from([1e-4, 0.1, 1.0, 10.0, 1e4]))


@settings(max_examples=60)
@given(problems(), st.booleans())
def test_both_ways_and_the_sequential_walk_agree(problem, early_exit):
    pytest.importorskip("numba")
    x, y, kernel, C = problem
    try:
        svm = IncrementalSVM(kernel, C=C).fit(x, y)
        alone = svm.leave_one_out(early_exit=early_exit, batched=False).margin
    except ConvergenceError:  # points so close that rounding makes them dependent
        reject()
    before = svm.alpha
    compiled, tensors = both_ways(svm, early_exit=early_exit)
    torch.testing.assert_close(compiled, tensors, rtol=1e-9, atol=1e-9)
    assert torch.equal(svm.alpha, before)
    wrong = alone < -1.0
    right = ~wrong | (not early_exit)
    torch.testing.assert_close(compiled[right], alone[right], rtol=1e-8, atol=1e-8)
    sure = (alone + 1.0).abs() > 1e-8
    assert torch.equal((compiled < -1.0)[sure], wrong[sure])


def machine_of(n=150, C=5.0):
    x, y = blobs(n, d=4)
    svm = IncrementalSVM(RBF(sigma=1.0), C=C).fit(x, y)
    svm._engine.walker.settle()
    s, m = svm._engine.samples, svm._engine.margin
    return svm, s, m, (s.alpha > 0).nonzero()[:, 0]


@pytest.mark.parametrize("compiled", [True, False])
def test_what_is_not_looked_at_is_looked_at_when_it_matters(monkeypatch, compiled):
    if compiled:
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(loops, "load", lambda name: None)
    _, s, m, support = machine_of()
    want = Lockstep(s, m, support, -ENDLESS).run()
    monkeypatch.setattr(machine, "LEAST", 1)
    monkeypatch.setattr(machine, "SHARE", 10**9)
    monkeypatch.setattr(machine, "PART", 7)
    monkeypatch.setattr(svm_lockstep, "AGAIN", 20)
    few = Lockstep(s, m, support, -ENDLESS)
    seen = few.tableau.N
    found = few.run()
    assert seen < few.tableau.N
    torch.testing.assert_close(found, want, rtol=0, atol=1e-11)
    monkeypatch.setattr(svm_lockstep, "AGAIN", 1)
    assert bool(Lockstep(s, m, support, -ENDLESS).run().isnan().any())  # left to the sequential walk


@pytest.mark.parametrize("room", [2**22, 64])
def test_columns_that_paths_lack_are_computed_when_they_do(monkeypatch, room):
    pytest.importorskip("numba")
    _, s, m, support = machine_of()
    want = Lockstep(s, m, support, -ENDLESS)
    result = want.run()
    monkeypatch.setattr(svm_lockstep, "EAGER", 0)
    monkeypatch.setattr(svm_lockstep, "ROOM", room)
    lazy = Lockstep(s, m, support, -ENDLESS)
    torch.testing.assert_close(lazy.run(), result, rtol=0, atol=1e-12)
    assert lazy.tableau.m < lazy.tableau.rows < want.tableau.rows == want.tableau.N


def test_the_end_of_a_path_is_checked_and_corrected():
    _, s, m, support = machine_of()
    paths = Lockstep(s, m, support, -ENDLESS)
    t = paths.tableau
    moved, beta = (torch.zeros(len(support), t.N, dtype=torch.float64) for _ in range(2))
    assert bool(paths._together(torch.arange(len(support)), moved, beta).all())
    want, found = t.ends(paths.c, moved, beta)
    assert not len(found)
    assert not bool(want.isnan().any())
    inside = (beta != 0) & (torch.rand(beta.shape, generator=torch.Generator().manual_seed(0)) < 0.3)
    inside[:, 0] = True
    mended, _ = t.ends(paths.c, moved + 1e-8 * inside, beta)
    sure = ~mended.isnan()  # the others end with a sample within 1e-8 of the margin
    assert float(sure.double().mean()) > 0.9
    torch.testing.assert_close(mended[sure], want[sure], rtol=0, atol=1e-13)
    assert bool(t.ends(paths.c, moved + 1e-4 * inside, beta)[0].isnan().all())


@pytest.mark.parametrize("batched", [True, False])
def test_leave_one_out_is_exact_where_rounding_is_not_small(batched):
    # alpha up to 1e4 and a wide kernel: without a correction at their ends the paths would be off by 4e-6
    x, y = blobs(60, d=2)
    svm = IncrementalSVM(RBF(sigma=3.0), C=1e4).fit(x, y)
    found = svm.leave_one_out(batched=batched).margin
    for c in [*svm.margin.tolist(), *svm.error[:4].tolist()]:
        keep = torch.arange(60) != c
        rest = IncrementalSVM(RBF(sigma=3.0), C=1e4).fit(x[keep], y[keep])
        want = (2.0 * float(y[c]) - 1) * float(rest.decision(x[c : c + 1])) - 1
        assert float(found[c]) == pytest.approx(want, abs=1e-8)
