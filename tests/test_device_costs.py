"""Public operations wait for the device once or twice, and float64 on a device is tested before use."""

import pytest
import torch

from tests.support.device_costs import SYNCHRONIZATIONS, measure
from tests.support.pretend_cuda import PretendCuda
from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.errors import InexactDeviceError
from torchlssvm.functional.device_products import products_are_exact, require_exact_products

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="waiting is counted on the pretended device")


@pytest.mark.parametrize("name", SYNCHRONIZATIONS)
def test_operations_wait_for_the_device_once_or_twice(name):
    with PretendCuda() as device:
        cost = measure(device, name)
    assert cost.synchronizations <= SYNCHRONIZATIONS[name], cost.synchronized


def test_a_device_with_too_few_bits_is_refused_before_anything_is_summed():
    x, y = torch.randn(8, 4).clamp(-4, 4), torch.arange(8) % 2
    try:
        with PretendCuda(product_error=2.0**-40):
            assert not products_are_exact(torch.device("cuda", 0))
            require_exact_products.cache_clear()
            head = LSSVMHead(4, 2, grid=FixedPoint(8.0), device="cuda")
            for _ in range(2):  # refused again
                with pytest.raises(InexactDeviceError, match="not exact"):
                    head.add(x.cuda(), y.cuda())
                assert head.n == 0
            LSSVMHead(4, 2, grid=None, device="cuda").add(x.cuda(), y.cuda())  # rounding is accepted there
    finally:
        require_exact_products.cache_clear()
    with PretendCuda():
        head.add(x.cuda(), y.cuda())
        assert head.digest() == LSSVMHead(4, 2, grid=FixedPoint(8.0)).add(x, y).digest()


@pytest.mark.parametrize("bits", [-30, -45, -50])
def test_small_errors_of_products_are_found(bits):
    with PretendCuda(product_error=2.0**bits):
        assert not products_are_exact(torch.device("cuda", 0))
    assert products_are_exact(torch.device("cpu"))
