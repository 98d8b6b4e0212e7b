"""Runs of several ranks on this machine: forked from a process that has imported everything, each with a log file."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch import distributed as dist

from tests.support.lightning_tools import quiet


def trainer(folder: Path, world: int, **options: Any) -> Any:
    """A quiet Trainer over gloo."""
    return quiet(folder, strategy=DDPStrategy(process_group_backend="gloo"), devices=world, **options)


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def _start(work: Callable[..., None], folder: Path, rank: int, world: int, port: str) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "NODE_RANK": "0", "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with (folder / f"log{rank}").open("a") as log:  # the process is forked: both streams are its own
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        work(folder, rank, world)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def launch(
    world: int, work: Callable[..., None], folder: Path, seconds: float = 120, patience: float = 2, kill: float = 0
) -> list[int | None]:
    """Run ``work(folder, rank, world)`` on each rank; their exit codes. If one dies the others are killed, a little later.

    ``kill``: after so many seconds all are, as when the machine goes down.
    """
    fork, port = multiprocessing.get_context("fork"), free_port()
    processes = [fork.Process(target=_start, args=(work, folder, rank, world, port)) for rank in range(world)]
    for process in processes:
        process.start()
    end = time.monotonic() + (kill or seconds)
    while any(p.is_alive() for p in processes) and time.monotonic() < end:
        if any(p.exitcode not in (None, 0) for p in processes):
            end = min(end, time.monotonic() + patience)
        time.sleep(0.02)
    for process in processes:
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def launch_or_exit(work: Callable[..., None], job: dict[str, Any]) -> None:
    """Run the work of a job, all of whose ranks must end well."""
    codes = launch(job["world"], work, Path(job["folder"]))
    if any(codes):
        sys.exit(f"{job}: exit codes {codes}")


def play(module: str, jobs: list[dict[str, Any]], seconds: float = 400) -> None:
    """Call ``play(job)`` of a module for each job, in a process of its own from which ranks can be forked."""
    code = f"import json, sys, torch; torch.set_num_threads(1); from {module} import play\n"
    code += "for job in json.loads(sys.argv[1]): play(job)"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(jobs)], cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    logs = "\n".join(log.read_text()[-1500:] for job in jobs for log in Path(job["folder"]).glob("log*"))
    assert done.returncode == 0, done.stderr[-2000:] + logs


def results(module: str, folders: dict[int, Path]) -> dict[int, list[dict[str, Any]]]:
    """Play a module once for each number of ranks; what each rank wrote into its ``rank<r>.json``."""
    play(module, [{"world": world, "folder": str(folder)} for world, folder in folders.items()])
    return {w: [json.loads((at / f"rank{r}.json").read_text()) for r in range(w)] for w, at in folders.items()}
