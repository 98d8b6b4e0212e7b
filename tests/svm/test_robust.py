"""Interruptions, other devices' code with data, and modes of the caller."""

import copy

import pytest
import torch

from tests.support.faults import Failing, replaced
from torchlssvm import IncrementalSVM
from torchlssvm.kernels import RBF
from torchlssvm.svm.margin_set import MarginSet
from torchlssvm.svm.solver import PathSolver


def points(n=120, d=3):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] + 0.5 * torch.randn(n, generator=generator) > 0).long()


OPERATIONS = {
    "add": lambda svm, x, y: svm.add(x[100:110], y[100:110]),
    "add one": lambda svm, x, y: svm.add(x[:1], 1 - y[:1]),
    "remove": lambda svm, x, y: svm.remove(svm.ids[svm.alpha > 0][:5]),
    "pivot": lambda svm, x, y: svm.remove(svm.ids[:50], method="pivot"),
    "relabel": lambda svm, x, y: svm.relabel([3, 4, 5], 1 - svm.y[3:6]),
    "set_C": lambda svm, x, y: svm.set_C(9.0, method="path"),
    "path": lambda svm, x, y: svm.regularization_path(9.0),
    "set_kernel": lambda svm, x, y: svm.set_kernel(RBF(sigma=0.7)),
}


@pytest.mark.parametrize("place", ["walk", "enter"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interruption_changes_nothing(name, place):
    x, y = points()
    svm = IncrementalSVM(RBF(sigma=1.0), C=3.0).fit(x[:100], y[:100])
    before = (svm.ids, svm.alpha, svm.b, svm.C, svm(x))
    owner, method = (PathSolver, "_correct") if place == "walk" else (MarginSet, "write_alpha")
    interrupted = Failing(KeyboardInterrupt(), late=True)
    with replaced(owner, method, interrupted):
        try:
            OPERATIONS[name](svm, x, y)
        except KeyboardInterrupt:
            assert torch.equal(svm.ids, before[0])
            assert torch.equal(svm.alpha, before[1])
            assert (svm.b, svm.C) == before[2:4]
            torch.testing.assert_close(svm(x), before[4], rtol=0, atol=1e-10)
        else:
            assert not interrupted.calls, "the interruption was lost"
    OPERATIONS[name](svm, x, y)
    new = svm.add(x[110:], y[110:])
    assert len(set(svm.ids.tolist())) == svm.n
    assert set(new.tolist()) <= set(svm.ids.tolist())
    assert svm.kkt_violation() < 1e-12


def test_an_error_in_a_callback_changes_nothing():
    x, y = points()
    svm = IncrementalSVM(RBF(sigma=1.0), C=3.0).fit(x[:100], y[:100])
    alpha = svm.alpha

    def fail(event):
        raise ZeroDivisionError

    svm.on_event(fail)
    with pytest.raises(ZeroDivisionError):
        svm.remove(svm.ids[svm.alpha > 0][:5])
    assert torch.equal(svm.alpha, alpha)
    svm.on_event(None).remove(svm.ids[svm.alpha > 0][:5])
    assert svm.kkt_violation() < 1e-12


def test_inference_mode_and_another_default_device():
    x, y = points()
    with torch.inference_mode():
        svm = IncrementalSVM(RBF(sigma=1.0), C=3.0)
        svm.add(x[:50], y[:50])
        other = copy.deepcopy(svm)
        svm(x)
    for machine in (svm, other):
        machine.add(x[50:51], y[50:51])
        machine.set_C(4.0)
        machine.polish()
        assert machine.kkt_violation() < 1e-12
    row = x[:1].clone().requires_grad_()
    svm.decision(row).sum().backward()
    assert bool(row.grad.abs().sum() > 0)
    with torch.device("meta"):
        assert svm.remove([0]).leave_one_out().margin.device.type == "cpu"
        svm.add(x[60:61], y[60:61])


def test_a_removal_with_bad_samples_beside_it_can_be_tried_again():
    x, y = points(100)
    svm = IncrementalSVM(RBF(sigma=1.0), C=3.0, reserve_limit=0.1).fit(x, y)
    gone = sorted(set(range(100)) - set(svm.ids.tolist()))[:1]
    assert gone
    with pytest.raises(ValueError, match="labels"):
        svm.update(add=(x[:1], torch.tensor([7])), remove=gone)
    svm.remove(gone)
