"""Removing samples that are only roughly known: the bound holds, the estimate is right, and the head says what happened."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from tests.conftest import solve_dense
from torchlssvm import CompactLSSVMHead, FixedPoint, LSSVMHead, RemovalError, VerificationError, verify
from torchlssvm.functional.approximate import Approximation

GRID = FixedPoint(16.0, bits=26)
OPTIONS = [
    {"intercept": "free"},
    {"intercept": "penalized"},
    {"intercept": "none"},
    {"intercept": "free", "class_weight": "balanced"},
    {"intercept": "free", "compact": True},
]


def data(n: int = 80, J: int = 6, K: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, J, generator=generator, dtype=torch.float64) + 0.5
    return x, torch.arange(n) % K


def removed(
    options: dict[str, object], noise: torch.Tensor, rows: slice
) -> tuple[Approximation, torch.Tensor, torch.Tensor]:
    """The account, the error of w, and w by dense least squares on the other samples."""
    x, y = data()
    x, stays = GRID.snap(x), torch.ones(len(x), dtype=torch.bool)
    stays[rows] = False
    compact = "compact" in options
    head: Any = CompactLSSVMHead(6, 3, rho=0.5) if compact else LSSVMHead(6, 3, rho=0.5, grid=GRID, **options)  # type: ignore[arg-type]
    head.add(x, y)
    account = head.remove_approximate(x[rows] + noise, y[rows])
    w, _ = solve_dense(x[stays], y[stays], 3, rho=0.5, **{k: v for k, v in options.items() if k != "compact"})  # type: ignore[arg-type]
    return account, (head.w - w).norm(), w


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("delta", [1e-3, 0.1, 0.5])
def test_the_error_is_within_the_bound(options: dict[str, object], delta: float) -> None:
    generator = torch.Generator().manual_seed(2)
    for count in (1, 4):
        for _ in range(10):
            noise = torch.randn(count, 6, generator=generator, dtype=torch.float64)
            noise *= delta / noise.norm(dim=1, keepdim=True)
            account, error, _ = removed(options, noise, slice(0, count))
            assert error <= account.bound(delta) + 1e-6
            assert account.bound(2 * delta) > account.bound(delta)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_estimate_is_the_root_mean_square_error(options: dict[str, object]) -> None:
    generator = torch.Generator().manual_seed(3)
    sigma, squares = 1e-3, []
    for _ in range(200):
        noise = sigma * torch.randn(2, 6, generator=generator, dtype=torch.float64)
        account, error, _ = removed(options, noise, slice(3, 5))
        squares.append(float(error) ** 2)
    measured = (sum(squares) / len(squares)) ** 0.5
    assert account.estimate(sigma) == pytest.approx(measured, rel=0.2)


def test_without_noise_nothing_is_lost() -> None:
    account, error, _ = removed({"intercept": "free"}, torch.zeros(1, 6, dtype=torch.float64), slice(0, 1))
    assert error < 1e-12
    assert account.estimate(0.0) == account.bound(0.0) == 0.0
    assert account.samples == 1


def test_the_head_is_marked_and_stays_marked() -> None:
    x, y = data()
    head = LSSVMHead(6, 3, rho=1.0).add(x, y)
    assert head.uncertifiable is None
    head.remove_approximate(x[:1] + 1e-4, y[:1])
    assert "remove_approximate" in (head.uncertifiable or "")
    file = io.BytesIO()
    torch.save(head.state_dict(), file)
    file.seek(0)
    loaded = LSSVMHead(6, 3, rho=1.0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    merged = LSSVMHead(6, 3, grid=head.grid, rho=1.0).add(x, y)
    assert merged.uncertifiable is None
    for other in (loaded, copy.deepcopy(head), merged.merge(head)):
        assert other.uncertifiable == head.uncertifiable


def test_a_marked_head_does_not_verify() -> None:
    from torchlssvm.audit.certificate import Certificate

    x, y = data()
    head = LSSVMHead(6, 3, rho=1.0).add(x, y)
    head.remove_approximate(x[:1] + 1e-4, y[:1])
    event = {
        "event_id": "e",
        "kind": "remove",
        "position": 1,
        "time": "2026-01-01T00:00:00+00:00",
        "samples": 0,
        "commitments": [],
    }
    certificate = Certificate(
        [event],
        "00" * 32,
        0,
        "00" * 32,
        None,
        None,
        {"features": 6, "classes": 3},
        79,
        False,
        {},
        "x",
        "2026-01-01T00:00:00+00:00",
    )
    with pytest.raises(VerificationError, match="remove_approximate"):
        verify(certificate, head=head, allow_unsigned=True)


def test_features_that_are_always_zero() -> None:
    """Noise on them makes a sum of squares negative; the system stays positive definite, and later changes work."""
    x, y = data()
    x[:, 2] = 0
    head, truth = (LSSVMHead(6, 3, grid=FixedPoint(16.0), rho=1.0).add(x, y) for _ in range(2))
    account = head.remove_approximate(x[:2] + 0.01, y[:2])
    truth.remove(x[:2], y[:2])
    assert (head.w - truth.w).norm() <= account.bound(0.01 * 6**0.5) + 1e-6
    head.remove(x[2:10], y[2:10]).add(x[:1], y[:1])
    assert (head.w - truth.remove(x[2:10], y[2:10]).add(x[:1], y[:1]).w).norm() < 0.1
    assert head.drift() < 1e-9


def test_an_emptied_head_is_as_new() -> None:
    x, y = data()
    head = LSSVMHead(6, 3, grid=FixedPoint(16.0), rho=1.0).add(x, y)
    head.remove_approximate(x[:1] + 0.001, y[:1])
    head.remove(x[1:], y[1:])
    assert (head.n, head.uncertifiable) == (0, None)
    assert head.digest() == LSSVMHead(6, 3, grid=FixedPoint(16.0), rho=1.0).digest()


def test_refusals_leave_the_state() -> None:
    x, y = data()
    head = LSSVMHead(6, 3, rho=1.0).add(x, y)
    digest = head.digest()
    with pytest.raises(RemovalError):
        head.remove_approximate(100 + x[:1], y[:1])
    with pytest.raises(ValueError, match="label"):
        head.remove_approximate(x[:1], torch.tensor([7]))
    assert (head.digest(), head.uncertifiable) == (digest, None)
    with pytest.raises(ValueError, match="ovr"):
        LSSVMHead(6, 3, multiclass="ovo", rho=1.0).add(x, y).remove_approximate(x[:1], y[:1])
