"""Kernel machines keep to their device, and give the answers there that they give on the CPU."""

import pytest
import torch

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
    machine.set_C(2.0)
    machine.refresh()
    yield machine(x), machine.b
    machine.relabel(machine.ids[:5], y[:5])
    machine.remove(machine.ids)
    machine.add(x[:10], y[:10])
    yield machine(x), machine.alpha
    assert len(ids) == 140


def samples(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(N, 4, dtype=torch.float64, generator=generator), torch.arange(N) % K
    return x.to(device), y.to(device), torch.randn(N, K, dtype=torch.float64, generator=generator).to(device)


@pytest.mark.cuda
def test_a_budget_on_cuda():
    machine = KernelLSSVM(RBF(sigma=2.0), num_classes=K, budget=10, device="cuda")
    x, y, _ = samples("cuda")
    machine.add(x[:12], y[:12])
    assert machine(x).device.type == "cuda"
    assert len(machine) == 10


@pytest.mark.cuda
@pytest.mark.parametrize("make", [
    *MACHINES.values(),
    lambda **kw: LagrangianSVM(RBF(sigma=2.0), **kw),
    lambda **kw: LagrangianSVM(RBF(sigma=2.0), solver="iteration", bias="augmented", **kw),
    lambda **kw: OneVsRest(LagrangianSVM(RBF(sigma=2.0), **kw), 3),
    lambda **kw: OneVsOne(KernelLSSVM(RBF(sigma=2.0), **kw), 3),
])  # fmt: skip
def test_moving(make):
    """A machine moved to the device and changed there is one that was on the CPU throughout."""
    here, there = make(), make()
    x, y, _ = samples()
    y = y % here.num_classes
    for machine in (here, there):
        machine.add(x, y)
        machine.remove(machine.ids[:2])
    there.to("cuda")
    assert there.device.type == "cuda"
    for machine, device in ((here, "cpu"), (there, "cuda")):
        machine.remove(machine.ids[:2])
        machine.add(x[:2].to(device), y[:2].to(device))
        machine.relabel(machine.ids[:2], y[:2].to(device))
    scores = there(x.to("cuda"))
    assert scores.device.type == "cuda"
    torch.testing.assert_close(scores.cpu(), here(x), rtol=1e-9, atol=1e-9)


@pytest.mark.cuda
def test_mixed_devices_are_refused_by_name():
    x, y, _ = samples("cuda")
    with pytest.raises(RuntimeError, match=r"x is on cuda.*machine is on cpu"):
        KernelLSSVM(RBF(sigma=2.0)).add(x, y % 2)


@pytest.mark.cuda
@pytest.mark.parametrize("name", MACHINES)
def test_same_answers_on_cuda(name):
    here, there = run(MACHINES[name](), *samples()), run(MACHINES[name](device="cuda"), *samples("cuda"))
    for a, b in zip(here, there, strict=True):
        for left, right in zip(a, b, strict=True):
            assert right.device.type == "cuda"
            torch.testing.assert_close(left, right.cpu(), rtol=1e-9, atol=1e-9)
