"""Measure the time of predictions over HTTP (``/classify`` of the erasure service), with and without erasures.

    python recipes/benchmarks/erasure_service.py             # about two minutes on two cores
    python recipes/benchmarks/erasure_service.py --small     # seconds, for trying it out

The service runs in its own process under uvicorn, and the client uses httpx. Rounds alternate. In one round the service only
predicts. In the next it also erases one person after another, each with a receipt, a compaction and a signed certificate. A
client thread sends single rows at a steady rate. The data are random.
"""

import argparse
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from torchlssvm import LSSVMHead
from torchlssvm.audit import new_key
from torchlssvm.events import Add
from torchlssvm.store import SampleStore

RECIPE = Path(__file__).resolve().parents[1] / "erasure_service.py"
TOKENS = {role: f"{role}-token-of-the-benchmark" for role in ("reader", "writer", "officer")}
ASKED = 3.0
"""The p99 during erasures may be this many times the quiet one."""


def bearer(role: str) -> dict[str, str]:
    """The HTTP header with the token of a role."""
    return {"Authorization": f"Bearer {TOKENS[role]}"}


def make_store(folder: Path, people: int, rows_per_person: int, J: int) -> None:
    """A store of normal rows (n, J) in ten classes, and a key that signs certificates."""
    new_key(folder / "key.pem")
    with SampleStore(folder / "store", head=LSSVMHead(J, 10, grid=8.0)) as store:
        for person in range(people):
            x = torch.randn(rows_per_person, J).clamp(-6, 6)
            ids = [f"row-{person}-{k}" for k in range(rows_per_person)]
            store.apply(Add(ids, x, torch.arange(rows_per_person) % 10, [f"person-{person}"] * rows_per_person))


@contextmanager
def running_service(folder: Path) -> Iterator[str]:
    """Run the recipe in a process and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(RECIPE), str(folder / "store"), "--port", port]
    command += ["--outbox", str(folder / "outbox"), "--key", str(folder / "key.pem")]
    tokens = {f"ERASURE_{role.upper()}_TOKEN": token for role, token in TOKENS.items()}
    process = subprocess.Popen(command, env={**os.environ, **tokens})
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                httpx.get(f"{address}/health")
                break
            except httpx.TransportError:
                if process.poll() is not None:
                    raise RuntimeError("the service did not start") from None
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()


def prediction_times(address: str, x: list[list[float]], seconds: float, rate: float) -> list[float]:
    """Seconds of each prediction, counted from the time at which it was due, even if another one was still running."""
    times = []
    with httpx.Client(base_url=address, headers=bearer("reader"), timeout=60) as client:
        client.post("/classify", json={"x": x})
        start = time.perf_counter()
        for k in range(int(seconds * rate)):
            due = start + k / rate
            time.sleep(max(0.0, due - time.perf_counter()))
            client.post("/classify", json={"x": x}).raise_for_status()
            times.append(time.perf_counter() - due)
    return times


@contextmanager
def erasing(address: str, people: Iterator[int], finished: list[str]) -> Iterator[None]:
    """Erase one person after another inside the context. Answered requests are appended to ``finished``."""
    stop = threading.Event()

    def work() -> None:
        with httpx.Client(base_url=address, headers=bearer("officer"), timeout=60) as client:
            while not stop.is_set():
                answer = client.post("/erasures", json={"subject": f"person-{next(people)}"}).raise_for_status()
                request = answer.json()["request"]
                while client.get(f"/erasures/{request}").json()["state"] != "answered":
                    time.sleep(0.05)
                finished.append(request)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def percentile(times: Sequence[float], level: float) -> float:
    """A percentile in milliseconds."""
    return 1e3 * torch.tensor(times, dtype=torch.float64).quantile(level).item()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, and return the ratio of the 99th percentiles and the number of erasures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rate", type=float, default=50.0, help="predictions per second")
    o = parser.parse_args(argv)
    torch.manual_seed(0)
    people, rows, J, seconds = (50, 20, 32, 1.0) if o.small else (500, 40, 256, 8.0)
    quiet: list[float] = []
    busy: list[float] = []
    finished: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        make_store(Path(name), people, rows, J)
        x = torch.randn(1, J).tolist()
        numbers = itertools.count()
        with running_service(Path(name)) as address:
            prediction_times(address, x, 1.0, o.rate)  # warm up
            for _ in range(o.rounds):
                quiet += prediction_times(address, x, seconds, o.rate)
                with erasing(address, numbers, finished):
                    busy += prediction_times(address, x, seconds, o.rate)
    ratio = percentile(busy, 0.99) / percentile(quiet, 0.99)
    print(f"{people * rows} rows of {J} features, {len(quiet)} predictions each, {os.cpu_count()} cores")
    print("| /classify | p50, ms | p99, ms |\n|---|---|---|")
    for what, times in (("quiet", quiet), (f"during {len(finished)} erasures", busy)):
        print(f"| {what} | {percentile(times, 0.5):.1f} | {percentile(times, 0.99):.1f} |")
    print(f"p99 during erasures: {ratio:.1f} times the quiet one (asked: at most {ASKED:.0f})")
    return {"ratio": ratio, "erasures": len(finished)}


if __name__ == "__main__":
    main()
