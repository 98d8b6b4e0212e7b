"""Files of kernel machines: pickles of version 0.1.0, written before modules had their present names, still load."""

import copy
import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch

import torchlssvm
from torchlssvm.kernels import RBF

OLD = Path(__file__).parents[1] / "fixtures" / "v0_1_0"
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(24, 3, dtype=torch.float64, generator=GENERATOR)
EXPECTED = json.loads((OLD / "pickled.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_pickle_of_version_0_1_0_loads_and_goes_on(name):
    machine = pickle.loads(gzip.decompress((OLD / f"{name}.pickle.gz").read_bytes()))
    scores = torch.tensor(EXPECTED[name]["scores"], dtype=torch.float64)
    assert machine.ids.tolist() == EXPECTED[name]["ids"]
    torch.testing.assert_close(machine(X), scores, rtol=1e-10, atol=1e-10)
    new = machine.add(X[:2], torch.tensor([0, 1]))
    assert new.tolist() == [25, 26]
    torch.testing.assert_close(machine.remove(new)(X), scores, rtol=1e-9, atol=1e-9)
    again = pickle.loads(pickle.dumps(machine))
    assert torch.equal(again(X), machine(X))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_pickle_names_no_part_of_a_machine(name):
    """Solvers may be rebuilt without making files unreadable: a pickle holds the machine, its kernel and tensors."""
    machine = pickle.loads(gzip.decompress((OLD / f"{name}.pickle.gz").read_bytes()))
    written = pickle.dumps(machine)
    for module in (b"inverse", b"dual", b"primal", b"growing_factor"):
        assert b"torchlssvm.kernel_machines." + module not in written


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
    machine.settle()
    check()
    for r in range(200, 240):
        machine.add(x[r : r + 1], y[r : r + 1])
        machine.remove(ids[r - 140])
    check()
