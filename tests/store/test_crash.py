"""Killed at any moment, a store comes back with exactly what it had acknowledged."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.errors import StoreError
from torchlssvm.events import Add, Relabel, Remove, Replace, from_primitives
from torchlssvm.store import SampleStore

J, K = 5, 3
GRID = FixedPoint(8.0)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork to start processes that are killed")


class Model:
    """What the store should hold: the acknowledged events, applied to a dict."""

    def __init__(self) -> None:
        self.samples: dict[str, tuple[torch.Tensor, int, str | None]] = {}
        self.pending: list[dict[str, Any]] = []
        self.digest: str | None = None
        self.events = 0

    def hear(self, message: dict[str, Any]) -> None:
        if message["say"] == "begin":
            self.pending = message["events"]
        elif message["say"] == "done":
            self.commit()
            self.digest = message["digest"]

    def commit(self) -> None:
        for data in self.pending:
            event = from_primitives(data)
            if isinstance(event, Add):
                for i, sample in enumerate(event.ids):
                    self.samples[sample] = (event.x[i], int(event.y[i]), event.subjects[i])
            else:
                ids = event.ids or [s for s, v in self.samples.items() if v[2] == event.subject]
                for i, sample in enumerate(ids):
                    x, _, subject = self.samples.pop(sample) if isinstance(event, Remove) else self.samples[sample]
                    if isinstance(event, Relabel):
                        self.samples[sample] = (x, int(event.y[i]), subject)
                    if isinstance(event, Replace):
                        self.samples[sample] = (event.x[i], int(event.y[i]), subject)
            self.events += 1
        self.pending = []

    def check(self, path: Path) -> str:
        """Open the store, compare, and return what the recovery did."""
        with SampleStore(path) as store:
            if self.pending:  # in flight when it was killed: either all of it or nothing
                known = [store.has_applied(e["event_id"]) for e in self.pending]
                assert all(known) or not any(known)
                if all(known):
                    assert not any(r.applied for r in store.apply([from_primitives(e) for e in self.pending]))
                    self.commit()
                self.pending = []
            assert len(store.history()) == self.events
            assert set(store.find()) == set(self.samples)
            head = LSSVMHead(J, K, grid=GRID)
            for x, y, _ in self.samples.values():
                head.add(x[None], torch.tensor([y]))
            assert store.head.digest() == head.digest()
            assert store.recompute() == (len(self.samples), head.digest())
            return store.live.recovery


class Zygote:
    """Starts children that work on the store, and hears what they say."""

    def __init__(self, path: Path):
        script = Path(__file__).parents[1] / "support" / "crash_worker.py"
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def round(self, model: Model, command: dict[str, Any], after: float | None) -> None:
        """One child, killed ``after`` seconds of work unless it kills itself."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write((json.dumps(command) + "\n").encode())
        self.process.stdin.flush()
        timer, pid = None, 0
        for line in self.process.stdout:
            message = json.loads(line)
            assert message["say"] != "failed", message
            model.hear(message)
            if message["say"] == "forked":
                pid = message["pid"]
            if message["say"] == "ready" and after is not None:
                timer = threading.Timer(after, os.kill, (pid, signal.SIGKILL))
                timer.start()
            if message["say"] == "ended":
                assert message["signal"] == signal.SIGKILL
                break
        if timer is not None:
            timer.join()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    SampleStore(tmp_path / "store", head=LSSVMHead(J, K, grid=GRID)).close()
    process = Zygote(tmp_path / "store")
    yield process
    process.close()


