"""Kernels against plain definitions in numpy and scikit-learn; tiles, export, gradients, saving, bad input."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torchlssvm.kernels.base as base
from torchlssvm.kernels import RBF, Custom, Deep, Laplacian, Linear, Polynomial, as_kernel

ALL = {
    "linear": (Linear(), lambda a, b: a @ b),
    "rbf sigma": (RBF(sigma=2.0), lambda a, b: math.exp(-((a - b) ** 2).sum() / 8)),
    "rbf gamma": (RBF(gamma=0.3), lambda a, b: math.exp(-0.3 * ((a - b) ** 2).sum())),
    "laplacian": (Laplacian(gamma=0.2), lambda a, b: math.exp(-0.2 * abs(a - b).sum())),
    "laplacian sigma": (Laplacian(sigma=5.0), lambda a, b: math.exp(-0.2 * abs(a - b).sum())),
    "polynomial": (Polynomial(2, gamma=0.5, coef0=1.5), lambda a, b: (0.5 * a @ b + 1.5) ** 2),
    "sum": (Linear() + RBF(gamma=0.3), lambda a, b: a @ b + math.exp(-0.3 * ((a - b) ** 2).sum())),
    "product": (Linear() * RBF(gamma=0.3), lambda a, b: a @ b * math.exp(-0.3 * ((a - b) ** 2).sum())),
    "scaled": (0.5 * Linear() * 3, lambda a, b: 1.5 * (a @ b)),
    "custom": (Custom(lambda a, b: torch.minimum(a[:, None], b).sum(-1)), lambda a, b: np.minimum(a, b).sum()),
    "sum with a callable": ((lambda a, b: a @ b.mT) + Polynomial(1), lambda a, b: 2 * (a @ b) + 1),
    "product with a callable": ((lambda a, b: a @ b.mT) * Polynomial(1), lambda a, b: (a @ b) * (a @ b + 1)),
}  # fmt: skip


def rows(n: int, J: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, J, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_definition(one, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.tensor([[float(one(p, q)) for q in b.numpy()] for p in a.numpy()], dtype=torch.float64).reshape(
        len(a), len(b)
    )


@pytest.mark.parametrize("name", ALL)
def test_against_the_definition(name):
    kernel, one = ALL[name]
    a, b = rows(7), rows(4, seed=1)
    torch.testing.assert_close(kernel(a, b), by_definition(one, a, b), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(kernel(a, a), by_definition(one, a, a), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(kernel.diag(a), kernel(a, a).diagonal(), rtol=1e-13, atol=1e-13)
    v = rows(4, 2, seed=2)
    torch.testing.assert_close(kernel.product(a, b, v), kernel(a, b) @ v, rtol=1e-13, atol=1e-13)
    assert kernel(a, b[:0]).shape == (7, 0)
    assert kernel(a[:0], b).shape == (0, 4)


@pytest.fixture
def set_tile(monkeypatch):
    """Sets the bytes of a tile: small cases then show what large ones do."""
    return lambda size: monkeypatch.setattr(base, "TILE_BYTES", size)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("tile", [1, 1000, 4000])  # smaller than a pair, than a row, than the whole
def test_tiles_change_nothing(name, tile, set_tile):
    kernel, _ = ALL[name]
    a, b, v = rows(23), rows(17, seed=1), rows(17, 3, seed=2)
    whole, product = kernel(a, b), kernel.product(a, b, v)
    set_tile(tile)
    torch.testing.assert_close(kernel(a, b), whole, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(kernel.product(a, b, v), product, rtol=1e-13, atol=1e-13)
    a.requires_grad_(True)
    torch.testing.assert_close(kernel(a, b).detach(), whole, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(lambda t: kernel(t, b[:3]).sum(), (a[:2].detach().requires_grad_(True),))


@pytest.mark.parametrize("name", ["rbf sigma", "laplacian", "sum", "product", "polynomial"])
def test_no_tensor_is_larger_than_the_bound(name, set_tile):
    """Each tensor made while working stays below TILE_BYTES but for the result itself; the whole would not."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out._base is None and "empty" not in str(func):
                self.bytes = max(self.bytes, out.numel() * out.element_size())
            return out

    kernel, bound = ALL[name][0], 2**16
    a = rows(300, 4)
    with Largest() as whole:
        kernel(a, a)
    set_tile(bound)
    with Largest() as tiled:
        kernel.product(a, a, a)
    assert whole.bytes > bound  # else the check below shows nothing
    assert tiled.bytes <= bound
    with Largest() as tiled, torch.no_grad():
        kernel(a, a)
    assert tiled.bytes <= bound


