"""LSSVMModule keeps to its device: compared with the CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.lightning_events import carried
from tests.support.lightning_tools import J, K, loader, module, quiet, samples, truth
from torchlssvm import KernelLSSVM, LagrangianSVM
from torchlssvm.events import Relabel, Remove
from torchlssvm.features import RandomReLU
from torchlssvm.kernels import RBF
from torchlssvm.lightning import DataCorrection, DriftMonitor, FitHead, LabelAudit, LSSVMModule, OnlineProbe

N = 12


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(J, 7), nn.ReLU(), nn.Linear(7, 5))


FORMS: dict[str, Any] = {
    "features": lambda: LSSVMModule("identity", K, in_features=J, grid=16.0),
    "network": lambda: LSSVMModule(network(), K, grid="auto"),
    "balanced": lambda: LSSVMModule(network(), K, grid=16.0, head_options={"class_weight": "balanced"}),
    "float sums": lambda: LSSVMModule(network(), K, grid=None),
    "feature map": lambda: LSSVMModule("identity", K, in_features=J, feature_map=RandomReLU(J, 9), grid=16.0),
    "margin": lambda: LSSVMModule(network(), K, head="margin", grid=16.0),
    "kernel": lambda: LSSVMModule("identity", K, in_features=J, head=KernelLSSVM(RBF(gamma=0.1), num_classes=K)),
    "lagrangian": lambda: LSSVMModule("identity", 2, in_features=J, head=LagrangianSVM(RBF(gamma=0.1))),
}


def by_hand(m: LSSVMModule, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """What a Trainer would ask of a module, in its order."""
    m.trainer = SimpleNamespace(
        train_dataloader=None, val_dataloaders=None, test_dataloaders=None, sanity_checking=False, current_epoch=0,
        ckpt_path=None, state=SimpleNamespace(fn="fit"), is_last_batch=False,
    )  # fmt: skip
    m.log = lambda *args, **options: None
    m.on_fit_start()
    out = {"loss": m.training_step((x, y), 0), "again": m.training_step((x[:4], y[:4]), 1)}
    m.on_train_epoch_end()
    m.on_validation_epoch_start()
    m.validation_step((x, y), 0)
    out |= dict(zip(("ids", "predicted", "y", "loss"), m.judged[0][0], strict=True))
    del out["ids"]
    out["scores"] = m.predict_step((x, y), 0)
    out["forward"] = m(x)
    return out


def whole_run(folder: Path, accelerator: str, **options: Any) -> LSSVMModule:
    """All callbacks at once."""
    m = module(**options)
    x, y = samples()
    callbacks = [
        DataCorrection([carried(Remove, 3), carried(Relabel, 10)], every=2), DriftMonitor(every=2),
        LabelAudit(folder / "suspects.jsonl"), OnlineProbe("classifier.backbone", K, window=32),
        FitHead(when="train_end", every=1),
    ][: 4 if options else 5]  # fmt: skip
    run = quiet(folder, accelerator=accelerator, callbacks=callbacks)
    run.fit(m, loader(), DataLoader(TensorDataset(x, y), batch_size=16))
    run.save_checkpoint(folder / f"{accelerator}.ckpt")
    return m


@pytest.mark.cuda
@pytest.mark.parametrize("stored", [False, True])
def test_a_run_on_cuda_is_a_run_on_the_cpu(tmp_path: Path, stored: bool) -> None:
    for name in ("cpu", "cuda"):
        (tmp_path / name).mkdir()
    options = {name: {"store": str(tmp_path / name / "store")} if stored else {} for name in ("cpu", "cuda")}
    here = whole_run(tmp_path / "cpu", "cpu", **options["cpu"])
    there = whole_run(tmp_path / "cuda", "cuda", **options["cuda"])
    assert there.head.device.type == "cpu"  # Lightning takes a module back when a run is over
    assert there.head.digest() == here.head.digest()
    loaded = LSSVMModule.load_from_checkpoint(tmp_path / "cuda" / "cuda.ckpt", weights_only=True, map_location="cpu")
    assert loaded.head.digest() == here.head.digest()
    x, y = samples()
    torch.testing.assert_close(there(x), here(x), atol=1e-10, rtol=1e-10)
    if not stored:
        assert here.head.digest() == truth(x, y).digest()  # FitHead was last


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS)
def test_steps_give_the_same_on_cuda(form: str) -> None:
    torch.manual_seed(0)
    here = FORMS[form]()
    torch.manual_seed(0)
    there = FORMS[form]().to("cuda")
    x, y = samples(N)
    y = y % here.head.num_classes if hasattr(here.head, "num_classes") else y % 2
    mine, other = by_hand(here, x, y), by_hand(there, x.cuda(), y.cuda())
    for name, value in mine.items():
        torch.testing.assert_close(other[name].cpu(), value, atol=1e-5, rtol=1e-5)
