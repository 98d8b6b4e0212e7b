"""Every form of the head passes the conformance suite, and the suite catches machines that do not."""

import pytest
import torch

from tests.support.pretend_cuda import PretendTensor
from torchlssvm import (
    FixedPoint,
    IncrementalSVM,
    KernelLSSVM,
    LagrangianSVM,
    LSSVMHead,
    MarginHead,
    OneVsOne,
    OneVsRest,
)
from torchlssvm.kernels import RBF, Laplacian, Linear, Polynomial
from torchlssvm.testing import CHECKS, Case, check_machine

FORMS = {
    "default": {"grid": FixedPoint(16.0)},
    "penalized": {"grid": FixedPoint(16.0), "intercept": "penalized", "rho": 0.3},
    "none": {"grid": FixedPoint(16.0), "intercept": "none"},
    "float sums": {"grid": None},
    "balanced": {"grid": FixedPoint(16.0), "class_weight": "balanced"},
    "complement": {"grid": FixedPoint(16.0), "class_weight": "complement", "intercept": "penalized"},
    "weights": {"grid": FixedPoint(16.0), "class_weight": torch.tensor([1.0, 2.0, 0.5])},
    "per class": {"grid": FixedPoint(16.0), "per_class": True},
    "one against one": {"grid": FixedPoint(16.0), "multiclass": "ovo"},
    "scaled and normalized": {
        "grid": FixedPoint(16.0),
        "scale": "std",
        "normalize": "sqrt",
        "class_weight": "balanced",
    },
}


SMALL_CHANGES = {"default", "penalized", "per class"}
"""Forms that run on the device with enough features for Theorem 1."""


def case(form: str, J: int) -> Case:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, J, generator=generator) + 0.5
    y = torch.arange(60) % 3
    options = FORMS[form]
    # A chosen rho stays until refresh(), so that a head after a removal and one that never saw the sample differ in it.
    return Case(lambda **kw: LSSVMHead(J, 3, **({"rho": 1.0} | options | kw)), x, y, tolerance=1e-9)


@pytest.mark.parametrize("J", [8, 64])  # below and above the size where Theorem 1 is used; n < J for the second
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
def test_head_conforms(check, form, J):
    check(case(form, J))


MARGIN_FORMS = {
    "default": (8, {}),
    "rank-k updates, n < J": (64, {"rho": 0.5}),
    "penalized": (8, {"intercept": "penalized", "rho": 0.3}),
    "none": (8, {"intercept": "none"}),
    "balanced": (8, {"class_weight": "balanced"}),
    "weights": (8, {"class_weight": torch.tensor([1.0, 2.0, 0.5])}),
}


@pytest.mark.parametrize("form", MARGIN_FORMS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
def test_margin_head_conforms(check, form):
    check(margin_case(form))


MACHINES = {
    "kernel LS-SVM": lambda **kw: KernelLSSVM(RBF(sigma=2.0), C=3.0, num_classes=3, **kw),
    "kernel LS-SVM, no bias": lambda **kw: KernelLSSVM(Laplacian(sigma=3.0), C=3.0, num_classes=3, bias=False, **kw),
    "linear LS-SVM, n > J": lambda **kw: KernelLSSVM(Linear(), C=3.0, num_classes=3, **kw),
    "linear LS-SVM, n > J, no bias": lambda **kw: KernelLSSVM(Linear(), C=0.1, num_classes=3, bias=False, **kw),
    "polynomial LS-SVM": lambda **kw: KernelLSSVM(Polynomial(2, gamma=0.1), C=1.0, num_classes=3, **kw),
    "Lagrangian SVM": lambda **kw: LagrangianSVM(RBF(sigma=2.0), C=5.0, **kw),
    "Lagrangian SVM, linear": lambda **kw: LagrangianSVM(Linear(), C=0.5, **kw),
    "Lagrangian SVM, augmented": lambda **kw: LagrangianSVM(Polynomial(2, gamma=0.1), C=5.0, bias="augmented", **kw),
    "Lagrangian SVM, iteration": lambda **kw: LagrangianSVM(RBF(sigma=1.0), C=0.5, tol=1e-11, solver="iteration", **kw),
    "one against the rest": lambda **kw: OneVsRest(LagrangianSVM(RBF(sigma=2.0), C=5.0, **kw), 3),
    "one against one": lambda **kw: OneVsOne(lambda: LagrangianSVM(RBF(sigma=2.0), C=5.0, **kw), 3),
    "one against one, LS-SVM": lambda **kw: OneVsOne(KernelLSSVM(RBF(sigma=2.0), C=5.0, **kw), 3),
    "two classes": lambda **kw: KernelLSSVM(RBF(gamma=0.1), C=1.0, **kw),
}


def machine_case(name: str, n: int) -> Case:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=generator) + 0.5
    return Case(MACHINES[name], x, torch.arange(n) % MACHINES[name]().num_classes)


