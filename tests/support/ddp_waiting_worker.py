"""Runs with corrections at the start, during and at the end, for tests/lightning/test_lightning_waiting_ddp.py."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.lightning_events import Writer, write
from tests.support.lightning_ranks import launch_or_exit, trainer
from tests.support.lightning_tools import K, indexed, module, samples
from torchlssvm import Certificate
from torchlssvm.events import Relabel, Remove, Replace
from torchlssvm.lightning import DataCorrection, ResumableLoader
from torchlssvm.store import SampleStore

X, Y = samples()
OTHER, _ = samples(67, seed=5)
CASES = list(zip(("start", "during", "end") * 2, (False, True) * 3, (False,) * 3 + (True,) * 3, strict=True))
"""When corrections arrive, whether samples are shuffled, whether there is a store."""


def corrections(stored: bool) -> list[Any]:
    """For samples near the start and the end of any order; with a store also for subjects."""
    pair = [13, 58]
    events = [
        *(Remove(ids=[str(i)], x=X[i : i + 1], y=Y[i : i + 1], event_id=f"r{i}") for i in (0, 7, 31, 66)),
        Remove(ids=["13", "58"], x=X[pair], y=Y[pair], event_id="pair"),
        Relabel(ids=["40"], x=X[40:41], y_old=Y[40:41], y=(Y[40:41] + 1) % K, event_id="label"),
        Replace(ids=["41"], x=OTHER[:1], x_old=X[41:42], y_old=Y[41:42], event_id="features"),
        Remove(ids=["nobody"], x=X[:1], y=Y[:1], event_id="never"),
    ]
    whose = [Remove(subject="3", event_id="whose"), Relabel(subject="4", y=1, event_id="whose label")]
    return [*events, *whose] if stored else events


def main(folder: Path, rank: int, world: int) -> None:
    found: dict[str, Any] = {}
    for moment, shuffle, stored in CASES:
        name = f"{moment} {shuffle} {stored}"
        place = folder / name.replace(" ", "_")
        if rank == 0:
            place.mkdir()
            write(place / "events.jsonl", corrections(stored) if moment == "start" else [])
        m = module(store=str(place / "store") if stored else None)
        script = {4 // world: corrections(stored)} if moment == "during" else {}
        writer = Writer(place / "events.jsonl", script, corrections(stored) if moment == "end" else [])
        certificates = {"certificates": place / "certificates"} if stored else {}
        correction = DataCorrection(place / "events.jsonl", every=2, dead_letters=place / "dead.jsonl", **certificates)
        train = ResumableLoader(indexed(subjects=[i % 5 for i in range(67)]), 8, shuffle=shuffle)
        trainer(folder, world, callbacks=[writer, correction]).fit(m, train)
        found[name] = {
            "digest": m.head.digest(), "n": m.head.n, "unanswered": m.unanswered, "refused": correction.refused,
            "applied": sum(r.applied for r in correction.reports),
        }  # fmt: skip
        if stored and rank == 0:
            with SampleStore(place / "store") as store:
                found[name]["ids"] = sorted(store.find())
                named = {store.recorded_id(event.event_id): event.event_id for event in corrections(stored)}
            files = (p for p in (place / "certificates").iterdir() if ".receipt." not in p.name)
            events = [e for path in files for e in Certificate.load(path).events]
            certified: dict[str, int] = {}
            for e in events:  # a random id: the event for a subject, applied to samples that came later
                first = named.get(e["event_id"], "whose")
                certified[first] = certified.get(first, 0) + e["samples"]
            found[name]["certified"] = certified
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


play = partial(launch_or_exit, main)
