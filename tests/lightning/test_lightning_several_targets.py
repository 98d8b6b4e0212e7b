"""LSSVMModule with several labels for each sample, and with numbers."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from sklearn.metrics import f1_score, r2_score
from torch.utils.data import DataLoader, TensorDataset

from tests.support.lightning_tools import Recorder, module, quiet, samples, truth
from torchlssvm.lightning import Indexed, LabelAudit, PredictionFile
from torchlssvm.store import SampleStore


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("targets", ["multilabel", "regression"])
def test_a_run(tmp_path: Path, targets: str, stored: bool) -> None:
    x, _ = samples()
    y = (x[:, :3] > 0.5).float() if targets == "multilabel" else (x[:, 1:4] * 64).round() / 64
    data = DataLoader(Indexed(TensorDataset(x, y)), batch_size=80)
    ear, m = Recorder(), module(targets=targets, store=str(tmp_path / "store") if stored else None)
    trainer = quiet(tmp_path, logger=ear.logger, max_epochs=2, callbacks=[PredictionFile(tmp_path / "p.csv")])
    trainer.fit(m, data, DataLoader(TensorDataset(x, y), batch_size=16))
    head = truth(x, y, targets=targets)
    assert m.head.digest() == head.digest()
    logged = {k: v for said in ear.logger.said for k, v in said.items()}
    predicted = head.predict(x)
    if targets == "multilabel":
        assert logged["val_f1"] == pytest.approx(f1_score(y, predicted, average="micro"), abs=1e-6)
        assert logged["val_f1_macro"] == pytest.approx(f1_score(y, predicted, average="macro"), abs=1e-6)
        assert logged["val_loss"] == pytest.approx(float((head(x) - (2 * y - 1)).square().mean()), abs=1e-6)
    else:
        assert logged["val_r2"] == pytest.approx(r2_score(y, predicted), abs=1e-6)
        assert logged["val_loss"] == pytest.approx(float((predicted - y).square().mean()), abs=1e-6)
    trainer.predict(m, DataLoader(x, batch_size=16))
    with open(tmp_path / "p.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = [
        [k for k in range(3) if row[k]] for row in (predicted if targets == "multilabel" else 0 * predicted).tolist()
    ]
    assert [[int(k) for k in row["predicted"].split()] for row in rows] == wanted
    if stored:
        with SampleStore(tmp_path / "store") as store:
            assert (store.head.targets, store.head.digest()) == (targets, head.digest())
    for bad in (2 * y - 1, y[:, 0]) if targets == "multilabel" else (y * float("nan"), y[:, 0]):
        with pytest.raises(ValueError, match=r"multilabel|NaN|shape"):
            quiet(tmp_path).validate(m, DataLoader(TensorDataset(x, bad), batch_size=16))
    with pytest.raises(ValueError, match="LabelAudit"):
        quiet(tmp_path, callbacks=[LabelAudit(tmp_path / "events.jsonl")]).fit(module(targets=targets), data)
