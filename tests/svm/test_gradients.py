"""Derivatives of a trained machine: in x, in the samples and in kernel parameters, against retraining; torch.func and compile."""

import pytest
import torch

from torchlssvm import IncrementalSVM, OneVsOne, OneVsRest
from torchlssvm.kernels import RBF, Custom


def points(n=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] + 0.7 * torch.randn(n, generator=generator) > 0).long()


def gaussian(gamma):
    return Custom(lambda a, b: torch.exp(-gamma * (a[:, None] - b[None]).square().sum(-1)))


X, Y = points()
QUERIES = points(5, 1)[0]


@pytest.mark.parametrize("C", [1.0, 100.0])
def test_whole_derivative_in_a_kernel_parameter(C):
    def scores(gamma):
        return IncrementalSVM(gaussian(gamma), C=C).fit(X, Y).decision(QUERIES)

    gamma = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(scores, gamma, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("read", ["decision", "span_margins"])
def test_whole_derivative_in_the_samples(read):
    x = X[:16].clone().requires_grad_()

    def values(x):
        svm = IncrementalSVM(RBF(gamma=0.3), C=2.0).fit(x.detach(), Y[:16])
        assert len(svm.margin) > 2
        return svm.decision(QUERIES, samples=x) if read == "decision" else svm.span_margins(samples=x)

    assert torch.autograd.gradcheck(values, x, eps=1e-7, atol=1e-5)


def test_derivative_of_b_without_margin_vectors():
    x, y = torch.tensor([[-2.0], [-1.0], [1.5], [2.5]], dtype=torch.float64), torch.tensor([0, 0, 1, 1])

    def scores(gamma):
        svm = IncrementalSVM(gaussian(gamma), C=1e-3).fit(x, y)
        assert not len(svm.margin)
        return svm.decision(QUERIES[:, :1])

    assert torch.autograd.gradcheck(scores, torch.tensor(0.3, dtype=torch.float64, requires_grad=True), atol=1e-6)


def test_span_margins_are_those_of_leave_one_out():
    for C in (0.01, 1.0, 50.0):
        svm = IncrementalSVM(RBF(gamma=0.3), C=C).fit(X, Y)
        found = svm.leave_one_out(method="span").margin
        torch.testing.assert_close(svm.span_margins(), found, rtol=1e-9, atol=1e-9)


def test_a_kernel_learns_on_leave_one_out_margins():
    gamma = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    losses = []
    for _ in range(8):
        svm = IncrementalSVM(gaussian(gamma), C=2.0).fit(X, Y)
        loss = torch.nn.functional.softplus(-1.0 - svm.span_margins()).mean()
        losses.append(float(loss))
        (step,) = torch.autograd.grad(loss, gamma)
        gamma = (gamma - 2.0 * step.sign() * 0.1).detach().requires_grad_()
    assert losses[-1] < losses[0]


def test_samples_must_be_those_held():
    svm = IncrementalSVM(RBF(gamma=0.3)).fit(X, Y)
    with pytest.raises(ValueError, match="order of ids"):
        svm.decision(QUERIES, samples=X.flip(0))
    with pytest.raises(ValueError, match="40 current samples"):
        svm.span_margins(samples=X[:5])


@pytest.mark.parametrize("form", [None, OneVsRest, OneVsOne])
def test_func_and_compile_on_forward(form):
    machine = IncrementalSVM(RBF(gamma=0.3), C=2.0)
    svm, y = (machine, Y) if form is None else (form(machine, 3), torch.arange(40) % 3)
    svm.add(X[:30], y[:30])
    one = lambda row: svm(row[None])[0]  # noqa: E731
    torch.testing.assert_close(torch.func.vmap(one)(QUERIES), svm(QUERIES), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.func.jacrev(one)(X[0]), torch.func.jacfwd(one)(X[0]), rtol=0, atol=1e-12)
    compiled = torch.compile(svm, backend="eager")
    torch.testing.assert_close(compiled(QUERIES), svm(QUERIES), rtol=0, atol=1e-12)
    svm.add(X[30:], y[30:])
    torch.testing.assert_close(compiled(QUERIES), svm(QUERIES), rtol=0, atol=1e-12)
    whole = torch.compile(svm, backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(QUERIES), svm(QUERIES), rtol=0, atol=1e-12)
