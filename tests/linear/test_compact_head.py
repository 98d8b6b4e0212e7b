"""The paper's form: Theorem 1 and its corollaries against dense solves, refusals, saving."""

from __future__ import annotations

import copy
import io
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.conftest import solve_dense
from torchlssvm import CompactLSSVMHead, NotFittedError, RemovalError

INTERCEPTS = ["free", "penalized", "none"]
J, K = 12, 3


def data(n: int = 90) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, J, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    return x, torch.arange(n) % K


def same(head: CompactLSSVMHead, x: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
    """w, b and C are those of a dense solve, and C is I - rho A^-1."""
    w, b = solve_dense(x, y, K, rho=head.rho, intercept=head.intercept, weight=weight)
    assert torch.allclose(head.w, w, rtol=0, atol=1e-10 * float(w.abs().max()))
    assert torch.allclose(head.b, b, rtol=0, atol=1e-10)
    rows = x - x.mean(0) if head.intercept == "free" else x
    if head.intercept == "penalized":
        rows = torch.nn.functional.pad(x, (0, 1), value=1.0)
    if weight is None:
        eye = torch.eye(rows.shape[1], dtype=torch.float64)
        C = eye - head.rho * torch.linalg.inv(head.rho * eye + rows.mT @ rows)
        assert torch.allclose(head.C, C, rtol=0, atol=1e-11)
        assert torch.allclose(head.P, eye - C, rtol=0, atol=1e-11)


@pytest.mark.parametrize("intercept", INTERCEPTS)
@pytest.mark.parametrize("rho", [1.0, 0.01])
def test_every_change_is_that_of_a_dense_solve(intercept: str, rho: float) -> None:
    x, y = data()
    head = CompactLSSVMHead(J, K, rho=rho, intercept=intercept)
    for a, b in pairwise([0, 1, 2, 5, 60]):  # Corollaries 1 and 3
        same(head.add(x[a:b], y[a:b]), x[:b], y[:b])
    same(head.remove(x[:1], y[:1]), x[1:60], y[1:60])  # Corollary 2
    same(head.remove(x[1:9], y[1:9]), x[9:60], y[9:60])  # Corollary 4
    same(head.update(add=(x[60:], y[60:]), remove=(x[9:20], y[9:20])), x[20:], y[20:])  # Theorem 1
    C = head.C.clone()
    y[20:24] = (y[20:24] + 1) % K
    same(head.relabel(x[20:24], (y[20:24] - 1) % K, y[20:24]), x[20:], y[20:])
    assert torch.equal(head.C, C)
    same(head.replace(x[20:22], y[20:22], x[:2], y[:2]), torch.cat([x[22:], x[:2]]), torch.cat([y[22:], y[:2]]))
    head.rho = 3.0
    same(head, torch.cat([x[22:], x[:2]]), torch.cat([y[22:], y[:2]]))
    assert head.counts.tolist() == torch.bincount(torch.cat([y[22:], y[:2]])).tolist()


@pytest.mark.parametrize("intercept", INTERCEPTS)
def test_many_rows_go_in_blocks(intercept: str) -> None:
    x, y = data(3000)
    head = CompactLSSVMHead(J, K, intercept=intercept).add(x[:2000], y[:2000])  # the initial training
    same(head, x[:2000], y[:2000])
    same(head.update(add=(x[2000:], y[2000:]), remove=(x[:1500], y[:1500])), x[1500:], y[1500:])


def test_weights_targets_and_leaving_one_out() -> None:
    x, y = data()
    weight = torch.rand(90, dtype=torch.float64) + 0.5
    same(CompactLSSVMHead(J, K).add(x, y, weight), x, y, weight)
    targets = torch.randn(90, K, dtype=torch.float64)
    same(CompactLSSVMHead(J, K).add(x, targets).remove(x[:5], targets[:5]), x[5:], targets[5:])
    for intercept in INTERCEPTS:
        head = CompactLSSVMHead(J, K, intercept=intercept).add(x, y)
        left = head.leave_one_out(x, y)[0]
        assert torch.allclose(left, head.remove(x[:1], y[:1])(x[:1])[0])


@pytest.mark.parametrize("intercept", INTERCEPTS)
def test_what_cannot_be_is_refused_and_changes_nothing(intercept: str) -> None:
    x, y = data()
    head = CompactLSSVMHead(J, K, intercept=intercept)
    with pytest.raises(NotFittedError):
        head(x)
    with pytest.raises(RemovalError):
        head.remove(x[:1], y[:1])
    head.add(x[:6], y[:6])
    before = {name: value.clone() for name, value in head.named_buffers()}
    for rows, labels in (
        (x[:1] + 100, y[:1]),
        (x[:6].repeat(2, 1), y[:6].repeat(2)),
        (x[:3], torch.zeros(3, dtype=torch.long)),
    ):
        with pytest.raises(RemovalError):
            head.remove(rows, labels)
    for bad in (x[:1, :3], x[:1] * float("nan")):
        with pytest.raises(ValueError, match="x"):
            head.add(bad, y[:1])
    with pytest.raises(ValueError, match="label"):
        head.add(x[:1], torch.tensor([K]))
    with pytest.raises(ValueError, match="rho"):
        head.rho = 0.0
    assert all(torch.equal(value, before[name]) for name, value in head.named_buffers())
    assert head.remove(x[:6], y[:6]).n == 0
    same(head.add(x, y), x, y)  # the last sample leaves no trace
    for options in ({"rho": -1.0}, {"intercept": "some"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            CompactLSSVMHead(J, K, **options)  # type: ignore[arg-type]


def test_it_is_saved_copied_and_keeps_its_precision() -> None:
    x, y = data()
    head = CompactLSSVMHead(J, K, rho=0.7).add(x, y)
    file = io.BytesIO()
    torch.save(head.state_dict(), file)
    file.seek(0)
    loaded = CompactLSSVMHead(J, K)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for other in (loaded, copy.deepcopy(head), head.half()):
        assert (other.rho, other.n, other.w.dtype) == (0.7, 90, torch.float64)
        same(copy.deepcopy(other).remove(x[:3], y[:3]), x[3:], y[3:])
    with pytest.raises(RuntimeError, match="intercept"):
        CompactLSSVMHead(J, K, intercept="none").load_state_dict(head.state_dict())
    assert {"w", "b", "C"} <= set(head.state_dict())
