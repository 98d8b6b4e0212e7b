"""Kernel machines keep to their device: every operation on CUDA tensors without data, and moving there and back for real."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchlssvm import KernelLSSVM, LagrangianSVM, OneVsOne, OneVsRest
from torchlssvm.kernels import RBF, Linear

N, K = 150, 3
MACHINES = {
    "rbf": lambda **kw: KernelLSSVM(RBF(sigma=2.0), num_classes=K, **kw),
    "no bias": lambda **kw: KernelLSSVM(RBF(sigma=2.0), num_classes=K, bias=False, **kw),
    "linear": lambda **kw: KernelLSSVM(Linear(), num_classes=K, **kw),
}


def run(machine: KernelLSSVM, x: torch.Tensor, y: torch.Tensor, targets: torch.Tensor):
    """Every public operation; what can be read after each."""
    ids = machine.add(x[:140], y[:140])
    held = machine.ids
    yield machine(x), machine.alpha, machine.b, machine.predict(x)
    machine.remove(held[:1])
    machine.remove(held[1:30])
    yield machine(x), machine.alpha, machine.leave_one_out()
    machine.add(x[140:141], y[140:141])
    machine.add(x[:100], targets[:100])
    yield machine(x), machine.leave_one_out(), machine.alpha
    some = machine.ids
    machine.relabel(some[:5], y[:5])
    machine.replace(some[:5], x[:5], y[:5])
    machine.update(add=(x[:3], y[:3]), remove=some[5:10])
    yield machine(x), machine.b
    machine.C = 2.0
    machine.refresh()
    yield machine(x), machine.b
    machine.relabel(machine.ids[:5], y[:5])
    machine.remove(machine.ids)
    machine.add(x[:10], y[:10])
    yield machine(x), machine.alpha
    assert len(ids) == 140


@pytest.mark.parametrize("name", MACHINES)
def test_every_operation_stays_on_cuda(name):
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(N, 4, device="cuda")
        y, targets = torch.empty(N, dtype=torch.int64, device="cuda"), torch.empty(N, K, device="cuda")
        for out in run(MACHINES[name](device="cuda"), x, y, targets):
            assert {t.device.type for t in out} == {"cuda"}


def test_a_budget_on_cuda():
    with FakeTensorMode(allow_non_fake_inputs=True):
        machine = KernelLSSVM(RBF(sigma=2.0), num_classes=K, budget=10, device="cuda")
        x = torch.empty(12, 4, device="cuda")
        machine.add(x, torch.empty(12, dtype=torch.int64, device="cuda"))
        assert machine(x).device.type == "cuda"
        assert len(machine) == 10


@pytest.mark.parametrize("name", MACHINES)
def test_moving(name):
    with FakeTensorMode(allow_non_fake_inputs=True):
        machine = MACHINES[name]()
        machine.add(torch.empty(N, 4), torch.empty(N, dtype=torch.int64))
        machine.remove(machine.ids[:2])
        machine.to("cuda")
        assert machine.device.type == "cuda"
        x = torch.empty(N, 4, device="cuda")
        assert machine(x).device.type == "cuda"
        machine.remove(machine.ids[:2])
        machine.add(x[:2], torch.empty(2, dtype=torch.int64, device="cuda"))
        assert machine.leave_one_out().device.type == "cuda"


@pytest.mark.parametrize("make", [
    lambda **kw: LagrangianSVM(RBF(sigma=2.0), **kw),
    lambda **kw: LagrangianSVM(RBF(sigma=2.0), solver="iteration", bias="augmented", **kw),
    lambda **kw: OneVsRest(LagrangianSVM(RBF(sigma=2.0), **kw), 2),
    lambda **kw: OneVsOne(KernelLSSVM(RBF(sigma=2.0), **kw), 2),
])  # fmt: skip
def test_moving_the_others(make):
    with FakeTensorMode(allow_non_fake_inputs=True):
        machine = make()
        machine.add(torch.empty(N, 4), torch.empty(N, dtype=torch.int64))
        machine.to("cuda")
        x = torch.empty(N, 4, device="cuda")
        machine.remove(machine.ids[:2])
        machine.add(x[:2], torch.empty(2, dtype=torch.int64, device="cuda"))
        machine.relabel(machine.ids[:2], torch.empty(2, dtype=torch.int64, device="cuda"))
        assert machine(x).device.type == "cuda"


def test_mixed_devices_are_refused_by_name():
    machine = KernelLSSVM(RBF(sigma=2.0))
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(RuntimeError, match=r"x is on cuda.*machine is on cpu"),
    ):
        machine.add(torch.empty(3, 4, device="cuda"), torch.empty(3, dtype=torch.int64, device="cuda"))


@pytest.mark.cuda
@pytest.mark.parametrize("name", MACHINES)
def test_same_answers_on_cuda(name):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(N, 4, dtype=torch.float64, generator=generator), torch.arange(N) % K
    targets = torch.randn(N, K, dtype=torch.float64, generator=generator)
    here = run(MACHINES[name](), x, y, targets)
    there = run(MACHINES[name](device="cuda"), x.cuda(), y.cuda(), targets.cuda())
    for a, b in zip(here, there, strict=True):
        for left, right in zip(a, b, strict=True):
            torch.testing.assert_close(left, right.cpu(), rtol=1e-9, atol=1e-9)


def test_the_same_operations_have_a_meaning():
    """The list of operations above, on data: a copy that is refreshed after each step agrees."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(N, 4, dtype=torch.float64, generator=generator), torch.arange(N) % K
    targets = torch.randn(N, K, dtype=torch.float64, generator=generator)
    machine = MACHINES["rbf"]()
    for out in run(machine, x, y, targets):
        torch.testing.assert_close(out[0], copy.deepcopy(machine).refresh()(x), rtol=1e-10, atol=1e-10)
