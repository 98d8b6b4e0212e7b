"""Freivalds' test of sums against rows: every flipped bit is found, and right sums pass."""

from __future__ import annotations

import math
import random

import pytest
import torch

from torchlssvm import FixedPoint, LSSVMHead, Statistics
from torchlssvm.statistics.sum_check import PRIMES, VECTORS_PER_PRIME, SumCheck

J, K, N = 19, 3, 200
GRID = FixedPoint(8.0)


def test_the_primes() -> None:
    for p in PRIMES:
        assert all(p % d for d in range(2, math.isqrt(p) + 1))
        assert VECTORS_PER_PRIME * math.log2(p) > 60
    assert math.prod(PRIMES) > 2**65


def samples(kind: str) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    generator = torch.Generator().manual_seed(5)
    x = GRID.snap(torch.randn(N, J, generator=generator))
    y = torch.arange(N) % K if kind == "labels" else torch.randn(N, K, generator=generator, dtype=torch.float64)
    return x, y, [f"s{i}" for i in range(N)]


FORMS = {
    "labels": {}, "values": {}, "labels per class": {"per_class": True}, "labels in folds": {"folds": 3},
    "labels per class in folds": {"per_class": True, "folds": 2}, "values in folds": {"folds": 2},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_right_sums_pass_and_flipped_bits_do_not(form: str) -> None:
    kind, rng = form.split()[0], random.Random(form)
    stats = Statistics(J, K, grid=GRID, **FORMS[form])
    x, y, ids = samples(kind)
    if kind == "values":
        y = FixedPoint(8.0).snap(y)
    stats.add(x, y, ids=ids if stats.folds else None)

    def failure() -> str | None:
        check = SumCheck(stats)
        for part in (slice(0, 70), slice(70, N)):
            check.add(x[part], y[part], ids[part] if stats.folds else None)
        return check.failure()

    assert failure() is None
    places = [(stats.moments.view(-1), i) for i in range(stats.moments.numel())]
    for sums in stats.group_sums().values():
        lower = [i for i in range(sums.numel()) if is_kept(i)]
        places += [(sums, i) for i in rng.sample(lower, 25)]
    for values, i in places:
        bit = 1 << rng.randrange(62)
        values[i] ^= bit
        assert failure() is not None, (i, bit)
        values[i] ^= bit
    assert failure() is None


def is_kept(i: int) -> bool:
    """True for a place in the lower triangle or the side sums: what is above the diagonal in a strip is read by nobody."""
    return i >= J * J or i % J <= i // J


def test_empty_statistics_and_other_kinds() -> None:
    empty = Statistics(J, K, grid=GRID)
    assert SumCheck(empty).failure() is None
    x, y, _ = samples("labels")
    with pytest.raises(ValueError, match="hold nothing"):
        SumCheck(empty).add(x, y)
    with pytest.raises(ValueError, match="hold labels"):
        SumCheck(empty.add(x, y)).add(x, y.double()[:, None])


@pytest.mark.parametrize("steps", [2, 2**19, 2**25])
def test_products_stay_exact_at_every_size(steps: int) -> None:
    """Against Python's integers; rows at the end of the grid among them."""
    generator = torch.Generator().manual_seed(steps)
    q = torch.randint(-steps, steps + 1, (300, 70), generator=generator)
    q[0] = steps
    check = SumCheck(
        Statistics(70, 2, grid=FixedPoint(float(steps), bits=steps.bit_length() - 1)).add(q.double(), q[:, 0] * 0)
    )
    check.add(q.double(), q[:, 0] * 0)
    M = q.T @ q  # below 2^62
    for k, p in enumerate(PRIMES):
        for column in range(k * VECTORS_PER_PRIME, (k + 1) * VECTORS_PER_PRIME):
            r = [int(v) for v in check.r[:, column]]
            wanted = [sum(int(a) * b for a, b in zip(row, r, strict=True)) % p for row in M]
            assert [int(v) % p for v in check.right[0, :70, column]] == wanted
    assert check.failure() is None


def test_heads_of_every_form_are_checked() -> None:
    x, y, _ = samples("labels")
    for options in (
        {"normalize": "l2", "scale": "std"},
        {"class_weight": "balanced"},
        {"multiclass": "ovo"},
        {"intercept": "penalized"},
    ):
        head = LSSVMHead(J, K, grid=GRID, **options).add(x, y)
        check = SumCheck(head.statistics)
        check.add(x, y)
        assert check.failure() is None
