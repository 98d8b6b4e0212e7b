"""Runs of one to three ranks that are killed and resumed, for tests/lightning/test_lightning_kill.py.

Each scenario leaves what it ended with in its folder, as ``rank<r>.json`` and ``codes.json``.
"""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.lightning_events import AFTER, BEFORE, DURING, Kill, Writer, write
from tests.support.lightning_ranks import launch, trainer
from tests.support.lightning_tools import loader, module
from torchlssvm.events import Remove
from torchlssvm.lightning import DataCorrection
from torchlssvm.store import SampleStore


def fit(folder: Path, rank: int, world: int, scenario: dict[str, Any], kill: dict[str, Any] | None) -> None:
    """One run, from the last checkpoint if there is one."""
    m = module(store=str(folder / "store") if scenario["stored"] else None)
    correction = DataCorrection(folder / "events.jsonl", dead_letters=folder / "dead.jsonl")
    save = ModelCheckpoint(folder, every_n_train_steps=2, save_last=True, save_top_k=0)
    epochs, last = scenario.get("epochs", 1), folder / "last.ckpt"
    callbacks = [Writer(folder / "events.jsonl", DURING, AFTER, epochs - 1), correction, save]
    if kill is not None:
        callbacks.append(Kill(kill["after"], tuple(kill["victims"]), kill.get("epoch", 0)))
    run = trainer(folder, world, max_epochs=epochs, callbacks=callbacks, enable_checkpointing=True)
    train = loader(batch_size=4 if world == 2 else 3, shuffle=scenario["shuffle"])
    run.fit(m, train, ckpt_path=str(last) if last.exists() else None, weights_only=True)
    found = {"digest": m.head.digest(), "reports": [(r.applied, r.repeated, r.refused) for r in correction.reports]}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def play(scenario: dict[str, Any]) -> None:
    """Events before the run, during its last epoch and after it; it is killed as often as the scenario says, then it ends."""
    folder, world = Path(scenario["folder"]), scenario["world"]
    write(folder / "events.jsonl", BEFORE)
    codes: list[Any] = []
    for kill in scenario["kills"]:
        codes.append(launch(world, partial(fit, scenario=scenario, kill=kill), folder))
    chance = random.Random(scenario.get("seed", 0))
    for _ in range(scenario.get("at random", 0)):
        codes.append(launch(world, partial(fit, scenario=scenario, kill=None), folder, kill=chance.uniform(0.3, 4)))
    if "erased" in scenario:  # by somebody else, before it is resumed
        with SampleStore(folder / "store") as store:
            store.apply(Remove(ids=[str(i) for i in scenario["erased"]]))
    codes.append(launch(world, partial(fit, scenario=scenario, kill=None), folder))
    (folder / "codes.json").write_text(json.dumps(codes))