@pytest.mark.parametrize("n", [30, 110])  # below and above the size where the inverse is updated
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
def test_kernel_machine_conforms(check, name, n):
    check(machine_case(name, n))


SVMS = {
    "rbf": lambda **kw: IncrementalSVM(RBF(sigma=1.0), C=10.0, **kw),
    "linear": lambda **kw: IncrementalSVM(Linear(), C=1.0, **kw),
    "bounds per class": lambda **kw: IncrementalSVM(RBF(sigma=2.0), C=(0.5, 2.0), **kw),
}


def svm_case(form: str) -> Case:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    y = (x[:, 0] + 0.7 * torch.randn(60, generator=generator) > 0).long()
    return Case(SVMS[form], x, y)


@pytest.mark.parametrize("form", SVMS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
def test_incremental_svm_conforms(check, form):
    check(svm_case(form))


def margin_case(form: str) -> Case:
    J, options = MARGIN_FORMS[form]
    good = case("default", J)
    return Case(
        lambda **kw: MarginHead(J, 3, **({"rho": 1.0, "grid": FixedPoint(16.0)} | options | kw)), good.x, good.y
    )


ON_CUDA = {
    **{f"head, {form}": lambda form=form: case(form, 64 if form in SMALL_CHANGES else 8) for form in FORMS},
    **{f"margin head, {form}": lambda form=form: margin_case(form) for form in MARGIN_FORMS},
    **{name: lambda name=name: machine_case(name, 30) for name in MACHINES},
    **{f"incremental SVM, {form}": lambda form=form: svm_case(form) for form in SVMS},
}
SLOW_ON_CUDA = {f"margin head, {form}" for form in set(MARGIN_FORMS) - {"default", "balanced"}}
"""Cases of several seconds; the two that are left run the same code."""
SAMPLES_ON_CUDA = 28
"""Samples of a case on the device: each operation costs there what the host needs to start it."""


@pytest.mark.cuda
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW_ON_CUDA else n for n in ON_CUDA])
def test_conforms_on_cuda(name):
    """All checks with samples and machine on the device, and the scores of the CPU."""
    here = ON_CUDA[name]()
    x, y = here.x[:SAMPLES_ON_CUDA], here.y[:SAMPLES_ON_CUDA]
    here = Case(here.make, x, y, here.tolerance)
    there = Case(lambda **kw: here.make(**({"device": "cuda"} | kw)), x.cuda(), y.cuda(), here.tolerance)
    for check in CHECKS:
        check(there)
    machines = [c.fresh(torch.arange(SAMPLES_ON_CUDA)) for c in (here, there)]
    for machine in machines:
        machine.remove(torch.arange(3, 9))
    (mine_digest, mine), (digest, scores) = (m.state() for m in machines)
    assert mine_digest == digest
    difference = float((mine - scores.cpu()).abs().max())
    pretended = isinstance(scores, PretendTensor)
    same_arithmetic = pretended and not name.startswith("incremental SVM")  # on the CPU its kernel has code of its own
    assert difference <= (0.0 if same_arithmetic else here.tolerance)


class Forgetful(LSSVMHead):
    """Removes only the first sample of a batch."""

    def remove(self, x, y, weight=None, ids=None):
        return super().remove(x[:1], y[:1])


class Vandal(LSSVMHead):
    """Writes to its input."""

    def add(self, x, y, weight=None, ids=None):
        super().add(x, y)
        x.zero_()
        return self


@pytest.mark.parametrize("broken", [Forgetful, Vandal])
def test_the_suite_can_fail(broken):
    good = case("default", 8)
    with pytest.raises((AssertionError, ValueError)):
        check_machine(Case(lambda **kw: broken(8, 3, grid=FixedPoint(16.0), **kw), good.x, good.y))


def test_replace_on_a_head_with_folds():
    x, y = case("default", 8).x, case("default", 8).y
    head = LSSVMHead(8, 3, grid=FixedPoint(16.0), folds=3).add(x[:40], y[:40], ids=range(40))
    head.replace(x[:5], y[:5], x[40:45], y[40:45], ids_old=range(5), ids_new=range(40, 45))
    fresh = LSSVMHead(8, 3, grid=FixedPoint(16.0), folds=3).add(x[5:45], y[5:45], ids=range(5, 45))
    assert head.digest() == fresh.digest()
