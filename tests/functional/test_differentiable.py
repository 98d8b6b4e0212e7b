"""The differentiable fit, against retraining and finite differences."""

import pytest
import torch

from torchlssvm import LSSVMHead
from torchlssvm.functional import LeaveOneOutLoss, differentiable, fit

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(24, 40, dtype=torch.float64, generator=GENERATOR)
Y = torch.arange(24) % 3


@pytest.mark.parametrize("J", [5, 40])
@pytest.mark.parametrize("intercept", ["free", "none"])
def test_fit_is_the_head_and_leaves_one_out(J, intercept):
    x = X[:, :J]
    result = fit(x, Y, 0.3, intercept)
    head = LSSVMHead(J, 3, rho=0.3, intercept=intercept, grid=None).add(x, Y)
    torch.testing.assert_close(x @ result.w + result.b, head(x), rtol=1e-9, atol=1e-9)
    for i in range(3):
        keep = torch.arange(24) != i
        other = fit(x[keep], Y[keep], 0.3, intercept)
        torch.testing.assert_close(result.leave_one_out[i], x[i] @ other.w + other.b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("J", [4, 12])
def test_gradients(J):
    x = X[:9, :J].clone().requires_grad_()
    rho = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    targets = X[:9, 30:32].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda *a: tuple(fit(*a)), (x, targets, rho))


@pytest.mark.parametrize("loss", ["cross_entropy", "squared"])
def test_a_map_learns_to_generalize(loss):
    """Three classes in two of forty directions: the leave-one-out error falls, and so does that on new samples."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(60) % 3
    x = torch.randn(120, 40, generator=generator)
    x[:, :2] += 1.5 * torch.tensor([[0.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])[torch.cat([y, y])]
    torch.manual_seed(0)
    network, criterion = torch.nn.Linear(40, 6), LeaveOneOutLoss(loss=loss)

    def accuracy():
        with torch.no_grad():
            z = network(x)
            result = fit(z[:60], y, criterion.rho)
            return float(((z[60:] @ result.w + result.b).argmax(1) == y).float().mean())

    before, first = accuracy(), float(criterion(network(x[:60]), y).detach())
    optimizer = torch.optim.Adam([*network.parameters(), *criterion.parameters()], lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        criterion(network(x[:60]), y).backward()
        optimizer.step()
    assert float(criterion(network(x[:60]), y).detach()) < 0.8 * first
    assert accuracy() > before


def test_bad_input():
    with pytest.raises(ValueError, match=r"\(0, 3\)"):
        fit(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="penalized"):
        fit(X, Y, 1.0, "penalized")
    with pytest.raises(ValueError, match="rho"):
        differentiable.LeaveOneOutLoss(rho=0.0)
