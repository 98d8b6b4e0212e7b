"""Theorem 1 and its corollaries, each against the paper's printed formula (with the proof's misprints put right)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.dense import relative
from torchlssvm import CompactLSSVMHead, LSSVMHead
from torchlssvm.functional import theorem1

RHO, J, N = 0.7, 64, 200
I = torch.eye(J, dtype=torch.float64)


def trained(Phi, y):
    """Equations (3) and (4): the paper's own w and C. Phi: (J, N), y: (N,)."""
    inner = torch.linalg.inv(Phi.T @ Phi + RHO * torch.eye(Phi.shape[1], dtype=Phi.dtype))
    return Phi @ inner @ y, Phi @ inner @ Phi.T


@pytest.fixture(params=[LSSVMHead, CompactLSSVMHead])
def heads(request):
    """Samples, signs, and a head without intercept that has seen them: column 1 of w is the paper's w for y = -1/+1."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, J, generator=generator, dtype=torch.float64)
    label = torch.randint(2, (N,), generator=generator)
    options = {"grid": None} if request.param is LSSVMHead else {}
    head = request.param(J, 2, rho=RHO, intercept="none", **options).add(x, label)
    _ = head.w
    return x, label, 2.0 * label - 1.0, head


def agree(head, w, C):
    assert relative(head.w[:, 1], w) < 1e-11
    assert relative(head.C, C) < 1e-11
    assert relative(head.P, I - C) < 1e-11


def test_initial_training_is_equations_3_and_4(heads):
    x, _, y, head = heads
    agree(head, *trained(x.T, y.double()))


def test_corollary_1_incremental_single(heads):
    x, _, y, head = heads
    w, C = trained(x.T, y.double())
    phi, t = torch.randn(J, dtype=torch.float64), -1.0
    bottom = phi @ phi + RHO - phi @ C @ phi
    w_new = w + (C - I) @ phi * (phi @ w - t) / bottom
    C_new = C + torch.outer((C - I) @ phi, phi @ (C - I)) / bottom
    agree(head.add(phi[None], torch.tensor([0])), w_new, C_new)


def test_corollary_2_decremental_single(heads):
    x, label, y, head = heads
    w, C = trained(x.T, y.double())
    phi, t = x[5], y[5]
    bottom = -(phi @ phi) + RHO + phi @ C @ phi
    w_new = w - (C - I) @ phi * (phi @ w - t) / bottom
    C_new = C - torch.outer((C - I) @ phi, phi @ (C - I)) / bottom
    agree(head.remove(x[5:6], label[5:6]), w_new, C_new)


def test_corollary_3_incremental_batch(heads):
    x, _, y, head = heads
    w, C = trained(x.T, y.double())
    Phi_a, label_a = torch.randn(J, 9, dtype=torch.float64), torch.arange(9) % 2
    y_a = 2.0 * label_a.double() - 1.0
    inner = torch.linalg.inv(RHO * torch.eye(9, dtype=torch.float64) - Phi_a.T @ (C - I) @ Phi_a)
    w_new = w + (C - I) @ Phi_a @ inner @ (Phi_a.T @ w - y_a)
    C_new = C + (C - I) @ Phi_a @ inner @ Phi_a.T @ (C - I)
    agree(head.add(Phi_a.T, label_a), w_new, C_new)


def test_corollary_4_decremental_batch(heads):
    x, label, y, head = heads
    w, C = trained(x.T, y.double())
    Phi_r, y_r = x[:9].T, y[:9].double()
    inner = torch.linalg.inv(RHO * torch.eye(9, dtype=torch.float64) + Phi_r.T @ (C - I) @ Phi_r)
    w_new = w - (C - I) @ Phi_r @ inner @ (Phi_r.T @ w - y_r)
    C_new = C - (C - I) @ Phi_r @ inner @ Phi_r.T @ (C - I)
    agree(head.remove(x[:9], label[:9]), w_new, C_new)


def test_theorem_1_joint(heads):
    x, label, y, head = heads
    w, C = trained(x.T, y.double())
    x_a, label_a = torch.randn(7, J, dtype=torch.float64), torch.arange(7) % 2
    y_a = 2.0 * label_a.double() - 1.0
    Phi_c, Phi_d = torch.cat([x_a, x[:5]]).T, torch.cat([x_a, -x[:5]]).T
    y_c = torch.cat([y_a, -y[:5].double()])
    inner = torch.linalg.inv(RHO * torch.eye(12, dtype=torch.float64) - Phi_d.T @ (C - I) @ Phi_c)  # minus, as stated
    w_new = w + (C - I) @ Phi_c @ inner @ (Phi_d.T @ w - y_c)
    C_new = C + (C - I) @ Phi_c @ inner @ Phi_d.T @ (C - I)
    direct = trained(torch.cat([x[5:], x_a]).T, torch.cat([y[5:].double(), y_a]))
    assert relative(w_new, direct[0]) < 1e-11  # the printed formula is right ...
    wrong = torch.linalg.inv(RHO * torch.eye(12, dtype=torch.float64) + Phi_d.T @ (C - I) @ Phi_c)
    assert (
        relative(w + (C - I) @ Phi_c @ wrong @ (Phi_d.T @ w - y_c), direct[0]) > 1e-2
    )  # ... the proof's last line is not
    agree(head.update(add=(x_a, label_a), remove=(x[:5], label[:5])), w_new, C_new)


def update(inverse, change, U):
    """A_new^-1 = A^-1 - Z_a^T Z_a + Z_r^T Z_r."""
    Za, Zr = theorem1.halves(change, U)
    return inverse - Za.T @ Za + Zr.T @ Zr


@given(
    seed=st.integers(0, 2**31),
    adds=st.integers(0, 6),
    removes=st.integers(0, 6),
    absent=st.booleans(),
    J=st.integers(2, 9),
)
@settings(max_examples=200, deadline=None)
def test_inertia_rule(seed, adds, removes, absent, J):
    """The blocks factor exactly when A + Phi D Phi^T is positive definite (Haynsworth), whatever is removed."""
    if adds + removes == 0:
        return
    generator = torch.Generator().manual_seed(seed)
    held = torch.randn(8, J, generator=generator, dtype=torch.float64)
    A = torch.eye(J, dtype=torch.float64) + held.T @ held
    out = 2 * torch.randn(removes, J, generator=generator, dtype=torch.float64) if absent else held[:removes]
    rows = torch.cat([torch.randn(adds, J, generator=generator, dtype=torch.float64), out])
    d = torch.cat([torch.ones(adds), -torch.ones(removes)]).double() * (
        0.5 + torch.rand(adds + removes, generator=generator)
    )
    d = torch.where(d < -1, -torch.ones_like(d), d)
    new = A + rows.T @ (d[:, None] * rows)
    smallest = float(torch.linalg.eigvalsh(new)[0])
    if abs(smallest) < 1e-9:
        return
    U = torch.linalg.solve(A, rows.T).T
    change = theorem1.factor_change(rows @ U.T, d, adds)
    assert (int(change.info) == 0) == (smallest > 0)
    if smallest > 1e-3:
        updated = update(torch.linalg.inv(A), change, U)
        assert relative(updated, torch.linalg.inv(new)) < 1e-9
        assert torch.allclose(updated, updated.T, atol=1e-12)
