"""Margin heads that learned the same samples in other orders, and reads that were interrupted."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.support.faults import replaced
from torchlssvm import FixedPoint, MarginHead
from torchlssvm.linear.active_sums import ActiveSums


def test_weights_do_not_depend_on_the_order_at_the_limit_of_refinement():
    """At this rho the bound on the margins' errors is where weights begin to be refined: the order must not decide."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(60, 10, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 2, (60,), generator=generator)
    heads = []
    for _ in range(20):
        p = torch.randperm(60, generator=generator)
        heads.append(MarginHead(10, 2, rho=1.7030933000669464e-06, grid=FixedPoint(limit=8.0)).add(x[p], y[p]))
    assert all(torch.equal(head.w, heads[0].w) for head in heads[:5])
    assert all(torch.equal(head.refresh().w, heads[0].w) for head in heads)


def test_weights_of_twenty_orders_of_magnitude_are_found_in_any_order():
    generator = torch.Generator().manual_seed(1)
    x = (torch.randint(0, 2, (120, 10), generator=generator) * 2 - 1).double() * 1e-3
    y = torch.randint(0, 10, (120,), generator=generator)
    weight = torch.tensor([1, 2, 1000])[torch.randint(0, 3, (120,), generator=generator)]
    class_weight = torch.tensor([1e6, 1e7, 1.0, 1e11, 1e-5, 0.01, 1e5, 100.0, 1e-12, 1e-10], dtype=torch.float64)
    found = []
    for p in (torch.arange(120), torch.randperm(120, generator=generator)):
        head = MarginHead(10, 10, rho=1e-4, class_weight=class_weight, grid=FixedPoint(limit=0.00101, bits=10))
        found.append(head.add(x[p], y[p], weight=weight[p]).active(x, y))
    assert torch.equal(*found)


def test_leave_one_out_goes_on_after_an_interruption():
    x, y = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    head = MarginHead(3, 3).add(x, y)
    expected, again = head.leave_one_out(x, y), copy.deepcopy(head)  # a copy has no matrices: they are made anew

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    with replaced(ActiveSums, "solve", lambda solve: interrupted), pytest.raises(KeyboardInterrupt):
        again.leave_one_out(x, y)
    assert torch.allclose(again.leave_one_out(x, y), expected, atol=1e-12)
