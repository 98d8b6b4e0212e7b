"""``torchlssvm history``, ``stats`` and ``demo``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torchlssvm.cli.console import OK, command, emit, open_store, table

if TYPE_CHECKING:
    from torchlssvm.cli.console import Commands


def register(commands: Commands) -> None:
    """Add the commands to the parser."""
    command(commands, "history", run_history, "List every event, after checking the chain they form.")
    command(commands, "stats", run_stats, "Count what the store holds.")
    text = "Learn digits with wrong labels, find and correct them, erase a user, and verify that nothing is left."
    demo = command(commands, "demo", run_demo, text, store=False)
    demo.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="folder of the picture (default: .)")
    demo.add_argument("--seed", type=seed, default=0, metavar="N", help="of everything random (default: 0)")


def run_history(options: argparse.Namespace) -> int:
    """All events, oldest first."""
    with open_store(options, readonly=True) as store:
        entries = store.history()
    names = ("position", "time", "kind", "samples", "event_id")
    events = [{name: getattr(e, name) for name in names} | {"chain": e.chain.hex()} for e in entries]
    lines = [f"{'':>6}  {'time (UTC)':<19}  {'kind':<8} {'samples':>8}  event"]
    lines += [f"{e.position:>6}  {e.time[:19]}  {e.kind:<8} {e.samples:>8}  {e.event_id}" for e in entries]
    emit(options, {"store": str(options.store), "events": events}, "\n".join(lines) if entries else "no event yet")
    return OK


def run_stats(options: argparse.Namespace) -> int:
    """Numbers of the store."""
    from torchlssvm.cli import settings

    with open_store(options, readonly=True) as store:
        kept, found = settings.load(store), store.stats()
    found |= {"class_names": kept.classes, "backbone": kept.backbone, "weights": kept.weights}
    shown = {name: value for name, value in found.items() if value not in (None, [], {})}
    shown["labels"] = ", ".join(f"{kept.name(int(k))}: {v}" for k, v in found["labels"].items()) or "none"
    shown["class_names"] = ", ".join(kept.classes) or "none"
    emit(options, found, table(shown))
    return OK


def run_demo(options: argparse.Namespace) -> int:
    """The demo; 1 if one of its checks fails."""
    from torchlssvm import demo

    return demo.run(options.out, options.seed, options.json)


def seed(text: str) -> int:
    """A seed that every random generator takes."""
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 2^63 - 1")
    return value
