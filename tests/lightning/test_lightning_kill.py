"""One rank or several, killed in the middle of an epoch and resumed, events before, during and after: as if nothing had happened."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.lightning_events import expected
from tests.support.lightning_ranks import play
from torchlssvm.store import SampleStore

KILLED = -signal.SIGKILL
# Lightning deals samples out in the order of a DistributedSampler with seed 0: 66 is learned in batch 0, 31 in 3, 43 in 4.
SCENARIOS: dict[str, dict[str, Any]] = {
    "alone": {"world": 1, "stored": False, "kills": [{"after": 5, "victims": [0]}]},
    "alone, with a store": {
        "world": 1,
        "stored": True,
        "kills": [{"after": 3, "victims": [0]}, {"after": 7, "victims": [0]}],
    },
    "both": {"stored": False, "kills": [{"after": 5, "victims": [0, 1]}]},
    "both, then an erasure": {"stored": True, "kills": [{"after": 5, "victims": [0, 1]}], "erased": (66, 31, 43)},
    "the first": {"stored": False, "kills": [{"after": 7, "victims": [0]}]},
    "the second, with a store": {"stored": True, "kills": [{"after": 3, "victims": [1]}]},
}


def play_all(folder: Path, scenarios: dict[str, dict[str, Any]], seconds: float) -> None:
    """Play all scenarios, each in a folder of its own."""
    given = []
    for name, scenario in scenarios.items():
        place = folder / name.replace(" ", "_")
        place.mkdir()
        given.append({"world": 2, "shuffle": False} | scenario | {"folder": str(place)})
    play("tests.support.ddp_kill_worker", given, seconds)


def check(folder: Path, name: str, scenario: dict[str, Any]) -> None:
    place = folder / name.replace(" ", "_")
    codes = json.loads((place / "codes.json").read_text())
    world, stored = scenario.get("world", 2), scenario["stored"]
    assert codes[-1] == [0] * world, (place / "log0").read_text()[-3000:]
    for code, kill in zip(codes, scenario["kills"], strict=False):
        assert all(code[rank] == KILLED for rank in kill["victims"])
        assert all(code)  # a rank that has lost another one does not go on alone
    for rank in range(world):
        found = json.loads((place / f"rank{rank}.json").read_text())
        assert found["digest"] == expected(stored, scenario.get("erased", ()))
        assert found["reports"] == json.loads((place / "rank0.json").read_text())["reports"]
    if stored:
        with SampleStore(place / "store") as store:
            assert store.head.digest() == expected(stored, scenario.get("erased", ()))
            recorded = {store.recorded_id(name) for name in NAMES}
            from_events = [e.event_id for e in store.history() if e.event_id in recorded]
            assert sorted(from_events) == sorted(recorded)  # each of them, once


NAMES = {
    *(f"add{i}" for i in range(5)), "Remove3", "Relabel10", "Remove10", "Remove20", "late", "Remove60", "Relabel61",
}  # fmt: skip


@pytest.fixture(scope="module")
def played(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("kill")
    play_all(folder, SCENARIOS, 300)
    return folder


@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_and_resumed_it_ends_as_an_uninterrupted_run(played: Path, name: str) -> None:
    check(played, name, SCENARIOS[name])


LARGER: dict[str, dict[str, Any]] = {
    f"{world} ranks, victims {victims}, after {after}, {kind}": {
        "world": world, "stored": kind == "stored", "shuffle": True, "epochs": 2,
        "kills": [
            {"after": after, "victims": victims},
            {"after": after, "victims": victims[::-1], "epoch": 1},
            {"after": after + 1, "victims": victims, "epoch": 1},
        ],
    }
    for world, victims, after in [(2, [0], 1), (2, [1], 4), (3, [0, 1, 2], 3), (3, [2], 5)]
    for kind in ("stored", "not stored")
}  # fmt: skip
RANDOM: dict[str, dict[str, Any]] = {
    f"at random {seed}, {stored}": {
        "stored": stored,
        "shuffle": True,
        "epochs": 2,
        "kills": [],
        "at random": 5,
        "seed": seed,
    }
    for seed in range(3)
    for stored in (False, True)
}


@pytest.mark.slow
@pytest.mark.parametrize("scenarios", [LARGER, RANDOM], ids=["at given places", "at random moments"])
def test_larger_runs(tmp_path: Path, scenarios: dict[str, dict[str, Any]]) -> None:
    play_all(tmp_path, scenarios, 1500)
    for name, scenario in scenarios.items():
        check(tmp_path, name, scenario)
