"""The device that the CUDA tests run on: it refuses what a GPU refuses, counts what costs, and leaves torch as it was."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

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
    for f in (lambda t: t.T @ t, lambda t: t[[0, 2]], lambda t: t[np.array([1, 2])], lambda t: t[t > 0]):
        assert f(there).is_cuda
        assert torch.equal(f(there).cpu(), f(x))
    assert there[0].tolist() == x[0].tolist()
    assert torch.tensor([1, 2], device="cuda").is_cuda
    with torch.device("cuda"):
        assert torch.arange(3).is_cuda


def test_writing_to_a_view_writes_to_its_base(device):
    x = torch.zeros(4, 3, device="cuda")
    x[1] = 7
    x.view(-1)[0] = 2
    x[:, 2:].add_(1)
    assert x.cpu().tolist() == [[2, 0, 1], [7, 7, 8], [0, 0, 1], [0, 0, 1]]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x, z: x + torch.ones(3), RuntimeError),
        (lambda x, z: torch.ones(3) @ x.T, RuntimeError),
        (lambda x, z: torch.cat([x, torch.ones(1, 3)]), RuntimeError),
        (lambda x, z: z[:, None] @ z[None], RuntimeError),  # a product of integers
        (lambda x, z: x.numpy(), TypeError),
        (lambda x, z: np.asarray(x), TypeError),
        (lambda x, z: torch.zeros(2, device="cuda:1"), RuntimeError),
        (lambda x, z: torch.zeros(2).add_(x[0, 0]), RuntimeError),  # a scalar of the device beside a CPU tensor
        (lambda x, z: torch.linalg.cholesky_ex((x.T @ x).half()), RuntimeError),
        (lambda x, z: x.expand(2, 5, 3).add_(1), RuntimeError),  # one place in memory, written twice
        (lambda x, z: x[:, 0].copy_(torch.zeros(4)), RuntimeError),
    ],
)
def test_what_a_gpu_refuses(device, call, error):
    x, z = torch.ones(5, 3, device="cuda"), torch.arange(5, device="cuda")
    with pytest.raises(error):
        call(x, z)


def test_what_a_gpu_allows_across_devices(device):
    x = torch.ones(5, 3, device="cuda")
    assert (x * torch.tensor(2.0)).sum().item() == 30
    assert x[torch.tensor([0, 1])].shape == (2, 3)
    host = torch.zeros(5, 3)
    host.copy_(x)
    assert host.sum() == 15
    assert type(host) is torch.Tensor


@pytest.mark.parametrize(
    ("call", "launches", "synchronizations"),
    [
        (lambda x: x + 1, 1, 0),
        (lambda x: x.sum().item(), 1, 1),
        (lambda x: x[x > 0], 2, 1),
        (lambda x: x.cpu(), 1, 1),
        (lambda x: torch.ones(3).cuda(), 1, 1),
        (lambda x: torch.ones(3).to("cuda", non_blocking=True), 1, 0),
        (lambda x: x.nonzero(), 1, 1),
        (lambda x: torch.equal(x, x), 0, 1),
        (lambda x: torch.linalg.cholesky_ex(x.T @ x), 2, 0),
        (lambda x: torch.linalg.cholesky(x.T @ x + torch.eye(3, device="cuda")), 4, 1),
        (lambda x: x.unique(), 1, 1),
        (lambda x: x[:0].clone(), 0, 0),
        (lambda x: x[torch.tensor([0, 1])], 1, 1),  # indices of the host are copied
        (lambda x: torch.linalg.solve_triangular(x[:3].clone(), x[:3], upper=False), 2, 0),
        (lambda x: torch.cuda.synchronize(), 0, 1),
    ],
)
def test_costs(device, call, launches, synchronizations):
    x = torch.arange(15.0, device="cuda").reshape(5, 3)
    with device.counting() as cost:
        call(x)
    assert (cost.launches, cost.synchronizations) == (launches, synchronizations), cost.by_name


def test_modules_and_files(device):
    module = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    before = module(x)
    module.cuda()
    assert torch.equal(module(x.cuda()).cpu(), before)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["weight"].is_cuda
    file.seek(0)
    assert not torch.load(file, weights_only=True, map_location="cpu")["weight"].is_cuda
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin.weight.is_cuda
        assert torch.equal(twin(x.cuda()).cpu(), before)
    assert type(module.cpu().weight) is nn.Parameter


def patched():
    """Everything of torch that the device may touch."""
    stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    flags = torch._C._only_lift_cpu_tensors(), torch.__future__.get_overwrite_module_params_on_conversion()
    functions = torch.overrides._get_current_function_mode_stack()
    known = set(torch.serialization.get_safe_globals())
    return dict(vars(torch.cuda)), torch.load, flags, stack, functions, torch.get_default_device(), known


def test_torch_is_as_before():
    before = patched()
    with pytest.raises(RuntimeError, match="device"), PretendCuda():
        torch.ones(2, device="cuda").add_(torch.ones(2))
    assert patched() == before
    with PretendCuda(), PretendCuda() as inner:
        assert PretendCuda.current() is inner
    assert patched() == before
    assert not torch.cuda.is_available()
    assert not PretendCuda.active
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def test_a_device_with_too_few_bits_is_told():
    with PretendCuda(product_error=2.0**-40):
        x = torch.ones(4, 4, dtype=torch.float64, device="cuda")
        assert (x @ x).cpu().max() > 4