@given(
    seed=st.integers(0, 2**20),
    offset=st.sampled_from([0.0, 1.0, 1e3, 1e5]),
    spread=st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_squared_distances_do_not_lose_digits_to_an_offset(seed, offset, spread):
    x = spread * rows(12, 6, seed) + offset
    x = torch.cat([x, x[:3]])  # duplicates
    K = RBF(gamma=0.5 / spread**2)(x, x)
    direct = torch.exp(-0.5 / spread**2 * (x[:, None] - x).square().sum(-1))
    assert float((K - direct).abs().max()) < 1e-13 * (1 + offset / spread)
    assert float(K.max()) <= 1.0
    assert float(torch.linalg.eigvalsh(K).min()) > -1e-10


def test_parity_with_scikit_learn():
    pairwise = pytest.importorskip("sklearn.metrics.pairwise")
    a, b = rows(20), rows(10, seed=1)
    for kernel, theirs in [
        (RBF(gamma=0.7), pairwise.rbf_kernel(a, b, gamma=0.7)),
        (Laplacian(gamma=0.7), pairwise.laplacian_kernel(a, b, gamma=0.7)),
        (Polynomial(3, gamma=0.2, coef0=1.0), pairwise.polynomial_kernel(a, b, degree=3, gamma=0.2, coef0=1.0)),
        (Linear(), pairwise.linear_kernel(a, b)),
    ]:
        np.testing.assert_allclose(kernel(a, b).numpy(), theirs, rtol=1e-12, atol=1e-13)


class Pair(nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel
        self.register_buffer("support", rows(9))

    def forward(self, x):
        return self.kernel.product(x, self.support, self.support[:, :2])


@pytest.mark.parametrize("name", ["linear", "rbf sigma", "laplacian", "polynomial", "sum", "product", "scaled"])
def test_export_with_any_batch_size(name):
    model = Pair(ALL[name][0])
    batch = torch.export.Dim("batch", min=2, max=2**40)
    program = torch.export.export(model, (rows(3),), dynamic_shapes={"x": {0: batch}})
    for n in (2, 5, 700):
        torch.testing.assert_close(program.module()(rows(n)), model(rows(n)), rtol=1e-12, atol=1e-12)


def test_deep_kernel_is_the_kernel_of_features():
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Tanh())
    kernel = Deep(network, RBF(sigma=1.0)).train()
    assert not network[2].training
    assert not any(p.requires_grad for p in kernel.parameters())
    x = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0))
    features = network(x).double()
    torch.testing.assert_close(kernel(x, x[:2]), RBF(sigma=1.0)(features, features[:2]))
    torch.testing.assert_close(kernel(x.double(), x), RBF(sigma=1.0)(features, features))  # the network's own precision
    torch.testing.assert_close((2.0 * kernel + kernel)(x, x[:2]), 3 * kernel(x, x[:2]))
    flat = x.flatten(1).double()
    torch.testing.assert_close((kernel * Linear() + Linear())(x, x), kernel(x, x) * (flat @ flat.mT) + flat @ flat.mT)
    torch.testing.assert_close(kernel.diag(x), torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("name", ["linear", "rbf sigma", "laplacian", "polynomial", "sum", "product", "scaled"])
def test_cuda_tensors_stay_on_cuda(name, set_tile):
    set_tile(500)
    with FakeTensorMode():
        x, v = (
            torch.empty(30, 5, device="cuda", dtype=torch.float64),
            torch.empty(30, 2, device="cuda", dtype=torch.float64),
        )
        kernel = ALL[name][0]
        assert {t.device.type for t in (kernel(x, x), kernel.product(x, x, v), kernel.diag(x))} == {"cuda"}


def test_options_are_saved_and_restored():
    a, b = 2.0 * RBF(sigma=3.0) + Polynomial(2, gamma=0.5), 1.0 * RBF(sigma=1.0) + Polynomial(3)
    b.load_state_dict(a.state_dict())
    torch.testing.assert_close(a(rows(4), rows(4)), b(rows(4), rows(4)), rtol=0, atol=0)
    assert b.second.degree == 2
    assert isinstance(b.second.degree, int)
    assert b.first.kernel.sigma == pytest.approx(3.0)
    assert "degree=2" in repr(b)
    with pytest.raises(ValueError, match="options"):
        RBF(sigma=1.0).load_state_dict(Polynomial().state_dict())


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: RBF(), "either sigma or gamma"),
        (lambda: RBF(sigma=1.0, gamma=1.0), "either sigma or gamma"),
        (lambda: RBF(sigma=0.0), "sigma must be"),
        (lambda: RBF(gamma=math.nan), "gamma must be"),
        (lambda: Laplacian(), "either sigma or gamma"),
        (lambda: Polynomial(0), "degree"),
        (lambda: Polynomial(2.5), "degree"),
        (lambda: Polynomial(2, coef0=-1.0), "coef0"),
        (lambda: -1.0 * Linear(), "scale must be"),
        (lambda: Linear() + 3.0, "kernel must be"),
        (lambda: as_kernel("rbf"), "kernel must be"),
        (lambda: as_kernel(RBF), "kernel must be"),
        (lambda: Linear()(rows(3), rows(3, 4)), "one width"),
        (lambda: Linear()(rows(3)[0], rows(3)), "one width"),
        (lambda: Custom(lambda a, b: a)(rows(3), rows(3)), "Gram matrix"),
    ],
)  # fmt: skip
def test_bad_input(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize("far", [1e3, 1e6, 1e8, 1e12])
def test_a_row_far_from_all_others_costs_the_others_no_digits(far):
    x = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[7] *= far
    truth = torch.exp(-0.5 * (x[:, None] - x[None]).square().sum(-1))
    others = [i for i in range(40) if i != 7]
    assert float((RBF(sigma=1.0)(x[others], x) - truth[others]).abs().max()) < 1e-13
    assert float((RBF(sigma=1.0)(x, x)[others] - truth[others]).abs().max()) < 1e-13


def test_rows_that_are_equally_far_from_their_mean():
    """The mean of their distances may be rounded below all of them."""
    x = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(RBF(gamma=1.0)(x, x), torch.exp(-torch.cdist(x, x).square()), rtol=0, atol=1e-15)
