"""Real processes for the tests of ranks: started once, they run many scenarios, in groups of 1 to 4."""

from __future__ import annotations

import datetime
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Failed(str):
    """A traceback from a rank, in the place of a result."""


def _main(rank: int, world: int, folder: str, seconds: float, jobs: list[Callable[..., Any]]) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timeout)
    results = {}
    for job in jobs:
        try:
            results[job.__name__] = job(rank, world)
        except BaseException:
            results[job.__name__] = Failed(traceback.format_exc())
        torch.save(results, Path(folder) / f"{rank}.part")
        try:
            dist.barrier()  # a scenario that went wrong on one rank ends here for all, not in the next one
        except RuntimeError:
            return
    os.replace(Path(folder) / f"{rank}.part", Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def run(world: int, jobs: list[Callable[..., Any]], seconds: float = 60.0) -> dict[str, list[Any]]:
    """Each job's results, by rank. Jobs are functions (rank, world) of an importable module."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("forkserver")  # one by one: torch's own spawn ends all processes when one dies
        context.set_forkserver_preload(["pytest", "torchlssvm.distributed", "tests.support.ranks"])
        processes = [context.Process(target=_main, args=(r, world, folder, seconds, jobs)) for r in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=300)
            if process.is_alive():
                process.kill()
                process.join()
        out: dict[str, list[Any]] = {job.__name__: [Failed("no result")] * world for job in jobs}
        for rank in range(world):
            for path in (Path(folder) / f"{rank}.part", Path(folder) / f"{rank}.pt"):
                if path.exists():
                    for name, result in torch.load(path, weights_only=False).items():
                        out[name][rank] = result
        return out


def caught(call: Callable[[], Any]) -> tuple[str, str]:
    """The kind and text of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""
