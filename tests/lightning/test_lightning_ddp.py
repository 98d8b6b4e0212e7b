"""The same data over 1 and 3 processes: the same sums, weights and answers, and events that are applied once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.lightning_ranks import results
from tests.support.lightning_tools import LIMIT, J, K, samples, truth
from torchlssvm import FixedPoint, KernelLSSVM, LSSVMHead, MarginHead
from torchlssvm.events import from_primitives
from torchlssvm.kernels import RBF

WORLDS = (1, 3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: Any) -> dict[int, tuple[Path, list[dict[str, Any]]]]:
    """Folder and ranks of each number of processes."""
    folders = {world: tmp_path_factory.mktemp(f"world{world}") for world in WORLDS}
    found = results("tests.support.ddp_worker", folders)
    return {world: (folders[world], found[world]) for world in WORLDS}


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_ends_with_the_head_of_all_samples(runs: Any, world: int) -> None:
    x, y = samples()
    expected = truth(x, y)
    for found in runs[world][1]:
        assert found["plain"] == expected.digest()  # 67 samples: the sampler pads, nothing is counted twice
        assert found["val"] == pytest.approx(float((expected.predict(x) == y).float().mean()), abs=1e-6)
        assert found["auto"][1] == 67
        assert found["auto"] == runs[world][1][0]["auto"]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "name", [f"{targets} {grid}" for targets in ("multilabel", "regression") for grid in ("auto", 16.0)]
)
def test_several_labels_and_numbers(runs: Any, world: int, name: str) -> None:
    """Ranks agree on both grids, although the numbers of their first batches are of different sizes."""
    assert all(found[name] == runs[1][1][0][name] for found in runs[world][1])
    assert runs[world][1][0][name][0] == 67


@pytest.mark.parametrize("world", WORLDS)
def test_metrics_are_logged_without_a_warning_about_ranks(runs: Any, world: int) -> None:
    said = "\n".join(log.read_text() for log in runs[world][0].glob("log*"))
    assert "sync_dist" not in said, said[said.index("sync_dist") - 300 :]


def test_checkpoints_have_the_same_weights_bit_for_bit(runs: Any) -> None:
    for name in ("plain.ckpt", "events.ckpt"):
        states = [torch.load(runs[w][0] / name, weights_only=True)["state_dict"] for w in WORLDS]
        for key in ("w", "b", "C", "P"):
            values = [state[f"classifier.head.{key}"] for state in states]
            assert all(torch.equal(values[0], other) for other in values[1:]), (name, key)
    x, y = samples()
    saved = torch.load(runs[3][0] / "plain.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(saved["classifier.head.w"], truth(x, y).w)


@pytest.mark.parametrize("world", WORLDS)
def test_events_are_applied_once_on_all_ranks(runs: Any, world: int) -> None:
    x, y = samples()
    y = y.clone()
    y[[5, 40]] = (y[[5, 40]] + 1) % K
    keep = torch.tensor([i not in (2, 11, 66) for i in range(67)])
    folder, ranks = runs[world]
    for found in ranks:
        assert found["events"] == truth(x[keep], y[keep]).digest()
        assert [sum(r[k] for r in found["reports"]) for k in range(3)] == [5, 0, 0]
        assert found["waiting"] == ["bad"]  # the sample 999 has not arrived
    assert not (folder / "dead.jsonl").exists()


@pytest.mark.parametrize("world", WORLDS)
def test_a_store_under_several_ranks(runs: Any, world: int) -> None:
    x, y = samples()
    keep = torch.tensor([i not in (2, 11, 66) for i in range(67)])
    folder, ranks = runs[world]
    assert {found["store"] for found in ranks} == {truth(x[keep], y[keep]).digest()}
    lines = [line for line in (folder / "audit.jsonl").read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert all(from_primitives(json.loads(line)) for line in lines)


@pytest.mark.parametrize("world", WORLDS)
def test_machines_that_cannot_be_summed_are_alike_on_all_ranks(runs: Any, world: int) -> None:
    x, y = samples()
    keep = torch.tensor([i != 2 for i in range(67)])
    machines = {
        "kernel": KernelLSSVM(RBF(gamma=0.1), num_classes=K),
        "stored kernel": KernelLSSVM(RBF(gamma=0.1), num_classes=K),
        "margin": MarginHead(J, K, rho=1.0, grid=FixedPoint(LIMIT)),
        "float": LSSVMHead(J, K, rho=1.0, grid=None),
    }
    for name, machine in machines.items():
        machine.add(x[keep], y[keep])
        for found in runs[world][1]:
            scores = torch.tensor(found[name]).double()
            torch.testing.assert_close(scores, machine(x[:4]).flatten(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("world", WORLDS)
def test_fit_head_and_probe_see_each_sample_once(runs: Any, world: int) -> None:
    for found in runs[world][1]:
        assert found["fit"] == found["fit_alone"]
        assert found["probe"] == found["probe_alone"]


@pytest.mark.parametrize("world", WORLDS)
def test_each_loader_is_judged_by_itself_and_padding_is_not_counted(runs: Any, world: int) -> None:
    for found in runs[world][1]:
        assert found["judged"] == pytest.approx([0.8, 0.8, 1.0])
