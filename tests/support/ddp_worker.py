"""Runs with several ranks, for tests/lightning/test_lightning_ddp.py; all scenarios share one process group."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.support.lightning_ranks import launch_or_exit, trainer
from tests.support.lightning_tools import J, K, Network, loader, module, samples
from torchlssvm import FixedPoint, KernelLSSVM, LSSVMHead
from torchlssvm.events import Relabel, Remove
from torchlssvm.kernels import RBF
from torchlssvm.lightning import DataCorrection, FitHead, Indexed, LabelAudit, LSSVMModule, OnlineProbe

COPIED: dict[str, dict[str, Any]] = {"margin": {"head": "margin", "rho": 1.0}, "float": {"grid": None, "rho": 1.0}}
"""Heads that the first rank learns and the others copy."""


def corrections(x: Any, y: Any) -> list[Any]:
    removed = [Remove(ids=[str(i)], x=x[i : i + 1], y=y[i : i + 1], event_id=f"r{i}") for i in (2, 11, 66)]
    changed = [
        Relabel(ids=[str(i)], x=x[i : i + 1], y_old=y[i : i + 1], y=(y[i : i + 1] + 1) % K, event_id=f"l{i}")
        for i in (5, 40)
    ]
    bad = Remove(ids=["999"], x=x[:1], y=y[:1], event_id="bad")
    return [*removed, bad, *changed]


def eight(x: Tensor) -> Tensor:
    """Features whose bits do not depend on the size of a batch."""
    return torch.cat([x, x[:, :2].square()], 1)


class Watched(Network):
    """A network with a layer whose output is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((self.inputs(batch[0]), batch[1]), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.inputs(batch[0])


def judged(folder: Path, rank: int, world: int, m: Any, right: Any) -> list[float]:
    """Accuracies of loaders with 5 samples, 4 of them right, that no number of ranks above 1 divides: padding is not counted.

    One of them is shared out by a sampler of one's own, and only its ids tell which samples are repeated.
    """
    x, y = right
    y = y.clone()
    y[4] = (y[4] + 1) % K
    data, size = TensorDataset(x, y), -(-5 // world)
    mine = [(rank + k * world) % 5 for k in range(size)]
    loaders = [
        DataLoader(Indexed(data), batch_size=2, sampler=mine),
        DataLoader(data, batch_size=2, sampler=DistributedSampler(data, world, rank, shuffle=False)),
        DataLoader(TensorDataset(*right), batch_size=2, sampler=DistributedSampler(data, world, rank, shuffle=False)),
    ]
    found = trainer(folder, world, use_distributed_sampler=False).test(m, loaders, verbose=False)
    return [found[k][f"test_accuracy/dataloader_idx_{k}"] for k in range(3)]


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
    known = (m.head.predict(x) == y).nonzero()[:5, 0]
    found["judged"] = judged(folder, rank, world, m, (x[known], y[known]))

    for targets, several in (
        ("multilabel", x[:, :K] > 0.5),
        ("regression", x[:, :K] * (1 + torch.arange(67)[:, None])),
    ):
        for grid in ("auto", 16.0):
            m = module(targets=targets, grid=grid)
            trainer(folder, world).fit(m, DataLoader(TensorDataset(x, several), batch_size=69 // world))
            found[f"{targets} {grid}"] = (m.head.n, m.head.digest())

    m = module()
    events = corrections(x, y)
    callback = DataCorrection(events, every=1000, limit=2, dead_letters=folder / "dead.jsonl")
    run = trainer(folder, world, max_epochs=2, callbacks=[callback])
    run.fit(m, loader(shuffle=True), val)
    while callback.look(run, m) is not None:
        pass
    found["events"] = m.head.digest()
    found["reports"] = [(r.applied, r.repeated, r.refused) for r in callback.reports]
    found["waiting"] = [p.event.event_id for p in m.learner.corrector.queue.unanswered]
    run.save_checkpoint(folder / "events.ckpt")

    m = module(store=str(folder / "store"))
    callback = DataCorrection([Remove(ids=["2"]), Remove(ids=["11", "66"])], every=1000)
    trainer(folder, world, max_epochs=2, callbacks=[callback, LabelAudit(folder / "audit.jsonl")]).fit(m, loader(), val)
    found["store"] = m.head.digest()

    auto = LSSVMModule("identity", K, in_features=J)
    trainer(folder, world).fit(auto, DataLoader(TensorDataset(x, y), batch_size=8))
    found["auto"] = [auto.head.digest(), auto.head.n]

    for name in ("kernel", "stored kernel"):
        store = str(folder / "kernel") if name == "stored kernel" else None
        machine = KernelLSSVM(RBF(gamma=0.1), num_classes=K)
        kernel = LSSVMModule("identity", K, in_features=J, head=machine, store=store)
        trainer(folder, world, callbacks=[DataCorrection([Remove(ids=["2"])], every=1000)]).fit(kernel, loader())
        found[name] = kernel.head(x[:4]).flatten().tolist()

    for name, options in COPIED.items():
        m = module(**options)
        trainer(folder, world, callbacks=[DataCorrection([Remove(ids=["2"], x=x[2:3], y=y[2:3])])]).fit(
            m, loader(), val
        )
        found[name] = m.head(x[:4]).flatten().tolist()

    net = Watched()
    probe = OnlineProbe("inputs", K, window=1000)
    hooks = [FitHead(when="train_end", features=eight), FitHead(when="epoch_end", features=eight), probe]
    trainer(folder, world, callbacks=hooks).fit(net, val, val)
    found["fit"] = net.head.digest()
    found["fit_alone"] = LSSVMHead(8, K, grid=FixedPoint(64.0)).add(eight(x), y).digest()
    assert probe.probe is not None
    found["probe"] = [probe.accuracy, probe.probe.digest()]
    alone = LSSVMHead(J, K, grid=probe.probe.grid, rho="gcv").add(x, y)
    found["probe_alone"] = [float((alone.predict(x) == y).double().mean()), alone.digest()]

    (folder / f"rank{rank}.json").write_text(json.dumps(found))


play = partial(launch_or_exit, main)
