"""A run with events before, during and after it, for the tests that kill one: the script, its writer, its end."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from tests.support.lightning_tools import K, samples, truth
from torchlssvm.events import Add, Relabel, Remove, to_primitives
from torchlssvm.lightning import ranks

X, Y = samples()
EXTRA = samples(30, seed=1)


def carried(kind: Any, i: int, **more: Any) -> Any:
    y = {"y": Y[i : i + 1]} if kind is Remove else {"y_old": Y[i : i + 1], "y": (Y[i : i + 1] + 1) % K}
    return kind(ids=[str(i)], x=X[i : i + 1], event_id=f"{kind.__name__}{i}", **y)


class Writer(Callback):
    """Somebody who appends events to a file while a run goes on; after a restart some of them once more."""

    def __init__(self, path: Path, script: dict[int, list[Any]], end: list[Any] | None = None, epoch: int = 0):
        self.path, self.script, self.end, self.epoch = path, script, end or [], epoch

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if ranks.is_first() and trainer.current_epoch == self.epoch:
            write(self.path, self.script.get(batch_idx, []))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if ranks.is_first() and trainer.current_epoch == self.epoch:
            write(self.path, self.end)


def write(path: Path, events: list[Any]) -> None:
    with path.open("a") as file:
        for event in events:
            file.write((event if isinstance(event, str) else json.dumps(to_primitives(event))) + "\n")


class Kill(Callback):
    """kill -9 after so many batches: no exception, nothing is closed. ``victims``: which ranks, where there are several."""

    def __init__(self, after: int, victims: tuple[int, ...] = (0,), epoch: int = 0):
        self.after, self.victims, self.epoch = after, victims, epoch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        place = (trainer.current_epoch, args[2] + 1)
        if place == (self.epoch, self.after) and trainer.global_rank in self.victims:
            os.kill(os.getpid(), signal.SIGKILL)


BEFORE = [Add(ids=[f"new{i}"], x=EXTRA[0][i : i + 1], y=EXTRA[1][i : i + 1], event_id=f"add{i}") for i in range(5)]
DURING = {
    2: [carried(Remove, 3), "nonsense", carried(Relabel, 10)],
    4: [carried(Remove, 10), carried(Remove, 20)],  # 10 was relabelled: what it carries is no longer held
    6: [BEFORE[0], Remove(ids=["new1"], x=EXTRA[0][1:2], y=EXTRA[1][1:2], event_id="late")],
}
AFTER = [carried(Remove, 60), carried(Relabel, 61)]


def expected(stored: bool, erased: tuple[int, ...] = ()) -> str:
    keep = torch.tensor([i not in (3, 20, 60, *erased) for i in range(67)])
    y = Y.clone()
    y[[10, 61]] = (y[[10, 61]] + 1) % K
    new = [0, 2, 3, 4]
    want = truth(torch.cat([X[keep], EXTRA[0][new]]), torch.cat([y[keep], EXTRA[1][new]]))
    if stored:  # a store takes the removal of 10 by its id, whatever the event carries
        want.remove(X[10:11], y[10:11])
    return want.digest()
