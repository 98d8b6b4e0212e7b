"""Runs with several ranks, for tests/test_lightning_ddp.py: ``python ddp_worker.py FOLDER:WORLD ...``.

All scenarios share one process group; each rank writes what it ended up with into FOLDER/rank<r>.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.lightning_ranks import launch, trainer  # noqa: E402
from tests.support.lightning_tools import J, K, Network, loader, module, samples  # noqa: E402
from torchlssvm import FixedPoint, KernelLSSVM, LSSVMHead  # noqa: E402
from torchlssvm.events import Relabel, Remove  # noqa: E402
from torchlssvm.kernels import RBF  # noqa: E402
from torchlssvm.lightning import DataCorrection, FitHead, LabelAudit, LSSVMModule, OnlineProbe  # noqa: E402


def corrections(x: Any, y: Any) -> list[Any]:
    removed = [Remove(ids=[str(i)], x=x[i : i + 1], y=y[i : i + 1], event_id=f"r{i}") for i in (2, 11, 66)]
    changed = [
        Relabel(ids=[str(i)], x=x[i : i + 1], y_old=y[i : i + 1], y=(y[i : i + 1] + 1) % K, event_id=f"l{i}")
        for i in (5, 40)
    ]
    bad = Remove(ids=["999"], x=x[:1], y=y[:1], event_id="bad")
    return [*removed, bad, *changed]


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
    found["pending"] = [p.event.event_id for p in m.learner.corrector.pending.unanswered]
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

    net = Network()
    probe = OnlineProbe("backbone", K, window=1000)
    trainer(folder, world, callbacks=[FitHead(when="train_end"), FitHead(when="epoch_end"), probe]).fit(net, val, val)
    net.eval()
    found["fit"] = [net.head.n, net.head.w.flatten().tolist()]
    with torch.no_grad():
        found["fit_alone"] = LSSVMHead(8, K, grid=FixedPoint(64.0)).add(net.backbone(x), y).w.flatten().tolist()
    found["probe"] = [probe.accuracy, None if probe.probe is None else probe.probe.n]

    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    for given in sys.argv[1:]:
        place, size = given.split(":")
        codes = launch(int(size), main, Path(place))
        if any(codes):
            sys.exit(f"{place}: exit codes {codes}")
