"""Files of kernel machines: pickles of version 0.1.0, written before modules had their present names, still load."""

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch

OLD = Path(__file__).parent / "fixtures" / "v0_1_0"
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
