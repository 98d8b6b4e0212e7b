"""Compare the cost of 1,000 single-sample events with the work of the head itself, with 1,280 features.

    python recipes/benchmarks/corrections.py            # about a minute on two cores
    python recipes/benchmarks/corrections.py --small    # seconds, for trying it out

- All events at once: Corrector.apply of all events and one read of w, compared with the bare float64 product of their rows
  (``q.T @ q``) and one solve of the head.
- One event at a time: DataCorrection.look for each event (source, checks, hashes, report), compared with the head's own update
  for the same sample. A read of w follows each.

The two sides of a comparison take turns, and the figures are medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any
from unittest import mock

import torch

from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.corrections.corrector import Corrector
from torchlssvm.events import Add, Remove
from torchlssvm.lightning import DataCorrection


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    o = parser.parse_args(argv)
    J, count, held = (128, 50, 400) if o.small else (1280, 1000, 5000)
    torch.manual_seed(0)
    x, y = torch.randn(held + count, J).clamp(-7.9, 7.9), torch.arange(held + count) % 10
    grid = FixedPoint(limit=8.0)
    names = [str(i) for i in range(held + count)]

    def learned() -> Corrector:
        corrector = Corrector(LSSVMHead(J, 10, grid=grid, rho=1.0))
        corrector.apply([Add(ids=names[:held], x=x[:held], y=y[:held])])
        _ = corrector.head.w
        return corrector

    new = range(held, held + count)
    adds = [Add(ids=[names[i]], x=x[i : i + 1], y=y[i : i + 1]) for i in new]
    removes = [Remove(ids=[names[i]], x=x[i : i + 1], y=y[i : i + 1]) for i in new]
    q = grid.integers(x[held:]).double()
    corrector = learned()
    head = corrector.head
    times: dict[str, list[float]] = {k: [] for k in ("product", "solve", "adds", "removes")}

    def burst(events: list[Any]) -> None:
        assert all(outcome.status == "applied" for outcome in corrector.apply(events))
        _ = head.w

    for _ in range(o.repeats):
        corrector.samples.applied.clear()  # so that the same events count again
        times["product"].append(timed(lambda: q.T @ q))
        times["adds"].append(timed(lambda: burst(adds)))
        times["solve"].append(timed(head.refresh))
        times["removes"].append(timed(lambda: burst(removes)))
    t = {k: median(v) for k, v in times.items()}
    result = {f"burst_{k}": t[k] / (t["product"] + t["solve"]) for k in ("adds", "removes")}
    bare = 1000 * (t["product"] + t["solve"])
    print(
        f"{count} events, {J} features, {torch.get_num_threads()} thread(s); bare product and one solve: {bare:.0f} ms"
    )
    for kind in ("adds", "removes"):
        print(f"  one burst of {kind:8} {1000 * t[kind]:7.0f} ms, {result[f'burst_{kind}']:.2f} times that")

    # One by one.
    some = min(count, 100)
    alone, module = learned().head, mock.Mock(spec=["head", "learner"])
    module.head, module.learner = learned().head, None
    trainer = mock.Mock(loggers=[], global_step=0)
    queue: list[Any] = [*adds[:some], *removes[:some]]
    correction = DataCorrection(queue, limit=1)
    correction.begin(module)
    own, through = [], []
    for event in queue:
        verb = alone.add if isinstance(event, Add) else alone.remove

        def update(verb: Any = verb, event: Any = event) -> None:
            verb(event.x, event.y)
            _ = alone.w

        def look() -> None:
            report = correction.look(trainer, module)
            assert report is not None
            assert report.applied == 1
            _ = module.head.w

        own.append(timed(update))
        through.append(timed(look))
    assert alone.digest() == module.head.digest()
    result["own_ms"], result["through_ms"] = 1000 * median(own), 1000 * median(through)
    result["overhead_ms"] = 1000 * median([b - a for a, b in zip(own, through, strict=True)])
    print(
        f"  one by one: {result['own_ms']:.2f} ms by the head alone, {result['through_ms']:.2f} ms through DataCorrection, ",
        end="",
    )
    print(f"overhead {result['overhead_ms']:.2f} ms an event")
    return result


if __name__ == "__main__":
    main()
