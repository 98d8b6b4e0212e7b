"""One contract for removal: the same calls drive machines that remove samples and machines that remove ids."""

from typing import Any

import pytest
import torch

from torchlssvm import (
    CompactLSSVMHead,
    FixedPoint,
    IncrementalSVM,
    KernelLSSVM,
    LSSVMHead,
    OneVsRest,
    RemovalError,
    Statistics,
)
from torchlssvm.kernels import RBF
from torchlssvm.sample_adapter import SampleAdapter

X = torch.randn(30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(30) % 2
NAMES = [f"s{i}" for i in range(30)]

MACHINES: dict[str, Any] = {
    "head": lambda: LSSVMHead(4, 2, grid=FixedPoint(8.0)),
    "head with folds": lambda: LSSVMHead(4, 2, grid=FixedPoint(8.0), folds=3),
    "compact head": lambda: CompactLSSVMHead(4, 2),
    "kernel": lambda: KernelLSSVM(RBF(sigma=2.0)),
    "svm": lambda: IncrementalSVM(RBF(sigma=2.0), C=3.0),
    "no joint update": lambda: OneVsRest(lambda: KernelLSSVM(RBF(sigma=2.0)), 2),
}


def named(index: list[int]) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    return [NAMES[i] for i in index], X[index], Y[index]


def trained(make: Any, index: list[int], y: torch.Tensor = Y, x: torch.Tensor = X) -> Any:
    machine = make()
    SampleAdapter(machine).add([NAMES[i] for i in index], x[index], y[index])
    return machine


@pytest.mark.parametrize("name", MACHINES)
def test_every_verb_leads_to_the_machine_that_only_saw_the_result(name: str) -> None:
    make = MACHINES[name]
    samples = SampleAdapter(make())
    samples.add(*named(list(range(20))))
    samples.remove(*named([3, 7]))
    samples.exchange(named([20, 21, 22]), named([0, 1]))
    y, x = Y.clone(), X.clone()
    y[[4, 5]] = 1 - y[[4, 5]]
    samples.relabel(["s4", "s5"], y[[4, 5]], X[[4, 5]], Y[[4, 5]])
    x[6] = X[29]
    samples.exchange((["s6"], x[[6]], Y[[6]]), named([6]))  # the same name: replaced
    held = [i for i in range(23) if i not in (0, 1, 3, 7)]
    assert samples.count == len(held)
    assert torch.allclose(samples.machine(X), trained(make, held, y, x)(X), rtol=0, atol=1e-6)
    if samples.by_ids:
        assert sorted(samples.ids) == sorted(NAMES[i] for i in held)
        assert sorted(samples.ids.values()) == sorted(samples.machine.ids.tolist())
    if name != "compact head":
        samples.clear()
        assert samples.count == 0
        assert not samples.ids


@pytest.mark.parametrize("name", [n for n in MACHINES if "head" not in n])
def test_an_unknown_name_is_refused_and_nothing_changes(name: str) -> None:
    samples = SampleAdapter(MACHINES[name]())
    samples.add(*named(list(range(12))))
    before, ids = samples.machine(X), dict(samples.ids)
    for call in (
        lambda: samples.remove(["s1", "nobody"]),
        lambda: samples.relabel(["nobody"], Y[:1]),
        lambda: samples.exchange(named([20]), (["nobody"],)),
    ):
        with pytest.raises(RemovalError, match="nobody"):
            call()
    assert samples.ids == ids
    assert torch.equal(samples.machine(X), before)


def test_what_was_added_is_taken_back_when_the_removal_is_refused() -> None:
    """``Statistics`` have no joint update: the adapter adds, then removes."""
    samples = SampleAdapter(Statistics(4, 2, grid=FixedPoint(8.0)))
    samples.add(*named([0, 1]))
    digest = samples.machine.digest()
    with pytest.raises(ValueError, match="shape"):
        samples.exchange(named([2]), (["s0"], X[:1, :3], Y[:1]))
    assert samples.machine.digest() == digest


def test_a_sample_that_the_machine_was_given_itself_goes_by_its_number() -> None:
    machine = KernelLSSVM(RBF(sigma=2.0))
    machine.add(X[:4], Y[:4])
    samples = SampleAdapter(machine)
    samples.add(["2", "x"], X[4:6], Y[4:6])  # a name hides the number
    samples.remove(["1", "2"])
    assert torch.allclose(machine(X), trained(lambda: KernelLSSVM(RBF(sigma=2.0)), [0, 2, 3, 5])(X))
    with pytest.raises(RemovalError):
        samples.remove(["4"])  # held as "2", and gone


def test_a_head_needs_the_samples() -> None:
    samples = SampleAdapter(LSSVMHead(4, 2))
    samples.add(*named([0, 1]))
    with pytest.raises(ValueError, match="give x and y"):
        samples.remove(["s0"])
