"""Runs with several ranks, for tests/test_lightning_ddp.py: ``python ddp_worker.py FOLDER:WORLD:PORT ...``.

All scenarios share one process group; each rank writes what it ended up with into FOLDER/rank<r>.json.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightning.pytorch import LightningModule  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

from tests.lightning_tools import J, K, loader, module, quiet, samples  # noqa: E402
from torchlssvm import FixedPoint, KernelLSSVM, LSSVMHead  # noqa: E402
from torchlssvm.events import Relabel, Remove  # noqa: E402
from torchlssvm.kernels import RBF  # noqa: E402
from torchlssvm.lightning import DataCorrection, FitHead, LabelAudit, LSSVMModule, OnlineProbe  # noqa: E402


def trainer(folder: Path, world: int, **options: Any) -> Any:
    return quiet(folder, strategy=DDPStrategy(process_group_backend="gloo"), devices=world, **options)


def corrections(x: Any, y: Any) -> list[Any]:
    removed = [Remove(ids=[str(i)], x=x[i : i + 1], y=y[i : i + 1], event_id=f"r{i}") for i in (2, 11, 66)]
    changed = [
        Relabel(ids=[str(i)], x=x[i : i + 1], y_old=y[i : i + 1], y=(y[i : i + 1] + 1) % K, event_id=f"l{i}")
        for i in (5, 40)
    ]
    bad = Remove(ids=["999"], x=x[:1], y=y[:1], event_id="bad")
    return [*removed, bad, *changed]


class Trained(LightningModule):
    """A network that learns by gradients and has a head beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Linear(J, 5)
        self.fc = nn.Linear(5, K)
        self.head = LSSVMHead(5, K, grid=FixedPoint(64.0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.fc(self.backbone(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.backbone(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main(folder: Path, rank: int, world: int) -> None:
    found: dict[str, Any] = {}
    x, y = samples()
    val = DataLoader(TensorDataset(x, y), batch_size=4)

    m = module()  # 67 samples: no number of ranks above 1 divides them
    run = trainer(folder, world)
    run.fit(m, DataLoader(TensorDataset(x, y), batch_size=8), val)
    found["plain"] = m.head.digest()
    found["val"] = float(run.callback_metrics["val_accuracy"])
    run.save_checkpoint(folder / "plain.ckpt")

    m = module()
    events = corrections(x, y)
    callback = DataCorrection(events, every=1000, limit=2, dead_letters=folder / "dead.jsonl")
    run = trainer(folder, world, max_epochs=2, callbacks=[callback])
    run.fit(m, loader(shuffle=True), val)
    while callback.look(run, m) is not None:
        pass
    found["events"] = m.head.digest()
    found["reports"] = [(r.applied, r.repeated, r.refused) for r in callback.reports]
    run.save_checkpoint(folder / "events.ckpt")

    m = module(store=str(folder / "store"))
    callback = DataCorrection([Remove(ids=["2"]), Remove(ids=["11", "66"])], every=1000)
    trainer(folder, world, max_epochs=2, callbacks=[callback, LabelAudit(folder / "audit.jsonl")]).fit(m, loader(), val)
    found["store"] = m.head.digest()

    auto = LSSVMModule("identity", K, in_features=J)
    trainer(folder, world).fit(auto, DataLoader(TensorDataset(x, y), batch_size=8))
    found["auto"] = [auto.head.digest(), auto.head.n]

    kernel = LSSVMModule("identity", K, in_features=J, head=KernelLSSVM(RBF(gamma=0.1), num_classes=K))
    trainer(folder, world, callbacks=[DataCorrection([Remove(ids=["2"])], every=1000)]).fit(kernel, loader())
    found["kernel"] = kernel.head(x[:4]).flatten().tolist()
    found["kernel_n"] = len(kernel.head.ids)

    net = Trained()
    probe = OnlineProbe("backbone", K, window=1000)
    trainer(folder, world, callbacks=[FitHead(when="train_end"), FitHead(when="epoch_end"), probe]).fit(net, val, val)
    found["fit"] = [net.head.n, net.head.digest()]
    with torch.no_grad():
        found["fit_alone"] = LSSVMHead(5, K, grid=FixedPoint(64.0)).add(net.backbone(x), y).digest()
    found["probe"] = [probe.accuracy, None if probe.probe is None else probe.probe.n]

    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def start(folder: Path, rank: int, world: int, port: str) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "NODE_RANK": "0", "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with (folder / f"log{rank}").open("w") as log:  # the process is forked: both streams are its own
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        main(folder, rank, world)


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")  # everything is imported once, for all of them
    for given in sys.argv[1:]:
        place, size, free = given.split(":")
        ranks = [fork.Process(target=start, args=(Path(place), r, int(size), free)) for r in range(int(size))]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        if any(process.exitcode != 0 for process in ranks):
            for process in ranks:
                process.kill()
            sys.exit(f"{place}: exit codes {[process.exitcode for process in ranks]}")
