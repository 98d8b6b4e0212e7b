"""LSSVMModule keeps to its device: compared with the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support.lightning_events import carried
from tests.support.lightning_tools import J, K, loader, module, quiet, samples, truth
from torchlssvm.events import Relabel, Remove
from torchlssvm.features import RandomReLU
from torchlssvm.lightning import DataCorrection, DriftMonitor, FitHead, LabelAudit, LSSVMModule, OnlineProbe


def whole_run(folder: Path, accelerator: str, **options: Any) -> LSSVMModule:
    """All callbacks at once."""
    m = module(**options)
    x, y = samples()
    callbacks = [
        DataCorrection([carried(Remove, 3), carried(Relabel, 10)], every=2), DriftMonitor(every=2),
        LabelAudit(folder / "suspects.jsonl"), OnlineProbe("classifier.backbone", K, window=32),
        FitHead(when="train_end", every=1),
    ][: 4 if "store" in options else 5]  # fmt: skip
    run = quiet(folder, accelerator=accelerator, callbacks=callbacks)
    run.fit(m, loader(), DataLoader(TensorDataset(x, y), batch_size=16))
    run.save_checkpoint(folder / f"{accelerator}.ckpt")
    return m


@pytest.mark.cuda
@pytest.mark.parametrize("form", ["plain", "stored", "balanced", "feature map", "margin"])
def test_a_run_on_cuda_is_a_run_on_the_cpu(tmp_path: Path, form: str) -> None:
    options: dict[str, Any] = {
        "balanced": {"head_options": {"class_weight": "balanced"}},
        "feature map": {"feature_map": RandomReLU(J, 9), "grid": 64.0},
        "margin": {"head": "margin", "rho": 1.0},
    }.get(form, {})
    runs = []
    for name in ("cpu", "cuda"):
        (tmp_path / name).mkdir()
        if form == "stored":
            options = {"store": str(tmp_path / name / "store")}
        runs.append(whole_run(tmp_path / name, name, **options))
    here, there = runs
    assert there.head.device.type == "cpu"  # Lightning takes a module back when a run is over
    assert there.head.digest() == here.head.digest()
    if form != "feature map":
        file = tmp_path / "cuda" / "cuda.ckpt"
        loaded = LSSVMModule.load_from_checkpoint(file, weights_only=True, map_location="cpu")
        assert loaded.head.digest() == here.head.digest()
    x, y = samples()
    torch.testing.assert_close(there(x), here(x), atol=1e-10, rtol=1e-10)
    if form == "plain":
        assert here.head.digest() == truth(x, y).digest()  # FitHead was last
