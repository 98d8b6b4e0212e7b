"""Files of kernel machines: a machine comes back to the bit, and other formats are refused."""

import copy
import json
import pickle

import pytest
import torch

import torchlssvm
from torchlssvm.functional.byte_tensors import bytes_to_tensor, tensor_to_bytes
from torchlssvm.kernels import RBF


@pytest.mark.parametrize("name", ["KernelLSSVM", "LagrangianSVM"])
def test_scores_come_back_to_the_bit_from_any_state(name):
    """Just added in bulk, with gaps where samples were removed, with new samples in the gaps, settled or not."""
    x = torch.randn(300, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 0).long()
    machine = getattr(torchlssvm, name)(RBF(sigma=2.0), C=3.0)
    ids = machine.add(x[:150], y[:150])

    def check():
        twin = getattr(torchlssvm, name)(RBF(sigma=1.0))
        twin.load_state_dict(machine.state_dict())
        for other in (twin, pickle.loads(pickle.dumps(machine)), copy.deepcopy(machine)):
            assert torch.equal(other(x), machine(x))
            assert torch.equal(other.alpha, machine.alpha)
            assert torch.equal(other.b, machine.b)

    check()
    for i in ids[10:40]:
        machine.remove(i)
    check()
    for r in range(150, 200):
        machine.add(x[r : r + 1], y[r : r + 1])
    check()
    machine.compute_inverse()
    check()
    for r in range(200, 240):
        machine.add(x[r : r + 1], y[r : r + 1])
        machine.remove(ids[r - 140])
    check()


@pytest.mark.parametrize("name", ["KernelLSSVM", "LagrangianSVM"])
def test_another_format_is_refused_and_changes_nothing(name):
    machine = getattr(torchlssvm, name)(RBF(sigma=2.0))
    x = torch.randn(6, 2, dtype=torch.float64)
    machine.add(x, torch.arange(6) % 2)
    before, state = machine(x), machine.state_dict()
    options = json.loads(tensor_to_bytes(state["options"]).decode()) | {"format": 2}
    with pytest.raises(RuntimeError, match="format 1"):
        machine.load_state_dict(state | {"options": bytes_to_tensor(json.dumps(options).encode())})
    assert torch.equal(machine(x), before)
