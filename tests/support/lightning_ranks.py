"""Runs of several ranks on this machine: forked from a process that has imported everything, each with a log file."""

from __future__ import annotations

import multiprocessing
import os
import socket
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
