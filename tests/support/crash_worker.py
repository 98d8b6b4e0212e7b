"""A process that works on a store and may be killed at any moment; started once, it forks a child for each round.

    python tests/crash_worker.py STORE < commands

A command is one line of JSON, {"seed": 1} or {"seed": 1, "die_at": 17}: the child then works with random events, telling on
stdout what it begins and what was acknowledged, until it is killed, or kills itself before its 17th statement to SQLite.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torchlssvm.events import Add, Event, Relabel, Remove, Replace, to_primitives
from torchlssvm.store import SampleStore
from torchlssvm.store.database import Database

J, K = 5, 3


def say(kind: str, **more: Any) -> None:
    os.write(1, (json.dumps({"say": kind} | more) + "\n").encode())


def random_event(rng: random.Random, store: SampleStore) -> Event:
    held = store.find()
    x = torch.tensor([[rng.uniform(-2, 2) for _ in range(J)] for _ in range(6)])
    kinds = ["add"] if len(held) < 5 else ["add", "add", "remove", "subject", "relabel", "replace"]
    kind = rng.choice(kinds)
    if kind == "add":
        n = rng.randint(1, 6)
        ids = [f"{rng.getrandbits(48):x}" for _ in range(n)]
        return Add(ids=ids, x=x[:n], y=[rng.randrange(K) for _ in range(n)], subject=f"user-{rng.randrange(8)}")
    if kind == "subject" and store.subjects():
        return Remove(subject=rng.choice(sorted(store.subjects())))
    some = rng.sample(held, rng.randint(1, 3))
    if kind == "relabel":
        return Relabel(ids=some, y=[rng.randrange(K) for _ in some])
    if kind == "replace":
        return Replace(ids=some, x=x[: len(some)], y=[rng.randrange(K) for _ in some])
    return Remove(ids=some)


def work(path: Path, seed: int, die_at: int | None) -> None:
    rng = random.Random(seed)
    if die_at is not None:
        arm(die_at)
    store = SampleStore(path, snapshot_rows=12)
    say("ready")
    while True:
        choice = rng.random()
        if choice < 0.1:
            store.compact()
        elif choice < 0.15:
            store.close()
            store = SampleStore(path, snapshot_rows=12)
        else:
            events = [random_event(rng, store)]
            if choice < 0.3:
                ids = [f"{rng.getrandbits(48):x}"]
                events.append(Add(ids=ids, x=torch.ones(1, J), y=[0], subject="late"))
                events.append(Relabel(ids=ids, y=[1]))
            say("begin", events=[to_primitives(e) for e in events])
            receipts = store.apply(events)
            say("done", digest=receipts[-1].digest)


def arm(die_at: int) -> None:
    """Kill this process just before its n-th statement to SQLite."""
    count = 0
    plain = Database.errors

    def counted(self: Database) -> Any:
        nonlocal count
        count += 1
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self)

    Database.errors = counted  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    for line in sys.stdin:
        command = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                work(path, command["seed"], command.get("die_at"))
            except BaseException as error:
                say("failed", error=repr(error))
                raise
            finally:
                os._exit(1)
        say("forked", pid=child)
        _, status = os.waitpid(child, 0)
        say("ended", signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)


if __name__ == "__main__":
    main()
