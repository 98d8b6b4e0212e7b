"""The device that the CUDA tests run on: it refuses what a GPU refuses, counts what costs, and leaves torch as it was."""

import numpy as np
import pytest
import torch

from tests.support.pretend_cuda import PretendCuda, PretendTensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing has to be pretended")


@pytest.fixture
def device():
    with PretendCuda() as device:
        yield device


def test_values_are_those_of_the_cpu(device):
    x = torch.randn(5, 3, dtype=torch.float64)
    there = x.cuda()
    assert isinstance(there, PretendTensor)
    assert there.device == torch.device("cuda", 0)
    for f in (
        lambda t: t.T @ t,
        lambda t: t.sum(0),
        lambda t: t[[0, 2]],
        lambda t: t[np.array([1, 2])],
        lambda t: t[t > 0],
    ):
        assert f(there).is_cuda
        assert torch.equal(f(there).cpu(), f(x))
    assert there[0].tolist() == x[0].tolist()
    assert torch.tensor([1, 2], device="cuda").is_cuda
    with torch.device("cuda"):
        assert torch.arange(3).is_cuda


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x, z: x + torch.ones(3), RuntimeError),
        (lambda x, z: torch.ones(5, 3) + x, RuntimeError),
        (lambda x, z: torch.ones(3) @ x.T, RuntimeError),
        (lambda x, z: torch.cat([x, torch.ones(1, 3)]), RuntimeError),
        (lambda x, z: z[:, None] @ z[None], RuntimeError),  # a product of integers
        (lambda x, z: x.numpy(), TypeError),
        (lambda x, z: np.asarray(x), TypeError),
        (lambda x, z: torch.zeros(2, device="cuda:1"), RuntimeError),
        (lambda x, z: torch.zeros(2).add_(x[0, 0]), RuntimeError),  # a scalar of the device beside a CPU tensor
        (lambda x, z: torch.linalg.cholesky_ex((x.T @ x).half()), RuntimeError),
        (lambda x, z: x.pin_memory(), RuntimeError),
        (lambda x, z: x.expand(2, 5, 3).add_(1), RuntimeError),  # one place in memory, written twice
        (lambda x, z: torch.einsum("i,i->", z, z), RuntimeError),
        (lambda x, z: torch.where(x > 0, x, torch.zeros(5, 3)), RuntimeError),
        (lambda x, z: torch.addmm(torch.zeros(5, 5), x, x.T), RuntimeError),
        (lambda x, z: x[:, 0].copy_(torch.zeros(4)), RuntimeError),
    ],
)
def test_what_a_gpu_refuses(device, call, error):
    x, z = torch.ones(5, 3, device="cuda"), torch.arange(5, device="cuda")
    with pytest.raises(error):
        call(x, z)


@pytest.mark.parametrize(
    ("call", "synchronizations"),
    [
        (lambda x: x + 1, 0),
        (lambda x: x.sum().item(), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: x.cpu(), 1),
        (lambda x: torch.ones(3).cuda(), 1),
        (lambda x: torch.ones(3).to("cuda", non_blocking=True), 0),
        (lambda x: x.nonzero(), 1),
        (lambda x: torch.equal(x, x), 1),
        (lambda x: torch.linalg.cholesky_ex(x.T @ x), 0),
        (lambda x: torch.linalg.cholesky(x.T @ x + torch.eye(3, device="cuda")), 1),
        (lambda x: x[:0].cpu(), 0),
        (lambda x: x[torch.tensor([0, 1])], 1),  # indices of the host are copied
        (lambda x: torch.tensor([1.0, 2.0], device="cuda"), 1),
        (lambda x: bool((x > 100).any()), 1),
        (lambda x: torch.cuda.synchronize(), 1),
    ],
)
def test_synchronizations(device, call, synchronizations):
    x = torch.arange(15.0, device="cuda").reshape(5, 3)
    with device.counting() as cost:
        call(x)
    assert cost.synchronizations == synchronizations, cost.synchronized


def test_torch_is_as_before():
    before = dict(vars(torch.cuda)), torch.load, torch.get_default_device()
    with pytest.raises(RuntimeError, match="device"), PretendCuda():
        torch.ones(2, device="cuda").add_(torch.ones(2))
    with PretendCuda(), PretendCuda() as inner:
        assert PretendCuda.current() is inner
    assert (dict(vars(torch.cuda)), torch.load, torch.get_default_device()) == before
    assert not torch.cuda.is_available()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
