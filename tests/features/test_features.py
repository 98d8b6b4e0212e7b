"""Feature maps: what they approximate, that they are the same everywhere, and heads on top of them."""

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.kernel_dense import rbf
from torchlssvm import FixedPoint, KernelLSSVM, NotFittedError, attach
from torchlssvm.features import Nystroem, RandomFourier, RandomReLU
from torchlssvm.functional import projection
from torchlssvm.kernels import RBF

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(300, 6, dtype=torch.float64, generator=GENERATOR)
Y = torch.randint(4, (300,), generator=GENERATOR)
MAPS = {
    "relu": lambda **kw: RandomReLU(6, 50, **kw),
    "fourier": lambda **kw: RandomFourier(6, 50, sigma=2.0, **kw),
    "nystroem": lambda **kw: Nystroem(RBF(sigma=2.0), 20, **kw),
}


def ready(name: str, **options):
    module = MAPS[name](**options)
    return module.fit(X) if name == "nystroem" else module


@pytest.mark.parametrize("M", [200, 20_000])
def test_fourier_features_approach_the_kernel(M):
    phi = RandomFourier(6, M, sigma=2.0)(X[:50])
    assert float((phi @ phi.mT - rbf(X[:50], X[:50])).abs().max()) < 7 / M**0.5
    same = RandomFourier(6, M, gamma=0.125)(X[:50])
    assert torch.equal(phi, same)


def test_relu_features_are_what_they_say():
    module = RandomReLU(6, 50)
    W = module.weight.double() / 1024
    torch.testing.assert_close(module(X), (X @ W).relu() / 2, rtol=1e-5, atol=1e-5)  # x has 20 bits
    assert abs(float(W.mean())) < 0.2
    assert 0.9 < float(W.std()) < 1.1
    assert module(0 * X).abs().max() == 0


@given(st.integers(1, 40), st.integers(1, 600), st.integers(0, 2**20), st.sampled_from([1e-30, 1e-3, 1.0, 255.0, 1e30]))
def test_projection_is_exact(B, J, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(B, J, dtype=torch.float64, generator=generator)
    w = projection.weights((J, 7), seed)
    whole = projection.project(x, w)
    order = torch.randperm(B, generator=generator)
    assert torch.equal(projection.project(x[order], w), whole[order])
    assert torch.equal(torch.cat([projection.project(row[None], w) for row in x]), whole)
    columns = torch.randperm(J, generator=generator)
    assert torch.equal(projection.project(x[:, columns], w[columns]), whole)  # whatever the order of the sum
    close = x @ w.double()
    assert float((whole - close).abs().max()) <= J * 2.0**-19 * float(x.abs().max()) * 2**13


def test_largest_sums_stay_exact():
    J = 4096
    w = torch.full((J, 1), 2**13 - 1, dtype=torch.int16)
    x = torch.full((1, J), 1 - 2.0**-30, dtype=torch.float64)
    assert float(projection.project(x, w)) == J * (2**13 - 1)  # rounded to 1.0, summed without error
    with pytest.raises(ValueError, match="in_features"):
        RandomReLU(2**20 + 1, 3)


def test_nystroem_is_exact_on_its_landmarks_and_near_elsewhere():
    full = Nystroem(RBF(sigma=2.0), 300).fit(X)
    torch.testing.assert_close(full(X) @ full(X).mT, rbf(X, X), rtol=1e-6, atol=1e-7)
    some = Nystroem(RBF(sigma=2.0), 100).fit(X)
    assert some.landmarks.shape == (100, 6)
    phi, Z = some(some.landmarks), some.landmarks
    torch.testing.assert_close(phi @ phi.mT, rbf(Z, Z), rtol=1e-6, atol=1e-7)
    through = rbf(X, Z) @ torch.linalg.solve(rbf(Z, Z), rbf(Z, X))  # the best approximation by these landmarks
    torch.testing.assert_close(some(X) @ some(X).mT, through, rtol=1e-6, atol=1e-6)
    twice = Nystroem(RBF(sigma=2.0), 60).fit(X[:30].repeat(2, 1))  # every landmark twice: rank 30
    phi = twice(X[:30])
    torch.testing.assert_close(phi @ phi.mT, rbf(X[:30], X[:30]), rtol=1e-6, atol=1e-6)


def test_nystroem_head_is_the_kernel_machine_when_every_row_is_a_landmark():
    clf = attach(Nystroem(RBF(sigma=2.0), 80).fit(X[:80]), num_classes=4, in_features=80, rho=0.1, grid=None)
    clf.add(X[:80], Y[:80])
    machine = KernelLSSVM(RBF(sigma=2.0), C=10.0, num_classes=4)
    machine.add(X[:80], Y[:80])
    torch.testing.assert_close(clf(X), machine(X), rtol=1e-6, atol=1e-6)


def test_class_by_class_equals_all_at_once_to_the_bit():
    def fresh():
        return attach(RandomReLU(6, 50), num_classes=4, in_features=50, grid=FixedPoint(16.0))

    joint, one_by_one, rows = fresh().add(X, Y), fresh(), fresh()
    for k in range(4):
        some = Y.eq(k)
        one_by_one.add(X[some], Y[some])
    for part in torch.randperm(300, generator=GENERATOR).split(7):
        rows.add(X[part], Y[part])
    assert joint.head.digest() == one_by_one.head.digest() == rows.head.digest()
    for part in torch.arange(100).split(9):
        joint.remove(X[part], Y[part])
    never = fresh().add(X[100:], Y[100:])
    assert joint.head.digest() == never.head.digest()


@pytest.mark.parametrize("name", MAPS)
def test_seeds_saving_and_precision(name):
    a, b, other = ready(name), ready(name), ready(name, seed=7)
    assert torch.equal(a(X), b(X))
    assert not torch.equal(a(X), other(X))
    buffer = io.BytesIO()
    torch.save(a.state_dict(), buffer)
    buffer.seek(0)
    fresh = MAPS[name](seed=7)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(fresh(X), a(X))
    for cast in (copy.deepcopy(a).half(), copy.deepcopy(a).to(torch.bfloat16), nn.Sequential(copy.deepcopy(a)).half()):
        assert torch.equal(cast(X), a(X))
    assert a(X.float()).dtype == torch.float64
    assert a.out_features == a(X).shape[1]
    assert str(a.seed) in repr(a)


@pytest.mark.parametrize("name", MAPS)
def test_export_with_any_batch_size(name):
    module = ready(name)
    program = torch.export.export(
        module, (X[:3],), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=2, max=4096)}}
    )
    torch.testing.assert_close(program.module()(X), module(X), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: RandomReLU(0, 5), "in_features"),
        (lambda: RandomReLU(5, 0), "out_features"),
        (lambda: RandomFourier(5, 5), "sigma or gamma"),
        (lambda: RandomFourier(5, 5, gamma=-1.0), "gamma"),
        (lambda: RandomReLU(5, 5)(X), "shape"),
        (lambda: Nystroem(RBF(sigma=1.0), 0), "landmarks"),
        (lambda: Nystroem(RBF(sigma=1.0), 301).fit(X), "landmarks need"),
        (lambda: Nystroem(RBF(sigma=1.0), 3).fit(X * float("nan")), "NaN"),
        (lambda: Nystroem(RBF(sigma=1.0), 3).fit(X)(X[:, :2]), "shape"),
    ],
)  # fmt: skip
def test_bad_input(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_nystroem_without_landmarks():
    with pytest.raises(NotFittedError):
        Nystroem(RBF(sigma=1.0), 3)(X)