@pytest.mark.parametrize("kills", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_at_random(zygote: Zygote, tmp_path: Path, kills: int) -> None:
    rng, model, recoveries = random.Random(kills), Model(), []
    for seed in range(kills):
        zygote.round(model, {"seed": seed}, rng.uniform(0.0, 0.25))
        recoveries.append(model.check(tmp_path / "store"))
    assert model.events  # how many they are in that time is up to the machine
    if kills >= 200:
        kinds = {r.split()[0] for r in recoveries}
        assert kinds == {"rebuilt", "loaded", "rolled"}, kinds
        print(f"\n{kills} kills, {model.events} events acknowledged, {len(model.samples)} samples held at the end")


@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_before_each_statement(zygote: Zygote, tmp_path: Path, step: int) -> None:
    model = Model()
    zygote.round(model, {"seed": 1}, 0.2)
    model.check(tmp_path / "store")
    for die_at in range(1, 300, step):
        zygote.round(model, {"seed": die_at, "die_at": die_at}, None)
        model.check(tmp_path / "store")


# -- a power cut on a disk that did not keep its promises ---------------------------------------------------------------


def traffic(path: Path, rounds: int) -> list[str]:
    """A store with a log; the digest after each event."""
    store = SampleStore(path, head=LSSVMHead(J, K, grid=GRID))
    digests = [store.head.digest()]
    generator = torch.Generator().manual_seed(0)
    for i in range(rounds):
        x = torch.randn(3, J, generator=generator)
        store.apply(Add(ids=[f"{i}-{j}" for j in range(3)], x=x, y=[0, 1, 2], subject=f"u{i}"))
        digests.append(store.head.digest())
        if i % 3 == 2:
            store.apply(Remove(subject=f"u{i - 1}"))
            digests.append(store.head.digest())
    copy = path.with_name("live")
    shutil.copytree(path, copy)  # with its log, as a power cut leaves it
    store.close()
    return digests


def outcome(path: Path, digests: list[str], **options: Any) -> str:
    """Either a named error, or one of the states that was; anything else fails the test."""
    try:
        with SampleStore(path, **options) as store:
            at = sum(entry.kind != "rollback" for entry in store.history())
            assert store.head.digest() == digests[at]
            assert store.recompute() == (len(store), digests[at])
            return "last" if at == len(digests) - 1 else "earlier"
    except StoreError:
        return "error"


def test_a_log_cut_anywhere(tmp_path: Path) -> None:
    digests = traffic(tmp_path / "store", 6)
    log = (tmp_path / "live" / "samples.sqlite-wal").read_bytes()
    frame = 24 + 4096
    cuts = sorted(
        {*range(0, len(log), len(log) // 12), len(log), len(log) - 1, len(log) - frame, len(log) - frame // 2, 32}
    )
    seen = []
    for cut in cuts:
        target = tmp_path / f"cut{cut}"
        shutil.copytree(tmp_path / "live", target)
        (target / "samples.sqlite-wal").write_bytes(log[:cut])
        (target / "samples.sqlite-shm").unlink(missing_ok=True)
        result = outcome(target, digests)
        assert result == ("last" if cut == len(log) else "error"), (
            cut
        )  # what was acknowledged is missing: not in silence
        shutil.rmtree(target)
        shutil.copytree(tmp_path / "live", target)
        (target / "samples.sqlite-wal").write_bytes(log[:cut])
        (target / "samples.sqlite-shm").unlink(missing_ok=True)
        seen.append(outcome(target, digests, accept_rollback=True))
    assert set(seen) == {"last", "earlier", "error"} or set(seen) == {"last", "earlier"}


def test_a_torn_last_page(tmp_path: Path) -> None:
    digests = traffic(tmp_path / "store", 4)
    for name in ("samples.sqlite", "samples.sqlite-wal", "acknowledged"):
        content = (tmp_path / "live" / name).read_bytes()
        for size in (64, 512, 2048):
            target = tmp_path / f"torn-{name}-{size}"
            shutil.copytree(tmp_path / "live", target)
            (target / name).write_bytes(content[:-size] + os.urandom(min(size, len(content))))
            (target / "samples.sqlite-shm").unlink(missing_ok=True)
            assert outcome(target, digests) in ("last", "error"), (name, size)


def test_a_snapshot_that_is_damaged_is_not_needed(tmp_path: Path) -> None:
    digests = traffic(tmp_path / "store", 3)
    snapshot = next((tmp_path / "store").glob("*.snapshot.pt"))
    content = bytearray(snapshot.read_bytes())
    rng = random.Random(0)
    for _ in range(25):
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 1, 8])):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        for path in (tmp_path / "store").glob("*.snapshot.pt"):
            path.unlink()
        snapshot.write_bytes(damaged[: rng.choice([len(damaged), len(damaged), len(damaged) // 2])])
        assert outcome(tmp_path / "store", digests) == "last"
